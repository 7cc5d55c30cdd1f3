"""`actorctl checkpoints ls|save|verify|mirror|restore|export-hf|import-hf|import-megatron`: states, and as folders."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, Optional

import msgspec
import typer
import uvloop

from physarum.actors.actorctl import exits, target
from physarum.actors.actorctl.options import Json, Policy, Root, Target, Verbose, group, print_json, say
from physarum.actors.context import RunFolder
from physarum.actors.mirror.errors import MirrorError, MirrorUnfitError
from physarum.actors.tools import hf_export, mirrored, saved
from physarum.actors.tools.access import OpenRun, opened
from physarum.actors.tools.saved import Saved

Folder = Annotated[Path, typer.Argument(metavar="DIR", exists=True, file_okay=False)]
OneOrLast = Annotated[
    Optional[str],  # noqa: UP045  # typer reads the annotation at run time
    typer.Argument(help="One of them, for example 1.20; by default the one that the run goes on from."),
]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make; it must not be there.")]

app = group("Durable training states: weights, optimizer, generators and the place in the sample log.")


@app.command("ls", epilog=exits.HELP)
def ls(
    name: Target, policy: Policy = None, root: Root = target.RUNS, as_json: Json = False, verbose: Verbose = False
) -> None:
    """List the checkpoints that the ledger names, and which of them are still on disk, and in the mirror where there is one."""
    with exits.reported(verbose):
        found, fault = uvloop.run(_listed(target.find(name, root), policy))
        _print(found, as_json)
        if fault:
            typer.echo(f"the mirror cannot be read: {fault}", err=True)


@app.command("save", epilog=exits.HELP)
def save(
    name: Target, policy: Policy = None, root: Root = target.RUNS, as_json: Json = False, verbose: Verbose = False
) -> None:
    """Save one now, after the step that the trainer is in."""
    with exits.reported(verbose):
        made = uvloop.run(_save(target.find(name, root), policy))
        say(made, f"checkpoint {made['folder']} of step {made['number']} is durable", as_json)


@app.command("verify", epilog=exits.HELP)
def verify(
    name: Target,
    checkpoint: Annotated[Optional[str], typer.Argument(help="One of them, for example 1.20.")] = None,  # noqa: UP045
    mirror: Annotated[bool, typer.Option("--mirror", help="In the mirror instead of on disk.")] = False,
    policy: Policy = None,
    root: Root = target.RUNS,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Compare every byte on disk with the digests that the ledger names. Status 1 for one that is incomplete or altered."""
    with exits.reported(verbose):
        found = uvloop.run(_verified(target.find(name, root), checkpoint, mirror, policy))
        _print(found, as_json)
        saved.refuse_faulty(found)


@app.command("mirror", epilog=exits.HELP)
def mirror(
    name: Target,
    checkpoint: OneOrLast = None,
    root: Root = target.RUNS,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Copy a checkpoint to the mirror now; the trainer does it by itself, and tries again only with the next one."""
    words = "was copied to the mirror ({} bytes)", "is in the mirror: nothing to copy"
    with exits.reported(verbose):
        _say_moved(mirrored.copy, target.find(name, root), checkpoint, "sent_bytes", words, as_json)


@app.command("restore", epilog=exits.HELP)
def restore(
    name: Target,
    checkpoint: OneOrLast = None,
    root: Root = target.RUNS,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Bring a checkpoint back from the mirror to disk, every byte compared; one that is there whole stays as it is."""
    words = "was brought back ({} bytes)", "is on disk and whole: nothing to bring back"
    with exits.reported(verbose):
        _say_moved(mirrored.restore, target.find(name, root), checkpoint, "brought_bytes", words, as_json)


@app.command("export-hf", epilog=exits.HELP)
def export_hf(
    name: Target,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the model is written; it must not exist.")],
    checkpoint: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--checkpoint", help="For example 1.20 or policy@1.20, or `start`; by default the newest."),
    ] = None,
    quant: Annotated[
        Optional[Literal["fp8", "int4"]],  # noqa: UP045
        typer.Option("--quant", help="Quantised: FP8 in blocks of 128 x 128, or INT4 in groups of 32."),
    ] = None,
    policy: Policy = None,
    root: Root = target.RUNS,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write the model of a checkpoint as a Hugging Face folder, as it was trained or quantised for engines."""
    with exits.reported(verbose):
        made = uvloop.run(_exported(target.find(name, root), folder, checkpoint, quant, policy))
        say(msgspec.structs.asdict(made), f"{made.tensors} tensors of {made.checkpoint} in {made.folder}", as_json)


async def _exported(
    run_folder: RunFolder, folder: Path, checkpoint: str | None, quant: str | None, policy: str | None
) -> hf_export.Exported:
    async with opened(run_folder, "checkpoints") as run:
        return await hf_export.export_hf(run.of_policy(policy), folder, checkpoint, quant)


@app.command("import-hf", epilog=exits.HELP)
def import_hf(folder: Folder, out: Out, as_json: Json = False, verbose: Verbose = False) -> None:
    """Write a Hugging Face folder as OUT/release in Megatron's torch_dist format, as Megatron-LM and slime load it."""
    with exits.reported(verbose):
        _say(_folders().import_hf(folder, out), as_json)


@app.command("import-megatron", epilog=exits.HELP)
def import_megatron(
    folder: Folder,
    model: Annotated[Path, typer.Option("--model", help="A Hugging Face folder of the same model.", exists=True)],
    out: Annotated[Path, typer.Option("--out", help="The Hugging Face folder to make.")],
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write the weights of a torch_dist folder (Megatron-LM's and slime's iter_*) as a Hugging Face folder.

    DIR is one such folder, or has them below it: then the one that latest_checkpointed_iteration.txt names.
    """
    with exits.reported(verbose):
        _say(_folders().import_megatron(folder, model, out), as_json)


def _folders() -> ModuleType:
    """Loaded when it is needed: it brings torch and Megatron."""
    return importlib.import_module("physarum.actors.tools.megatron_folders")


def _say(made: Any, as_json: bool) -> None:
    left = [f"not taken: {one.part} ({one.tensors} tensors, first {one.first}): {one.reason}" for one in made.left]
    say(msgspec.to_builtins(made), "\n".join([f"{made.source} is now {made.out}", *left]), as_json)


async def _listed(folder: RunFolder, policy: str | None) -> tuple[list[Saved], str]:
    """What is on disk can be said also when the mirror cannot be read; then why."""
    async with opened(folder, "checkpoints") as run:
        run = run.of_policy(policy)
        found = await saved.listed(run)
        try:
            return await mirrored.surveyed(run, found), ""
        except (MirrorError, MirrorUnfitError) as error:
            return found, str(error)


def _say_moved(
    move: Callable[[OpenRun, str | None], Awaitable[tuple[Saved, int]]],
    folder: RunFolder,
    name: str | None,
    key: str,
    words: tuple[str, str],
    as_json: bool,
) -> None:
    """Moves one checkpoint and says so: `words` where bytes moved, and where none had to; `key` names their number."""

    async def moved() -> tuple[Saved, int]:
        async with opened(folder, "checkpoints") as run:
            return await move(run, name)

    found, count = uvloop.run(moved())
    say({"checkpoint": found, key: count}, f"checkpoint {found.name} {words[not count].format(count)}", as_json)


async def _save(folder: RunFolder, policy: str | None) -> dict[str, Any]:
    async with opened(folder, "checkpoints") as run:
        return await saved.save_now(run.of_policy(policy))


async def _verified(folder: RunFolder, name: str | None, mirror: bool, policy: str | None) -> list[Saved]:
    async with opened(folder, "checkpoints") as run:
        run = run.of_policy(policy)
        return await (mirrored.verified(run, name) if mirror else saved.verified(run, name))


def _print(found: list[Saved], as_json: bool) -> None:
    if as_json:
        print_json({"checkpoints": found})
        return
    for one in found:
        fault = "" if one.fault is None else f"  {one.fault or 'whole'}"
        where = f"{one.size_bytes} bytes ({one.form})" if one.on_disk else "let go"
        there = {None: "", True: "  mirrored", False: "  not mirrored"}[one.mirrored]
        typer.echo(f"{one.name}  step {one.number}  {where}{there}  samples from {one.floor}{fault}")
    if not found:
        typer.echo("no checkpoints yet")
