"""Which keep policies hold for a run: those on the command line, or those of the config that started it."""

from collections.abc import Sequence
from typing import Final

from unbroken.errors import BadUsage, ConfigError
from unbroken.run.layout import run_of
from unbroken.store.keep import BestBy, EveryNSteps, EveryT, LastK, Policy
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
    return from_values(
        training.keep_last_k, training.keep_milestone_every, training.keep_every_seconds, training.keep_best
    )


def quiet_policies_of(store: Store) -> Sequence[Policy]:
    """The same for a command that only shows: a config it cannot read is as good as none."""
    try:
        return policies_of(store)
    except ConfigError:
        return ()


def from_values(last_k: int | None, every_n: int | None, every_s: float | None, best: str | None) -> tuple[Policy, ...]:
    """Policies from the values that flags and config share."""
    found: list[Policy] = [LastK(last_k)]
    if every_n is not None:
        found.append(EveryNSteps(every_n))
    if every_s is not None:
        found.append(EveryT(every_s))
    if best is not None:
        found.append(best_by(best))
    return tuple(found)


def best_by(text: str) -> BestBy:
    """``loss``, ``loss:min`` or ``accuracy:max`` as a policy.

    Raises:
        BadUsage: it is none of these.
    """
    metric, _, mode = text.partition(":")
    if not metric or mode not in ("", "min", "max"):
        complaint = f"'{text}' is not METRIC, METRIC:min or METRIC:max"
        raise BadUsage(command="unbroken prune", complaint=complaint)
    return BestBy(metric, mode or "min")
