"""What a run was started with, and whether a job may go on with the config it was given.

The record is ``config.json``, written by the first job of a run. While a run has no checkpoint there is nothing that
another config could spoil: then the record is kept if it says the same, and replaced otherwise.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from unbroken.config import Config, compare, from_json
from unbroken.config.resume import Difference, Differences
from unbroken.disk import NodeKind
from unbroken.errors import ConfigDiffers, FieldChange, GptSimpleRun
from unbroken.files import LOCAL, Files
from unbroken.launch.accepted import require_known
from unbroken.run.layout import Layout
from unbroken.store.place import Store
from unbroken.store.scan import scan

_LIMIT_BYTES: Final = 1 << 20
# What each checkpoint of GPT-Simple holds, and none of ours.
_GPT_SIMPLE: Final = ("trainer_state.json", "model/pytorch_model.bin")


@dataclass(frozen=True)
class Started:
    """The config a job trains by, its global batch settled; ``differences`` are those to the run's record.

    Attributes:
        is_recorded: the record stands already, and says the same in every fixed field.
        is_replaced: there is a record of another config, of a run that never saved anything.
    """

    config: Config
    differences: Differences = Differences()
    is_recorded: bool = False
    is_replaced: bool = False


def settle(
    asked: Config, world: int, *, accept: Collection[str] = (), force: bool = False, files: Files = LOCAL
) -> Started:
    """The config of this job: as asked, with the batch that the run was started with.

    Raises:
        GptSimpleRun: the run directory is one of GPT-Simple.
        ConfigDiffers: it may not go on with this config; every field is named.
        ConfigUnreadable: the run's record is damaged.
        AcceptUnknown: a name is accepted that nothing has which could differ.
        StorageFailed: the system refused to read.
    """
    require_known(accept)
    layout = Layout(Path(asked.training.output_dir))
    require_own(layout, files)
    recorded = _recorded(layout, files)
    begins_anew = asked.training.resume == "scratch" and force
    if recorded is None or begins_anew:
        return Started(asked.settled(world), is_replaced=recorded is not None)
    found = compare(recorded, asked)
    if not _has_checkpoints(layout, files):
        if found.fixed or found.declared:
            return Started(asked.settled(world), found, is_replaced=True)
    elif refused := (*found.fixed, *found.not_accepted(frozenset(accept))):
        raise ConfigDiffers(run=layout.run, changes=tuple(map(_change, refused)))
    batch = recorded.training.global_batch_size
    return Started(replace(asked, training=replace(asked.training, global_batch_size=batch)), found, is_recorded=True)


def require_own(layout: Layout, files: Files = LOCAL) -> None:
    """Pass unless a run directory is one of GPT-Simple, whose layout is like ours.

    Raises:
        GptSimpleRun: it is.
        StorageFailed: the system refused to look.
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
    """Whether ``config.json`` is one that GPT-Simple writes: the same sections, and no schema."""
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


def _has_checkpoints(layout: Layout, files: Files) -> bool:
    store = Store(layout.checkpoints, files)
    if files.find(store.root) is None:
        return False
    found = scan(store)
    # One that was set aside as damaged is the past of this run too.
    return bool(found.committed or found.quarantined)


def _change(difference: Difference) -> FieldChange:
    is_fixed = difference.resume.value == "fixed"
    return FieldChange(difference.field, _shown(difference.started_with), _shown(difference.now), is_fixed)


def _shown(value: Any) -> str:  # noqa: ANN401 -- any plain JSON value
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
