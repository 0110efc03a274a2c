"""Which keep policies hold for a run: those on the command line, or those of the config that started it."""

from collections.abc import Sequence
from typing import Final

from unbroken.errors import ConfigError
from unbroken.run.layout import run_of
from unbroken.store.keep import Policy, compose
from unbroken.store.place import Store

_CONFIG_LIMIT_BYTES: Final = 16 << 20


def policies_of(store: Store) -> Sequence[Policy]:
    """The policies of the config that started a run; none where there is no such config.

    Raises:
        ConfigUnreadable: the run's config was changed since it was written.
        ConfigInvalid: its values do not fit.
        StorageFailed: the system refused to read it.
    """
    path = run_of(store).config
    if store.files.find(path) is None:
        return ()
    from unbroken.config import from_json
    from unbroken.config.document import SCHEMA

    text = store.files.read_bytes(path, limit_bytes=_CONFIG_LIMIT_BYTES).decode(errors="replace")
    if SCHEMA not in text:
        # A folder with sealed checkpoints may hold another tool's config.json, which says nothing to us.
        return ()
    training = from_json(text, str(path)).config.training
    return compose(training.keep_last_k, training.keep_milestone_every, training.keep_every_seconds, training.keep_best)


def quiet_policies_of(store: Store) -> Sequence[Policy]:
    """The same for a command that only shows: a config it cannot read is as good as none."""
    try:
        return policies_of(store)
    except ConfigError:
        return ()
