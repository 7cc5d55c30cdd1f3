"""Actors without work, for tests of the supervisor: `python supervisor_stub.py FOLDER ROLE INSTANCE`.

What each does is said by `extra.stub.<instance>` of the run's configuration:
    serve          becomes ready and waits to be drained (the default)
    train STEPS    writes a ledger of STEPS steps, says that training is done, then as `serve`
    evaluate       scores the start, and the end once training is done, then as `serve`
    exit STATUS    ends with STATUS before it is ready
    crash STATUS   becomes ready, then ends with STATUS
    finish         becomes "finished" and ends with 0
    deaf           is ready, and does not hear SIGTERM
    family         starts a child in its own session, then as `serve`
With STUB_GATE set, `train` waits for the file of that name before it says that it is done.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

from physarum.actors import main as actor_main
from physarum.actors import states
from physarum.actors.context import RunFolder
from physarum.actors.runtime import Actor
from physarum.actors.wire import publish_task
from physarum.bus.ledger import Ledger, Planned, PlanRecord, RollbackRecord, StepRecord
from physarum.bus.records import Task

GROUP = 4


def command(folder: RunFolder, role: str, instance: str) -> list[str]:
    """In the place of `launcher.actor_command`."""
    return [sys.executable, str(Path(__file__).absolute()), str(folder.path), role, instance]


class StubActor(Actor):
    role: ClassVar[str] = "stub"

    async def run(self) -> None:
        behaviour = self.config.extra.get("stub", {})
        assert isinstance(behaviour, dict)
        words = str(behaviour.get(self.context.identity.instance, "serve")).split()
        match words:
            case ["exit", status]:
                sys.stderr.write("the stub ends on purpose\n")
                os._exit(int(status))
            case ["crash", status]:
                await self._ready()
                os._exit(int(status))
            case ["finish"]:
                self.become("finished")
                await asyncio.sleep(0.3)  # the announcement leaves
                return
            case ["deaf"]:
                for number in (signal.SIGTERM, signal.SIGINT):
                    asyncio.get_running_loop().remove_signal_handler(number)
                    signal.signal(number, signal.SIG_IGN)
                await self._ready()
            case ["family"]:
                child = subprocess.Popen(["sleep", "600"])
                (self.context.folder.path / "family.pid").write_text(str(child.pid))
                await self._ready()
            case ["train", steps]:
                await self._ready()
                await self._train(int(steps))
            case ["evaluate"]:
                await self._evaluate()
        await self._ready()
        await self.context.draining.wait()

    async def _ready(self) -> None:
        self.become("ready")
        await self._until_announced()

    async def _until_announced(self) -> None:
        while self._announce_now.is_set():
            await asyncio.sleep(0.01)

    async def _train(self, steps: int) -> None:
        context = self.context
        done = context.run_register(states.TrainerDone)
        if (await done.get(states.TRAINER_DONE)).value is not None:
            return
        pen = Ledger(context.bus, context.publisher, 0, 1)
        await pen.append(RollbackRecord(old_epoch=0, new_epoch=1, fork=0))
        for number in range(1, steps + 1):
            await self._step(pen, number)
        await self._issue(steps)
        await self._gate()
        if context.draining.is_set():
            return
        context.folder.model.mkdir(exist_ok=True)
        (context.folder.model / "config.json").write_text("{}")
        version, model = f"policy@1.{steps}", str(context.folder.model)
        record = states.TrainerDone(reason="stub", version=version, steps=steps, model=model, at=time.time())
        await done.put(record, states.TRAINER_DONE)

    async def _issue(self, steps: int) -> None:
        """One execution more than was trained: it stays in flight."""
        task = Task(
            id="main/0/0/0",
            run=self.context.bus.run,
            source="main",
            ordinal=steps * GROUP,
            group="g",
            group_size=1,
            member=0,
        )
        await publish_task(self.context, task)
        position = states.SourcePosition(epoch=0, index=0, issued=steps * GROUP + 1, token=1)
        await self.context.run_register(states.SourcePosition).put(position, states.SOURCE_POSITION, "main")

    async def _step(self, pen: Ledger, number: int) -> None:
        began = time.time()
        rows = [
            Planned(n, f"main/0/{number}/{n}", "main", (number - 1) * GROUP + n, 0, "g", 0.0, 10, 0, [])
            for n in range(GROUP)
        ]
        plan = await pen.append(PlanRecord(epoch=1, at_number=number, executions=rows))
        step = StepRecord(
            epoch=1, number=number, plan=plan, changed=True, trained=GROUP, masked=0, tokens_trained=40, tokens_masked=0,
            ages={0: 30, 1: 10}, multi_version_samples=1, reward_mean=0.5, wait_s=0.0, started_at=began,
            finished_at=time.time(),
        )  # fmt: skip
        await pen.append(step)
        values = {"number": number, "loss": 0.25, "reward_mean": 0.5, "ages": {0: 30, 1: 10}, "executions": GROUP}
        await self.context.emit("step", values)
        await self.context.emit("publish", {"version": f"policy@1.{number}"})

    async def _gate(self) -> None:
        gate = os.environ.get("STUB_GATE")
        while gate and not Path(gate).exists() and not self.context.draining.is_set():
            await asyncio.sleep(0.05)

    async def _evaluate(self) -> None:
        register = self.context.run_register(states.EvalScore)
        await register.put(_score(0.25), states.EVAL_START)
        await self._ready()
        done = self.context.run_register(states.TrainerDone)
        async with done.watch(states.TRAINER_DONE) as changed:
            while (await done.get(states.TRAINER_DONE)).value is None:
                await changed.wait()
                changed.clear()
        await register.put(_score(0.75), states.EVAL_END)


def _score(score: float) -> states.EvalScore:
    now = time.time()
    return states.EvalScore(
        version="policy@1.0", score=score, problems=4, scored=4, off_version=0, started_at=now, finished_at=now
    )


if __name__ == "__main__":
    actor_main.actor_class = lambda role: StubActor
    sys.exit(actor_main.main(sys.argv[1:]))
