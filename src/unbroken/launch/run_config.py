"""The config a job trains with: the given one, checked against the run's ``config.json`` and ``accepted.json``.

``unbroken train`` reads the config file once and passes the result to every rank of every job that it starts, so that a
file that is edited meanwhile changes nothing before the next command.

The first job writes ``config.json``; each job that changes a value with ``--accept`` writes ``accepted.json``. An
accepted value belongs to the run: later jobs use it even if their config file has another one, and say so. A run
without checkpoints has nothing to lose, so another config simply replaces its record.
"""

import base64
import json
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from unbroken.config import Config, Resolved
from unbroken.config.changes import Difference, Differences, compare, computing_values, with_values
from unbroken.config.document import digest_of
from unbroken.config.reading import from_json
from unbroken.disk import NodeKind
from unbroken.errors import (
    BadUsage,
    CheckpointsExist,
    ConfigDiffers,
    ConfigMissing,
    FieldChange,
    GptSimpleRun,
)
from unbroken.files import LOCAL, Files
from unbroken.launch.accepted import (
    CONFIG,
    AcceptedValue,
    read_accepted,
    rebuild_accepted,
    require_known,
    still_accepted,
    values_of,
)
from unbroken.mirror.remote import checkpoints_of
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.store.directory import Store
from unbroken.store.rewind import SCRATCH, last_request, without_tag
from unbroken.store.scan import newest_first, scan

_LIMIT_BYTES: Final = 1 << 20
# Files of every GPT-Simple checkpoint, and of none of ours.
_GPT_SIMPLE: Final = ("trainer_state.json", "model/pytorch_model.bin")
_DIGITS: Final = 12
# In it the launcher passes the config to the ranks; an environment is not cleaned up while a job runs, as files are.
CONFIG_VARIABLE: Final = "UNBROKEN_TRAIN_CONFIG"
# What Linux allows for one variable is 128 KiB, its name included.
_MOST_PASSED: Final = 130_000


def passed_on(config: Config, program: str) -> dict[str, str]:
    """The environment that passes a config to the ranks of a job.

    Raises:
        BadUsage: the config is too large for it; ``program`` is the command.
    """
    text = base64.b85encode(zlib.compress(config.to_json().encode(), 9)).decode()
    if len(text) > _MOST_PASSED:
        complaint = f"the config is too large to be passed to the job: {len(text):,} bytes, at most {_MOST_PASSED:,}"
        raise BadUsage(command=program, complaint=complaint)
    return {CONFIG_VARIABLE: text}


def taken_over(environ: Mapping[str, str]) -> Resolved:
    """The config that the launcher passed to this rank.

    Raises:
        BadUsage: there is none, or it is not one that ``unbroken train`` has passed on.
    """
    try:
        text = zlib.decompress(base64.b85decode(environ[CONFIG_VARIABLE])).decode()
    except (KeyError, ValueError, zlib.error) as wrong:
        complaint = f"--launched needs {CONFIG_VARIABLE} as `unbroken train` sets it"
        raise BadUsage(command="python -m unbroken.gpt", complaint=complaint) from wrong
    return from_json(text, CONFIG_VARIABLE)


@dataclass(frozen=True)
class RunConfig:
    """The config a job trains with, its global batch size resolved; ``differences`` are those to ``config.json``.

    Attributes:
        resume: ``training.resume``, as the store records the request.
        accepted: changes accepted by earlier jobs, oldest first.
        taken: values of the run that this job changes, because they are accepted by name.
        kept: fields whose config value differs from one accepted earlier; the value of the run is used.
        unsaved: names accepted since the newest checkpoint, which still has the state before.
        is_recorded: ``config.json`` exists and agrees in every fixed field.
        is_replaced: ``config.json`` is that of another config, of a run that never saved.
        is_rewritten: ``config.json`` was missing and is replaced by the config of this job, with ``--accept``.
        is_rebuilt: ``accepted.json`` was missing and ``accepted`` is rebuilt from the journal.
    """

    config: Config
    differences: Differences = Differences()
    resume: str = "auto"
    accepted: tuple[AcceptedValue, ...] = ()
    taken: tuple[Difference, ...] = ()
    kept: tuple[Difference, ...] = ()
    unsaved: tuple[str, ...] = ()
    is_recorded: bool = False
    is_replaced: bool = False
    is_rewritten: bool = False
    is_rebuilt: bool = False

    def history(self, *, job: int, step: int) -> tuple[AcceptedValue, ...]:
        """All accepted changes, including those of this job at the step it resumes from."""
        now = (AcceptedValue(each.field, each.started_with, each.now, job, step) for each in self.taken)
        return (*self.accepted, *now)


def resolve_run_config(
    asked: Config, world: int, *, accept: Collection[str] = (), force: bool = False, files: Files = LOCAL
) -> RunConfig:
    """The config of this job: ``asked``, with the global batch size of the run and the values accepted since.

    Raises:
        GptSimpleRun: the run directory is one of GPT-Simple.
        CheckpointsExist: ``--resume scratch`` without ``force``, and there are checkpoints.
        ConfigMissing: the run has checkpoints but no ``config.json``, and that is not accepted.
        ConfigDiffers: the run cannot continue with this config; lists every field.
        RunRecordDamaged: a record of the run is damaged.
        ConfigInvalid: the config is invalid with the values of the run.
        AcceptUnknown: an accepted name is unknown.
        StorageFailed: the run could not be read.
    """
    require_known(accept)
    layout = Layout(Path(asked.training.output_dir))
    require_own_run(layout, files)
    recorded = _recorded(layout, files)
    store = Store(layout.checkpoints, files)
    if recorded is not None and asked.training.checkpoints is not None:
        # A wiped directory has nothing to compare the config with: then the object store is not asked here.
        store = checkpoints_of(store, asked.training.checkpoints)
    names = newest_first(store, scan(store).committed)
    resume = _request(asked)
    if without_tag(resume) == SCRATCH and names and not force:
        raise CheckpointsExist(store=store.root, count=len(names), newest=names[0])
    starts_over = without_tag(resume) == SCRATCH and force and not (names and _is_carried_out(store, resume))
    # A quarantined checkpoint is part of the history too.
    has_history = bool(names or scan(store).quarantined)
    if recorded is None and has_history and not starts_over and CONFIG not in accept:
        raise ConfigMissing(run=layout.run)
    if recorded is None or starts_over:
        is_rewritten = recorded is None and has_history and not starts_over
        config = asked.settled(world)
        return RunConfig(config, resume=resume, is_replaced=recorded is not None, is_rewritten=is_rewritten)
    journal = read_history(layout, files)
    kept_record = read_accepted(layout, files)
    history = rebuild_accepted(recorded, journal) if kept_record is None else kept_record
    found = compare(with_values(recorded, values_of(history)), asked)
    if not has_history:
        if found.fixed or found.declared:
            return RunConfig(asked.settled(world), found, resume, is_replaced=True)
    elif changed := (*found.fixed, *found.not_accepted(frozenset({*accept, *values_of(history)}))):
        raise ConfigDiffers(run=layout.run, changes=tuple(map(_change, changed)))
    batch = recorded.training.global_batch_size
    config = replace(asked, training=replace(asked.training, global_batch_size=batch))
    kept = found.not_accepted(frozenset(accept))
    config = with_values(config, {each.field: each.started_with for each in kept}) if kept else config
    return RunConfig(
        config,
        compare(recorded, config),
        resume,
        accepted=history,
        taken=tuple(each for each in found.declared if each not in kept),
        kept=kept,
        unsaved=still_accepted(journal.events),
        is_recorded=True,
        is_rebuilt=kept_record is None and bool(history),
    )


def _request(asked: Config) -> str:
    """``training.resume`` as it is recorded: a start from scratch with another config is another request."""
    resume = asked.training.resume
    if without_tag(resume) != SCRATCH:
        return resume
    digest = digest_of(computing_values(asked)).partition(":")[2][:_DIGITS]
    return f"{resume}{'#' if resume == SCRATCH else '.'}config-{digest}"


def _is_carried_out(store: Store, resume: str) -> bool:
    last = last_request(store)
    return last is not None and last.text == resume


def require_own_run(layout: Layout, files: Files = LOCAL) -> None:
    """Pass unless the run directory is one of GPT-Simple, whose layout is similar.

    Raises:
        GptSimpleRun: it is.
        StorageFailed: it could not be read.
    """
    there = files.find(layout.checkpoints)
    nodes = files.list_directory(layout.checkpoints) if there and there.kind is NodeKind.DIRECTORY else ()
    names = [node.name for node in nodes if node.kind is NodeKind.DIRECTORY]
    checkpoints = [
        name for name in names if all(files.find(layout.checkpoints / name / part) is not None for part in _GPT_SIMPLE)
    ]
    if checkpoints or _is_config_of_gpt_simple(layout, files):
        raise GptSimpleRun(run=layout.run, checkpoints=tuple(sorted(checkpoints, key=lambda name: (len(name), name))))


def _is_config_of_gpt_simple(layout: Layout, files: Files) -> bool:
    """Whether ``config.json`` was written by GPT-Simple: the same sections, but no schema."""
    if files.find(layout.config) is None:
        return False
    try:
        found = json.loads(files.read_bytes(layout.config, limit_bytes=_LIMIT_BYTES))
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "schema" not in found and {"model", "data", "training"} <= found.keys()


def _recorded(layout: Layout, files: Files) -> Config | None:
    if files.find(layout.config) is None:
        return None
    text = files.read_bytes(layout.config, limit_bytes=_LIMIT_BYTES).decode("utf-8", "replace")
    return from_json(text, str(layout.config)).config


def _change(difference: Difference) -> FieldChange:
    is_fixed = difference.resume.value == "fixed"
    return FieldChange(difference.field, _shown(difference.started_with), _shown(difference.now), is_fixed)


def _shown(value: Any) -> str:  # noqa: ANN401 -- any plain JSON value
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
