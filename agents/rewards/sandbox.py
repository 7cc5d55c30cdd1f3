"""One program that a policy wrote, run where it can do no harm: bubblewrap, with limits and without rights.

    [setpriv: another user, as root] prlimit --> bwrap: own user, pid, net, ipc namespaces --> prlimit --> timeout --> python

Inside: /usr read-only, /tmp of bounded size in memory, everything else absent or read-only; no network, no capability, no
variable of ours, a bounded number of processes. Invariant: when `run` returns or is cancelled, nothing that the program
started is left, and whether the program ran at all is known from bwrap's own report, which the program cannot write.

A process group of its own holds bwrap and the first process of the pid namespace, so one signal ends both, also while the
sandbox is still being made; the namespace dies with its first process, whatever the program moved into other sessions. Should
this process be killed in that very moment, `timeout` ends what was started soon after its time, and a bwrap that had not come
to start anything may be left, idle.

Memory is bounded per process, so at worst `processes` times `memory_mib`: a bound on their sum needs a cgroup around the
run, which is the operator's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from dataclasses import dataclass
from typing import Final

import orjson

from physarum.agents.rewards.errors import SandboxError
from physarum.configs.reward_types import CodeReward

REMEDY: Final = (
    "install bubblewrap and util-linux (apt-get install bubblewrap util-linux python3), or use another reward"
)
_UID: Final = 60001
"""Who programs run as when we are root, who is subject to no limit of processes; no account need exist."""
_INNER_PRLIMIT: Final = "/usr/bin/prlimit"
_TIMEOUT: Final = "/usr/bin/timeout"
_TIMEOUT_MARGIN_S: Final = 5.0
_NOFILE: Final = 64
_PROBE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended: its exit code (128 + signal), None where it was stopped, for the reason in `stopped`."""

    exit_code: int | None
    output: bytes
    stopped: str = ""


def missing_programs(options: CodeReward) -> list[str]:
    """Of those that a sandbox is made of, what this host has not."""
    needed = ["bwrap", "prlimit", *(["setpriv"] if os.geteuid() == 0 else [])]
    missing = [name for name in needed if shutil.which(name) is None]
    return missing + [path for path in (_INNER_PRLIMIT, _TIMEOUT, options.python) if not os.access(path, os.X_OK)]


class Sandbox:
    """Runs one program after the other; nothing is kept between them."""

    def __init__(self, options: CodeReward) -> None:
        self._options = options

    async def probe(self) -> None:
        """Raises SandboxError unless programs can be run here."""
        if missing := missing_programs(self._options):
            raise SandboxError(f"found no {', '.join(missing)}; expected the programs of the sandbox. Remedy: {REMEDY}")
        ended = await self.run("print(6 * 7)", {}, b"", _PROBE_S)
        if ended.exit_code != 0 or ended.output.strip() != b"42":
            raise SandboxError(f"a first program in the sandbox ended as {ended}; expected exit code 0 and 42")

    async def run(self, program: str, files: dict[str, str], stdin: bytes, timeout_s: float) -> Ended:
        """`program` as /main.py, `files` read-only beside it. Raises SandboxError when it was not run."""
        with contextlib.ExitStack() as stack:
            sources = {f"/{name}": _in_memory(text, stack) for name, text in {**files, "main.py": program}.items()}
            reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            stack.callback(os.close, reader)
            try:
                process = await self._started(sources, writer)
            finally:
                os.close(writer)
            return await self._watched(process, stdin, timeout_s, reader)

    async def _started(self, sources: dict[str, int], status: int) -> asyncio.subprocess.Process:
        """A start is never left half done: who is cancelled meanwhile waits for it, and then ends what was started."""
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *self._command(sources, status),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(*sources.values(), status),
                process_group=0,
            )
        )
        try:
            return await asyncio.shield(starting)
        except OSError as error:
            raise SandboxError(f"the sandbox cannot be started: {error}. Remedy: {REMEDY}") from error
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                process = await starting
                _kill(process)
                await process.wait()
            raise

    async def _watched(self, process: asyncio.subprocess.Process, stdin: bytes, timeout_s: float, status: int) -> Ended:
        """Until the program ends, is late or says too much. Cancelling kills it too."""
        limit = self._options.output_kib << 10
        output, complaints, stopped = _Kept(process.stdout, limit), _Kept(process.stderr, limit), ""
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                group.create_task(_feed(process, stdin))
                group.create_task(complaints.read())
                await output.read(until_full=True)
                if output.full:
                    stopped = f"it wrote more than {self._options.output_kib} KiB"
                    _kill(process)
                    await output.read()
                await process.wait()
        except TimeoutError:
            stopped = f"it ran for longer than {timeout_s:g} s"
        finally:
            _kill(process)
            await asyncio.gather(
                output.read(), complaints.read()
            )  # a pipe that is not read keeps its process from ending
            await process.wait()
        code = _exit_code(_read_all(status))
        if code is None and not stopped:
            said = bytes(complaints.bytes[-300:]).decode(errors="replace").strip()
            raise SandboxError(f"the sandbox did not run the program (status {process.returncode}): {said}")
        return Ended(None if stopped else code, bytes(output.bytes), stopped)

    def _command(self, sources: dict[str, int], status: int) -> list[str]:
        one = self._options
        user = ["setpriv", f"--reuid={_UID}", f"--regid={_UID}", "--clear-groups", "--no-new-privs"]
        limits = [f"--as={one.memory_mib << 20}", f"--fsize={one.disk_mib << 20}", f"--nofile={_NOFILE}", "--core=0"]
        limits.append(f"--cpu={max(1, round(one.timeout_s) + 1)}")
        inside = ["--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
        inside += ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
        for name in ("bin", "lib", "lib64"):
            inside += ["--symlink", f"usr/{name}", f"/{name}"]
        inside += ["--size", str(one.disk_mib << 20), "--tmpfs", "/tmp"]
        for path, descriptor in sources.items():
            inside += ["--ro-bind-data", str(descriptor), path]
        inside += ["--remount-ro", "/", "--chdir", "/tmp", "--clearenv", "--setenv", "PATH", "/usr/bin"]
        inside += [
            "--setenv",
            "PYTHONHASHSEED",
            "0",
            "--setenv",
            "OMP_NUM_THREADS",
            "1",
            "--json-status-fd",
            str(status),
        ]
        seconds = f"{one.timeout_s + _TIMEOUT_MARGIN_S:g}"
        run = [
            _INNER_PRLIMIT,
            f"--nproc={one.processes}",
            _TIMEOUT,
            "--signal=KILL",
            seconds,
            one.python,
            "-I",
            "/main.py",
        ]
        return [*(user if os.geteuid() == 0 else []), "prlimit", *limits, "bwrap", *inside, "--", *run]


def _in_memory(text: str, stack: contextlib.ExitStack) -> int:
    """A descriptor from which bwrap reads `text`. Lone surrogates, which no file can hold, become question marks."""
    descriptor = os.memfd_create("program")
    stack.callback(os.close, descriptor)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(text.encode(errors="replace"))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _kill(process: asyncio.subprocess.Process) -> None:
    """bwrap and the first process of its namespace, and with that all others."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


async def _feed(process: asyncio.subprocess.Process, stdin: bytes) -> None:
    """A program need not read what it is given."""
    assert process.stdin is not None  # it was asked for
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(stdin)
        await process.stdin.drain()
    process.stdin.close()


class _Kept:
    """The first `limit` bytes of a stream; what comes behind them is read and thrown away."""

    def __init__(self, stream: asyncio.StreamReader | None, limit: int) -> None:
        assert stream is not None  # it was asked for
        self._stream, self._limit = stream, limit
        self.bytes = bytearray()
        self.full = False

    async def read(self, *, until_full: bool = False) -> None:
        """To the end of the stream, or to the first byte over the limit."""
        while part := await self._stream.read(1 << 16):
            self.full |= len(self.bytes) + len(part) > self._limit
            self.bytes += part[: self._limit - len(self.bytes)]
            if self.full and until_full:
                return


def _read_all(descriptor: int) -> bytes:
    """What is in a pipe now; never waits."""
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return b""


def _exit_code(report: bytes) -> int | None:
    """Of bwrap's report, a JSON document a line; None where the program was not run to an end."""
    for line in report.splitlines():
        with contextlib.suppress(orjson.JSONDecodeError):
            if isinstance(code := orjson.loads(line).get("exit-code"), int):
                return code
    return None
