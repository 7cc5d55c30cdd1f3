"""Everything that can be known to be wrong before a process starts: the checks of the configuration, and what actors know.

Invariant: as `physarum.configs.checks`: no process is started, and every problem is reported.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from physarum.actors.argument_check import remembered_arguments
from physarum.actors.engine.delivery import surroundings
from physarum.actors.engine.environment import engine_python, installed_in
from physarum.agents.rewards.sandbox import REMEDY as SANDBOX_REMEDY
from physarum.agents.rewards.sandbox import missing_programs
from physarum.configs.checks import check as check_config
from physarum.configs.errors import Problem, Severity
from physarum.configs.machines import HEAD
from physarum.configs.origin import KeyPath, display_path
from physarum.configs.placement import local_slots, reduced
from physarum.configs.reward_rules import given_options
from physarum.configs.reward_types import LIBRARIES, CodeReward
from physarum.configs.root import RootConfig
from physarum.weightsync.carriers.registry import lacking
from physarum.weightsync.errors import ManifestError, QuantisationError, TransportUnfitError
from physarum.weightsync.layout import forms_in
from physarum.weightsync.quantisation.plan import Quantisation
from physarum.weightsync.transports.registry import CHECKPOINT_ENGINE, fitting


def check(config: RootConfig, machine: str = HEAD) -> list[Problem]:
    """Every problem of a run (of several machines: of one machine's part) about to start on this host, errors first."""
    here = reduced(config, machine)
    known = [_quantisation, _transports, _carrier, _routers, remembered_arguments, _unasked, _template]
    known += [_mirror] if machine == HEAD else []
    known += [_libraries, _sandbox] if not config.machines or local_slots(config, ("reward",), machine) else []
    problems = [*check_config(config, machine), *(problem for one in known for problem in one(here))]
    return sorted(problems, key=lambda problem: problem.severity)


def _quantisation(config: RootConfig) -> Iterator[Problem]:
    """Versions can be quantised as the folders say that engines start from."""
    folders: dict[KeyPath, Path | None] = {(*view.under, "model", "path"): view.model.path for view in config.views()}
    folders |= {("engines", name, "quantised_model"): one.quantised_model for name, one in config.engines.items()}
    for key, folder in folders.items():
        if folder is None or not (folder / "config.json").is_file():
            continue
        where = config.origins.where(key)
        try:
            plan = Quantisation.in_folder(folder)
            names = [] if plan is None else _loaded_once(plan, folder)
        except QuantisationError as error:
            remedy = "quantise the model in a supported way (actorctl checkpoints export-hf --quant)"
            yield Problem(Severity.ERROR, where, str(error), "a form that versions can take", remedy)
            continue
        if names and config.engines:
            found = (
                f"{len(names)} weights in {display_path(folder)} that SGLang 0.5.23 repacks for good, {names[0]} first"
            )
            expected = "weights that an engine can load again: it would refuse the first version, and be started anew"
            remedy = (
                "use FP8 in blocks of 128 x 128, or INT4 for experts only, unless your engine can (docs/weights.md)"
            )
            yield Problem(Severity.WARNING, where, found, expected, remedy)


def _template(config: RootConfig) -> Iterator[Problem]:
    """Each host that runs episodes renders by it."""
    chat = config.source.chat
    if chat is not None and chat.template is not None and not os.access(chat.template, os.R_OK):
        where = config.origins.where(("source", "chat", "template"))
        yield Problem(Severity.ERROR, where, str(chat.template), "a Jinja file that can be read", "correct the path")


def _unasked(config: RootConfig) -> Iterator[Problem]:
    """Engines that take a policy's versions, and that no rollout asks anything."""
    kept = None if config.evaluation is None else config.evaluation.engines
    for view in config.views():
        first, *others = [name for name in view.following if name != kept] or [""]
        for name in others:
            yield Problem(
                Severity.WARNING,
                config.origins.where(("engines", name)),
                f"`engines.{name}` beside `engines.{first}`, which is the group that rollouts ask",
                "one group for each policy's rollouts",
                f"put its servers into `engines.{first}.servers`, or name it in `evaluation.engines`; leave it if others ask",
            )


def _mirror(config: RootConfig) -> Iterator[Problem]:
    """The schemes of the mirrors can be opened on this host."""
    versions = config.checkpoint.versions
    urls = {("mirror",): config.checkpoint.mirror, ("versions", "mirror"): versions.mirror if versions else None}
    for key, url in urls.items():
        if url is None:
            continue
        from physarum.weightsync.mirror.bucket import REMEDY, missing_implementation  # fsspec, only where it is used

        if missing := missing_implementation(url):
            where = config.origins.where(("checkpoint", *key))
            yield Problem(Severity.ERROR, where, missing, "it in this environment", REMEDY)


def _transports(config: RootConfig) -> Iterator[Problem]:
    """Engines that follow versions can get them in the way that is configured, as far as it is known before they start."""
    for name, group in config.engines.items():
        if group.model is not None:
            continue
        found = surroundings(group)
        packages = {CHECKPOINT_ENGINE: installed_in(engine_python(group), CHECKPOINT_ENGINE)}
        if group.url is None and None not in packages.values():
            found = replace(found, packages={key: value or "" for key, value in packages.items()})
        try:
            fitting(group.transport, found)
        except TransportUnfitError as error:
            where = config.origins.where(("engines", name, "transport"))
            yield Problem(Severity.ERROR, where, *_parted(str(error)))


def _carrier(config: RootConfig) -> Iterator[Problem]:
    """What reads chunks out of other hosts' memory is installed here."""
    where = config.origins.where(("checkpoint", "carrier"))
    if lack := lacking(config.checkpoint.carrier):
        found, _, remedy = lack.partition(". ")
        yield Problem(Severity.ERROR, where, found, "its package in this environment", remedy)
    elif config.checkpoint.carrier != "http" and config.checkpoint.token_env is None:
        found, remedy = f"`checkpoint.carrier: {config.checkpoint.carrier}` without `checkpoint.token_env`", "set it"
        yield Problem(Severity.WARNING, where, found, "weights that travel between hosts", remedy)


def _parted(message: str) -> tuple[str, str, str]:
    """What was found and the remedy, of a message that ends with it."""
    found, _, remedy = message.partition("; ")
    return found, "a transport that this engine can have", remedy


def _libraries(config: RootConfig) -> Iterator[Problem]:
    """What ready-made rewards import is installed: else every execution would fail its tries."""
    named: list[tuple[KeyPath, str]] = [(("reward", "row_types", name), name) for name in config.reward.row_types]
    named += [(("reward", "type"), config.reward.type)] if config.reward.type is not None else []
    for key, name in named:
        library = LIBRARIES.get(name)
        if library is not None and importlib.util.find_spec(library) is None:
            where, found = config.origins.where(key), f"`{name}` without {library}, which is not installed here"
            yield Problem(
                Severity.ERROR, where, found, "the library that it needs", f"pip install {library.replace('_', '-')}"
            )


def _sandbox(config: RootConfig) -> Iterator[Problem]:
    """What runs answers' programs is installed; whether it works here, the reward actor tries at its start."""
    for key, options in given_options(config.reward, CodeReward):
        if missing := missing_programs(options):
            named: KeyPath = ("reward", "type") if key == ("reward", "args") else key
            where, found = config.origins.where(named), f"no {', '.join(missing)}"
            yield Problem(Severity.ERROR, where, found, "the programs of the sandbox", SANDBOX_REMEDY)


def _routers(config: RootConfig) -> Iterator[Problem]:
    """sglang-router is installed where it will be run, as far as an environment's folder tells."""
    for name, group in config.engines.items():
        home = engine_python(group).parent.parent
        if group.start_router is None or not (home / "pyvenv.cfg").is_file():
            continue
        named = [Path(entry) for entry in group.env.get("PYTHONPATH", "").split(os.pathsep) if entry]
        if any((folder / "sglang_router").is_dir() for folder in (*home.glob("lib/python*/site-packages"), *named)):
            continue
        where, shown = config.origins.where(("engines", name, "start_router")), display_path(home)
        remedy = f'{shown}/bin/pip install "sglang-router>=0.3.2,<0.4", or remove the key'
        yield Problem(Severity.ERROR, where, f"no sglang-router in {shown}", "it in the engine's environment", remedy)


def _loaded_once(plan: Quantisation, folder: Path) -> list[str]:
    """Weights of the folder, by its headers alone; none where it cannot be read, which another check says."""
    try:
        stored = forms_in(folder)
    except (OSError, ManifestError):
        return []
    names = (f"{name.rpartition('.')[0]}.weight" for name in stored if name.endswith(".weight_scale"))
    return [name for name in names if plan.loaded_once(name)]
