"""A version pulled out of an object store is whole before `current` names it, whatever fails, and a real SGLang loads it."""

from __future__ import annotations

import ast
import asyncio
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import aiohttp
import msgspec
import pytest
import torch
from engine_fixture import LiveEngine
from engine_requests import generate, worst
from safetensors.torch import load_file
from test_external_engine import mirrored
from typer.testing import CliRunner

from physarum.actors.actorctl.main import app
from physarum.actors.engine.control import EngineControl
from physarum.actors.tools import pulling as following
from physarum.actors.tools.errors import NotInRunError
from physarum.actors.tools.pulling import Asked, PullError
from physarum.bus.version import Fork, Version
from physarum.weightsync.errors import (
    BucketError,
    BucketUnfitError,
    ChunkAlteredError,
    ChunkMissingError,
    ObjectAbsentError,
    ServiceUnreachableError,
    StaleVersionError,
    UpdateRefusedError,
)
from physarum.weightsync.manifest import Manifest
from physarum.weightsync.mirror import pulling
from physarum.weightsync.mirror.bucket import Bucket
from physarum.weightsync.mirror.copying import Copying
from physarum.weightsync.mirror.pulling import CURRENT, Pulled, current, pull
from physarum.weightsync.mirror.reading import Mirror, MirrorHolder
from physarum.weightsync.mirror.record import read_record
from physarum.weightsync.snapshot import Snapshot

pytestmark = pytest.mark.timeout(120)

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket/run/weights"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "pulled"


def tensors(seed: int) -> Tensors:
    """A large one that never changes, two small ones that do."""
    make = torch.Generator().manual_seed(seed)
    return {"fixed": torch.arange(400_000.0), "a": torch.randn(64, generator=make), "b": torch.randn(8, generator=make)}


def put(
    url: str, number: int, named: Tensors | None = None, epoch: int = 1, key: str | None = None, **told: object
) -> Manifest:
    """policy@EPOCH.NUMBER in the store."""
    snapshot = Snapshot.take((named or tensors(number)).items(), 4 << 20)
    entries, chunks = snapshot.entries("xxh3")
    manifest = Manifest(
        version=Version("policy", epoch, number), parent=None, model_digest="m", tensors=entries,
        total_bytes=snapshot.total_bytes, step=number, created=1.0,
    )  # fmt: skip
    config = Path(url.removeprefix("file://")).parent / "config.json"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text("{}")
    Copying(Bucket(url), lambda: None, key, 1).copy(manifest, chunks.__getitem__, {config.name: config}, **told)  # type: ignore[arg-type]
    snapshot.close()
    return manifest


def mirror(url: str, key: str | None = None) -> Mirror:
    return Mirror(Bucket(url), key)


def assert_is(place: Path, number: int, epoch: int = 1) -> None:
    """`current` is that version, whole."""
    assert current(place) == Version("policy", epoch, number)
    found = load_file(place / CURRENT / "model.safetensors")
    assert found.keys() == tensors(number).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(number).items())
    assert (place / CURRENT / "config.json").read_text() == "{}"


def test_a_version_becomes_a_folder_and_the_next_one_reads_only_what_changed(url: str, place: Path) -> None:
    first = put(url, 1)
    pulled = pull(mirror(url), place)
    assert pulled == Pulled(
        label="policy@1.1", folder=str(place / "policy@1.1"), new=True, fetched_bytes=first.total_bytes
    )
    assert_is(place, 1)
    opened = (place / CURRENT / "model.safetensors").open("rb")
    put(url, 2)
    pulled = pull(mirror(url), place)
    assert (pulled.fetched_bytes, pulled.reused_bytes) == (72 * 4, 1_600_000)
    assert_is(place, 2)
    assert pull(mirror(url), place) == Pulled(label="policy@1.2", folder=str(place / "policy@1.2"), new=False)
    put(url, 3)
    pull(mirror(url), place)
    assert_is(place, 3)
    assert sorted(path.name for path in place.glob("policy@*")) == ["policy@1.2", "policy@1.3"]
    shutil.copyfile(f"/proc/self/fd/{opened.fileno()}", place / "kept.safetensors")
    opened.close()
    assert torch.equal(
        load_file(place / "kept.safetensors")["a"], tensors(1)["a"]
    )  # a server reads on in what it opened


def test_a_look_that_finds_nothing_new_reads_nothing(url: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest of a large model is megabytes."""
    put(url, 1)
    known = pull(mirror(url), place)
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "get", None)
        assert pull(mirror(url), place, known=known) == Pulled(label=known.label, folder=known.folder, new=False)
    (place / CURRENT).unlink()
    assert pull(mirror(url), place, known=known).new
    assert_is(place, 1)


def test_a_version_may_be_named_also_an_older_one_and_the_newest_never_goes_back(url: str, place: Path) -> None:
    put(url, 1)
    put(url, 2)
    pull(mirror(url), place)
    pull(mirror(url), place, "policy@1.1")
    assert_is(place, 1)
    pull(mirror(url), place)
    assert_is(place, 2)
    Bucket(url).remove("versions/policy@1.2.version")
    with pytest.raises(StaleVersionError, match=r"nothing newer than policy@1.1, and .* is policy@1.2"):
        pull(mirror(url), place)
    with pytest.raises(ObjectAbsentError):
        pull(mirror(url), place, "policy@1.7")
    assert_is(place, 2)


def test_a_withdrawn_version_is_refused_by_name(url: str, place: Path) -> None:
    put(url, 1)
    put(url, 2)
    put(url, 1, epoch=2, withdrawn=(Fork(1, 1),))
    with pytest.raises(BucketUnfitError, match=r"policy@1.2 was withdrawn, as policy@2.1 says"):
        pull(mirror(url), place, "policy@1.2")
    pull(mirror(url), place)
    assert_is(place, 1, epoch=2)


@pytest.mark.parametrize("damage", ["altered", "missing", "file altered", "record altered"])
def test_damage_in_the_store_is_named_and_leaves_what_is_there(url: str, place: Path, damage: str) -> None:
    put(url, 1)
    pull(mirror(url), place)
    put(url, 2)
    bucket = Bucket(url)
    record = read_record(bucket, Version("policy", 1, 2), None)
    changed = next(one for one in record.objects if one.size == 72 * 4)
    expected: type[Exception] = ChunkAlteredError
    if damage == "altered":
        bucket.put(changed.key, bytes(changed.size))
    elif damage == "missing":
        bucket.remove(changed.key)
        expected = ChunkMissingError
    elif damage == "file altered":
        bucket.put(record.files[0].key, b"[]")
    else:
        bucket.put("versions/policy@1.2.version", b"half")
        assert not pull(mirror(url), place).new  # an older one is the newest that can be read
        assert_is(place, 1)
        return
    with pytest.raises(expected, match="is not there" if damage == "missing" else "remove it there"):
        pull(mirror(url), place)
    assert_is(place, 1)
    folders = {path.name for path in place.iterdir() if path.is_dir() and not path.is_symlink()}
    assert folders == {"policy@1.1", ".partial-policy@1.2"}, "what was brought is taken up when the store is mended"
    if damage == "file altered":
        bucket.remove(record.files[0].key)
    put(url, 3)
    pulled = pull(mirror(url), place, keep=1)
    assert_is(place, 3)
    assert (pulled.fetched_bytes, pulled.reused_bytes) == (72 * 4, 1_600_000)
    assert {path.name for path in place.iterdir() if path.is_dir() and not path.is_symlink()} == {"policy@1.3"}


def _failing_from(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """The store answers for one object no more."""
    get = Bucket.get

    def failing(bucket: Bucket, wanted: str) -> bytes:
        if wanted == key:
            raise BucketError(f"{wanted}: connection reset")
        return get(bucket, wanted)

    monkeypatch.setattr(Bucket, "get", failing)
    monkeypatch.setattr(pulling, "AGAIN_S", ())


@pytest.mark.parametrize("then", ["as it was", "bytes altered", "another size"])
def test_what_an_attempt_that_failed_had_brought_is_not_read_again(
    url: str, place: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """Hundreds of gigabytes began at nothing each time that a store was away for some seconds."""
    put(url, 1)
    large, small = sorted(read_record(Bucket(url), Version("policy", 1, 1), None).objects, key=lambda one: -one.size)
    with monkeypatch.context() as patched:
        _failing_from(patched, small.key)
        with pytest.raises(ServiceUnreachableError, match="connection reset"):
            pull(mirror(url), place)
    assert current(place) is None
    partial = place / ".partial-policy@1.1" / "model.safetensors"
    if then == "bytes altered":
        with partial.open("r+b") as file:
            file.seek(-1000, 2)
            file.write(b"x")
    elif then == "another size":
        with partial.open("ab") as file:
            file.write(b"x")
    pulled = pull(mirror(url), place)
    assert_is(place, 1)
    again = 0 if then == "as it was" else large.size
    assert (pulled.fetched_bytes, pulled.reused_bytes) == (small.size + again, large.size - again)
    assert not list(place.glob(".partial-*"))


def test_nothing_is_taken_up_in_a_file_that_a_server_may_have_open(
    url: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old version that was on its way out when its process was killed is no attempt that failed."""
    put(url, 1)
    pull(mirror(url), place)
    opened = (place / CURRENT / "model.safetensors").open("rb")
    put(url, 2)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda path, ignore_errors: None)  # as if killed before
        pull(mirror(url), place, keep=1)
    put(url, 3)
    pull(mirror(url), place, keep=1)
    shutil.copyfile(f"/proc/self/fd/{opened.fileno()}", place / "kept.safetensors")
    opened.close()
    assert torch.equal(load_file(place / "kept.safetensors")["a"], tensors(1)["a"])


@pytest.mark.parametrize("answer", ["none", "half"])
def test_one_bad_answer_of_the_store_does_not_cost_what_was_read_before(
    url: str, place: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """Each object is answered badly once. A large model never came: all of it was read again, up to the next failure."""
    put(url, 1)
    failed: set[str] = set()
    get = Bucket.get

    def once(bucket: Bucket, key: str) -> bytes:
        if not key.startswith("objects/") or key in failed or key in files:
            return get(bucket, key)
        failed.add(key)
        if answer == "none":
            raise BucketError(f"{key}: slow down")
        return get(bucket, key)[:-1]

    files = {one.key for one in read_record(Bucket(url), Version("policy", 1, 1), None).files}
    monkeypatch.setattr(Bucket, "get", once)
    monkeypatch.setattr(pulling, "AGAIN_S", (0.0,))
    pull(mirror(url), place)
    assert len(failed) == 2
    assert_is(place, 1)


def test_a_version_that_goes_in_the_store_while_it_is_pulled_is_told_with_what_to_do(
    url: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked like damage, for ever: each version went before the last of its objects was read."""
    put(url, 1)
    read, one = MirrorHolder.chunk, threading.Lock()

    def later(holder: MirrorHolder, digest: str) -> memoryview:
        with one:  # several threads pull
            if Mirror(Bucket(url), None).latest() == Version("policy", 1, 1):
                put(url, 2)
                Copying(Bucket(url), lambda: None, None, 1).retain(1)
        return read(holder, digest)

    monkeypatch.setattr(MirrorHolder, "chunk", later)
    with pytest.raises(ChunkMissingError, match=r"let go of policy@1.1 within .*checkpoint.versions.keep"):
        pull(mirror(url), place)
    pull(mirror(url), place)
    assert_is(place, 2)


def test_a_damaged_older_version_here_is_not_copied_from(url: str, place: Path) -> None:
    put(url, 1)
    pull(mirror(url), place)
    file = place / "policy@1.1" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2000:] = bytes(2000)
    file.write_bytes(data)
    put(url, 2)
    pull(mirror(url), place)
    assert_is(place, 2)


def test_another_run_and_another_puller_are_refused(url: str, place: Path, tmp_path: Path) -> None:
    put(url, 1)
    pull(mirror(url), place)
    other = f"file://{tmp_path}/bucket/other/weights"
    put(other, 1, tensors(9))
    with pytest.raises(BucketUnfitError, match="was pulled from another run"):
        pull(mirror(other), place)
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl,sys; f=open(sys.argv[1],'a'); fcntl.flock(f,2); print(flush=True); input()",
         str(place / ".pulling")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None
    holder.stdout.readline()
    with pytest.raises(UpdateRefusedError, match="another process pulls into"):
        pull(mirror(url), place)
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert not pull(mirror(url), place).new
    assert_is(place, 1)


def test_a_folder_of_somebody_else_is_left_alone(url: str, place: Path) -> None:
    put(url, 1)
    (place / "policy@1.1").mkdir(parents=True)
    (place / "policy@1.1" / "mine.txt").write_text("mine")
    with pytest.raises(Exception, match="cannot be written"):
        pull(mirror(url), place)
    assert (place / "policy@1.1" / "mine.txt").read_text() == "mine" and current(place) is None


DIES = """
import os, signal, sys
from pathlib import Path
from physarum.weightsync.mirror.bucket import Bucket
from physarum.weightsync.mirror.pulling import pull
from physarum.weightsync.mirror.reading import Mirror

left = [int(sys.argv[3])]
def dying(call):
    def called(*arguments):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments)
    return called

for name in ("fsync", "rename", "replace", "symlink"):
    setattr(os, name, dying(getattr(os, name)))
pull(Mirror(Bucket(sys.argv[1]), None), Path(sys.argv[2]), None, 1)
"""


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_moment_current_is_whole_and_the_next_pull_leaves_nothing_behind(
    url: str, place: Path, every: int
) -> None:
    put(url, 1)
    pull(mirror(url), place)
    put(url, 2)
    seen = set()
    for dies_at in range(0, 30, every):
        for path in place.iterdir():  # as it was
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        pull(mirror(url), place, "policy@1.1")
        status = subprocess.run([sys.executable, "-c", DIES, url, str(place), str(dies_at)]).returncode
        found = current(place)
        assert found is not None
        seen.add(found.number)
        assert_is(place, found.number)
        if status == 0:
            break
        pull(mirror(url), place, keep=1)
        assert_is(place, 2)
        left = {path.name for path in place.iterdir() if path.is_dir()} - {CURRENT}
        assert left == {"policy@1.2"}, dies_at
    assert status == 0 and dies_at > 6 and seen == {1, 2}


@pytest.mark.parametrize("first", ["config.json", "model.safetensors", ".physarum-version"])
def test_killed_while_an_old_version_goes_it_is_pulled_again_whole(
    url: str, place: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """A folder that had lost some of its files still counted as that version, or kept its name from it for ever."""
    for number in (1, 2):
        put(url, number)
        pull(mirror(url), place)

    class Killed(BaseException):
        """As SIGKILL after the first file."""

    def killed(folder: Path, ignore_errors: bool) -> None:
        (folder / first).unlink()
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(Killed):
            pull(mirror(url), place, keep=1)
    pull(mirror(url), place, "policy@1.1")
    assert_is(place, 1)


class Server(HTTPServer):
    """Somebody's server that is told of versions; `status` is what it answers."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.told: list[dict[str, str]] = []
        Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.server.told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(b"no room")

    def log_message(self, format: str, *values: object) -> None:
        """Says nothing."""


@pytest.fixture
def server() -> AsyncIterator[Server]:
    made = Server()
    yield made  # type: ignore[misc]
    made.shutdown()
    made.server_close()


class Enough(Exception):
    """The test has seen what it wanted."""


def test_who_follows_tells_of_each_version_until_it_is_taken(
    url: str, place: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Each look is a step of this test: a sleep that does something instead."""
    put(url, 1)
    then = f"http://127.0.0.1:{server.server_port}/update_weights_from_disk"
    asked = Asked(url=url.removesuffix("/run/weights"), run="run", folder=place, then=then)
    steps: list[Callable[[], object]] = [
        lambda: put(url, 2),
        lambda: setattr(server, "status", 500),
        lambda: put(url, 3),
        lambda: setattr(server, "status", 200),
        lambda: None,
    ]
    heard: list[str] = []

    def sleep(seconds: float) -> None:
        assert seconds == 7
        if not steps:
            raise Enough
        steps.pop(0)()

    with pytest.raises(Enough):
        following.follow(asked, 7, lambda pulled: heard.append(pulled.label), sleep)
    assert [one["weight_version"] for one in server.told] == ["policy@1.1", "policy@1.2", "policy@1.3", "policy@1.3"]
    assert server.told[-1]["model_path"] == str(place.resolve() / "policy@1.3")
    assert heard == ["policy@1.1", "policy@1.2"]  # the third was new when nobody took it
    assert "answered 500: no room; trying again in 7 s" in caplog.text
    assert_is(place, 3)


@pytest.mark.parametrize(
    "answer", [b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nhal"]
)
def test_a_server_that_answers_nonsense_does_not_end_who_follows(url: str, place: Path, answer: bytes) -> None:
    """It goes down in the middle of an answer, or something else listens there for a moment."""
    put(url, 1)

    def answering(listener: socket.socket) -> None:
        connection = listener.accept()[0]
        with connection:
            connection.recv(1 << 16)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        then = f"http://127.0.0.1:{listener.getsockname()[1]}/update_weights_from_disk"
        thread = Thread(target=answering, args=(listener,))
        thread.start()
        with pytest.raises(PullError, match=r"policy@1.1 is pulled, and http\S+ did not take it: "):
            following.once(Asked(url=url.removesuffix("/weights"), folder=place, then=then))
        thread.join()


def test_a_command_is_told_too_and_what_fails_is_an_error(url: str, place: Path, tmp_path: Path) -> None:
    put(url, 1)
    asked = Asked(url=url.removesuffix("/weights"), folder=place, then="false")
    for _ in range(2):  # told again, until it took it
        with pytest.raises(PullError, match=r"policy@1.1 is pulled, and 'false' failed"):
            following.once(asked)
    (tmp_path / "hook.sh").write_text(f"printf %s $PHYSARUM_VERSION$PHYSARUM_FOLDER >> {tmp_path}/took")
    took = f"sh {tmp_path}/hook.sh"
    for _ in range(2):
        following.once(msgspec.structs.replace(asked, then=took))
    assert (tmp_path / "took").read_text() == f"policy@1.1{place.resolve()}/policy@1.1"
    for wrong in ("bucket/prefix", "s3://me:hunter2@bucket/prefix"):
        with pytest.raises(PullError, match="without user or password") as refused:
            following.once(Asked(url=wrong, folder=place))
        assert "hunter2" not in str(refused.value)
    with pytest.raises(NotInRunError, match="has no version"):
        following.once(Asked(url=f"{asked.url}x", folder=place))


def test_the_command_pulls_and_says_what_it_did(url: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(url, 1, key="s3cret")
    words = ["weights", "pull", url.removesuffix("/run/weights"), str(place), "--run", "run"]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 1 and "is sealed with a key" in refused.stderr and "--key-env" in refused.stderr
    monkeypatch.setenv("WEIGHTS_KEY", "s3cret")
    found = CliRunner().invoke(app, [*words, "--key-env", "WEIGHTS_KEY"])
    assert found.exit_code == 0 and "policy@1.1 is current in" in found.stdout and "(1.5 MiB read" in found.stdout
    assert CliRunner().invoke(app, [*words, "--key-env", "WEIGHTS_KEY", "--version", "policy@9.9"]).exit_code == 5
    assert_is(place, 1)


NAMES = """
import sys
from runpy import run_module
module = sys.argv.pop(1)
try:
    run_module(module, run_name="__main__")
finally:
    print(sorted({one.partition(".")[0] for one in sys.modules}), file=sys.stderr)
"""


def test_in_a_servers_own_environment_it_needs_few_packages(url: str, place: Path) -> None:
    """Neither torch nor a bus nor a trainer's framework: what is imported, and what the program imports as it works."""
    put(url, 1)
    module = "physarum.actors.actorctl.pull"
    words = [url.removesuffix("/weights"), str(place), "--json"]
    done = subprocess.run([sys.executable, "-c", NAMES, module, *words], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["label"] == "policy@1.1"
    imported = set(ast.literal_eval(done.stderr.splitlines()[-1]))
    assert {"numpy", "fsspec"} <= imported
    assert not imported & {"torch", "nats", "megatron", "transformers", "safetensors", "uvloop"}
    assert_is(place, 1)


async def test_a_real_server_takes_a_pulled_folder_under_its_label(engine: LiveEngine, url: str, place: Path) -> None:
    """As --then does it: what the server answers then is of these weights."""
    mirrored(url, engine, seed=0)
    manifest = mirrored(url, engine, seed=3)
    then = f"{engine.url}/update_weights_from_disk"
    asked = Asked(url=url.removesuffix("/weights"), folder=place, then=then, then_timeout_s=60.0)
    pulled = await asyncio.to_thread(following.once, asked)
    assert pulled.label == manifest.label
    assert (place / CURRENT / "config.json").is_file()
    async with aiohttp.ClientSession() as session:
        assert await EngineControl(engine.url, session).live_label() == manifest.label
        answer = await generate(engine, 5, tokens=8)
        assert worst(engine, 5, answer, 0, 8, seed=3) < 1e-3
