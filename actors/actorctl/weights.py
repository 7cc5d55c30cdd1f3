"""`actorctl weights ls|diff|verify|pin|unpin|rollback|resume|pull`: a run's weight versions and who serves them."""

from __future__ import annotations

import time
from typing import Annotated, Final, Optional

import msgspec
import typer
import uvloop

from physarum.actors.actorctl import exits, target
from physarum.actors.actorctl.options import Json, Policy, Root, Target, Verbose, group, print_json, say
from physarum.actors.actorctl.pull import pull
from physarum.actors.context import RunFolder
from physarum.actors.tools import rolling_back, weights
from physarum.actors.tools.access import opened

app = group("Weight versions: what was published, what each engine serves, what changed.")
app.command("pull", epilog=exits.HELP)(pull)

Label = Annotated[str, typer.Argument(metavar="VERSION", help="For example policy@1.20.")]

_NAMES: Final = 12
_MIB: Final = 1 << 20


@app.command("ls", epilog=exits.HELP)
def ls(
    name: Target, policy: Policy = None, root: Root = target.RUNS, as_json: Json = False, verbose: Verbose = False
) -> None:
    """List the versions that the checkpoint service names, and how far each engine has come."""
    with exits.reported(verbose):
        found = uvloop.run(_view(target.find(name, root), policy))
        if as_json:
            print_json(found)
            return
        for one in found.versions:
            true = {"head": one.label == found.head, "pinned": one.pinned, "mirrored": one.label == found.mirrored}
            marks = [mark for mark, is_so in true.items() if is_so]
            size = f"{one.total_bytes / _MIB:.1f} MiB"
            typer.echo(f"{one.label}  step {one.step}  {size}  {one.where}  {' '.join(marks)}".rstrip())
        for engine in found.engines:
            reason = f"  {engine.reason}" if engine.reason else ""
            typer.echo(f"{engine.engine}  {engine.label} {engine.state}  {time.time() - engine.at:.0f} s ago{reason}")
        if not found.versions:
            typer.echo("no versions yet")


@app.command("diff", epilog=exits.HELP)
def diff(
    name: Target,
    before: Label,
    after: Label,
    root: Root = target.RUNS,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Say which tensors differ between two versions and, where both are in memory here, how many elements."""
    with exits.reported(verbose):
        found = uvloop.run(_difference(target.find(name, root), before, after))
        if as_json:
            print_json(found)
            return
        typer.echo(
            f"{found.changed_tensors} of {found.tensors} tensors differ,"
            f" {found.changed_bytes / _MIB:.1f} of {found.total_bytes / _MIB:.1f} MiB"
        )
        if found.changed_elements is not None:
            typer.echo(f"{found.changed_elements:.2%} of the elements are other bits")
        for line in weights.of_tensor_names(found.names, _NAMES):
            typer.echo(f"  {line}")


@app.command("verify", epilog=exits.HELP)
def verify(
    name: Target,
    version: Annotated[Optional[str], typer.Argument(help="One of them, for example policy@1.20.")] = None,  # noqa: UP045
    mirror: Annotated[bool, typer.Option("--mirror", help="In the object store instead of here.")] = False,
    root: Root = target.RUNS,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Compare every byte that is here with its manifest. Status 1 for one that is incomplete or altered."""
    with exits.reported(verbose):
        if mirror:
            _verify_mirror(target.find(name, root), version, as_json)
            return
        found = uvloop.run(_verified(target.find(name, root), version))
        if as_json:
            print_json({"versions": found})
        else:
            for one in found:
                typer.echo(f"{one.label}  {one.where}  {one.fault or 'whole'}")
        weights.refuse_faulty(found)


@app.command("pin", epilog=exits.HELP)
def pin(
    name: Target, version: Label, root: Root = target.RUNS, as_json: Json = False, verbose: Verbose = False
) -> None:
    """Keep a version, whatever becomes old."""
    _pin(name, version, True, root, as_json, verbose)


@app.command("unpin", epilog=exits.HELP)
def unpin(
    name: Target, version: Label, root: Root = target.RUNS, as_json: Json = False, verbose: Verbose = False
) -> None:
    """Let a version go once it is old."""
    _pin(name, version, False, root, as_json, verbose)


@app.command("rollback", epilog=exits.HELP)
def rollback(
    name: Target,
    version: Label,
    reason: Annotated[str, typer.Option(help="Recorded in the ledger.")] = "withdrawn by hand",
    go_on: Annotated[bool, typer.Option("--go-on", help="Train on at once, without `weights resume`.")] = False,
    root: Root = target.RUNS,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Withdraw everything after VERSION, which must have a checkpoint: engines get its weights, training is held there.

    What was trained since, and what withdrawn versions generated, is accounted as dropped(withdrawn).
    """
    with exits.reported(verbose):
        done = uvloop.run(_rolled_back(target.find(name, root), version, reason, not go_on))
        then = "held until `actorctl weights resume`" if done.held else "training goes on"
        say(msgspec.to_builtins(done), f"{done.withdrawn_plans} plans after {done.to} are withdrawn; {then}", as_json)


@app.command("resume", epilog=exits.HELP)
def resume(
    name: Target, policy: Policy = None, root: Root = target.RUNS, as_json: Json = False, verbose: Verbose = False
) -> None:
    """Let training go on that `weights rollback` holds."""
    with exits.reported(verbose):
        was_held = uvloop.run(_released(target.find(name, root), policy))
        say({"was_held": was_held}, "training goes on" if was_held else "training was not held", as_json)


def _verify_mirror(folder: RunFolder, version: str | None, as_json: bool) -> None:
    found = uvloop.run(_verified_in_mirror(folder, version))
    if as_json:
        print_json({"versions": found})
    else:
        for one in found:
            typer.echo(f"{one.label}  {one.fault or 'whole'}")
    weights.refuse_faulty(found)


def _pin(name: str, version: str, wanted: bool, root: Root, as_json: bool, verbose: bool) -> None:
    with exits.reported(verbose):
        labels = uvloop.run(_pinned(target.find(name, root), version, wanted))
        say({"pinned": labels}, f"kept: {', '.join(labels) or 'none beyond the newest'}", as_json)


async def _verified_in_mirror(folder: RunFolder, version: str | None) -> list[weights.Mirrored]:
    async with opened(folder, "weights") as run:
        return await weights.verified_in_mirror(run, version)


async def _rolled_back(folder: RunFolder, version: str, reason: str, hold: bool) -> rolling_back.RolledBack:
    async with opened(folder, "weights") as run:
        return await rolling_back.roll_back(run, version, reason, hold)


async def _released(folder: RunFolder, policy: str | None) -> bool:
    async with opened(folder, "weights") as run:
        return await rolling_back.release(run.of_policy(policy))


async def _view(folder: RunFolder, policy: str | None) -> weights.View:
    async with opened(folder, "weights") as run:
        return await weights.view(run.of_policy(policy))


async def _difference(folder: RunFolder, before: str, after: str) -> weights.Difference:
    async with opened(folder, "weights") as run:
        return await weights.difference(run, before, after)


async def _verified(folder: RunFolder, version: str | None) -> list[weights.Published]:
    async with opened(folder, "weights") as run:
        return await weights.verified(run, version)


async def _pinned(folder: RunFolder, version: str, wanted: bool) -> list[str]:
    async with opened(folder, "weights") as run:
        return await weights.pin(run, version, wanted)
