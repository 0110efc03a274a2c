"""Which keep policies hold for a run: those of the config that started it, or those its last job had."""

from collections.abc import Sequence
from typing import Final

from unbroken.errors import ConfigError
from unbroken.records.journal import read_history
from unbroken.records.layout import run_of
from unbroken.store.directory import Store
from unbroken.store.keep import Policy, compose

_CONFIG_LIMIT_BYTES: Final = 16 << 20


def policies_of(store: Store) -> Sequence[Policy]:
    """The policies of the config that started a run, else those of its last job; none where nobody ever said any.

    Raises:
        RunRecordDamaged: the run's config was changed since it was written.
        ConfigInvalid: its values do not fit.
        StorageFailed: the system refused to read it.
    """
    path = run_of(store).config
    if store.files.find(path) is None:
        return _of_last_job(store)
    from unbroken.config.document import SCHEMA
    from unbroken.config.reading import from_json

    text = store.files.read_bytes(path, limit_bytes=_CONFIG_LIMIT_BYTES).decode(errors="replace")
    if SCHEMA not in text:
        # A folder with sealed checkpoints may hold another tool's config.json, which says nothing to us.
        return _of_last_job(store)
    training = from_json(text, str(path)).config.training
    return compose(training.keep_last_k, training.keep_milestone_every, training.keep_every_seconds, training.keep_best)


def _of_last_job(store: Store) -> Sequence[Policy]:
    start = read_history(run_of(store), store.files).last("job-start")
    match start.values.get("keep") if start is not None else None:
        case [int() | None as last_k, int() | None as every_n, int() | float() | None as every_s, str() | None as best]:
            return compose(last_k, every_n, every_s, best)
    return ()


def quiet_policies_of(store: Store) -> Sequence[Policy]:
    """The same for a command that only shows: a config it cannot read is as good as none."""
    try:
        return policies_of(store)
    except ConfigError:
        return ()
