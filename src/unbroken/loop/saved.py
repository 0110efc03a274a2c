"""What a loop tells at its edges: how a save ended, what the live snapshot shows, how long a last save may take."""

from collections.abc import Mapping
from typing import Final

import torch

from unbroken.errors import NeedsPickle, PeerLost, RankFailed, RunGone, UnbrokenError
from unbroken.loop.measures import Measures
from unbroken.loop.opened import Opened
from unbroken.quoting.log import logger
from unbroken.records.events import event
from unbroken.records.outcome import Outcome
from unbroken.state.save import Saved
from unbroken.state.trainer_state import COUNTERS

_log = logger(__name__)
# After an error the other ranks may be gone, and a save that needs them would never end.
LAST_SAVE_WAIT_S: Final = 60.0
# Where one is known to be gone, only what the others have already sent can still arrive.
LOST_RANK_WAIT_S: Final = 10.0


def last_wait_s(opened: Opened, error: BaseException | None, *, is_rank_lost: bool) -> float | None:
    """How long to wait for the save in flight: to its end, but not for ever after an error, nor when told to go."""
    if isinstance(error, KeyboardInterrupt) or opened.emergency.is_leaving:
        return 0.0
    if is_rank_lost and not opened.saver.is_committing:
        return LOST_RANK_WAIT_S
    return None if error is None else LAST_SAVE_WAIT_S


def note_save(opened: Opened, saved: Saved) -> UnbrokenError | None:
    """Write down how a save ended; one that failed is told and left behind, for training goes on."""
    step = saved.request.step
    if saved.error is None:
        _note_commit(opened, saved)
        return None
    rank, cause = _whose(saved.error, opened.world.rank)
    if cause == PeerLost.kind and opened.emergency.is_leaving:
        # The ranks leave without waiting for each other: whoever is first ends the save that the others wait for.
        _log.warning("gave up the save of step %s: the ranks are leaving; the last commit is intact", f"{step:,}")
        return saved.error
    if cause == PeerLost.kind and not opened.world.is_first:
        # Only rank 0 knows whether it came to the commit.
        _log.warning("lost contact during the save of step %s: %s", f"{step:,}", saved.error)
        return saved.error
    opened.recorder.fact(
        "save-failed", step=step, error=saved.error.kind, reason=str(saved.error), rank=rank, cause=cause
    )
    facts = event("save-failed", step=step, error=saved.error.kind, reason=str(saved.error))
    intact = "" if cause == RunGone.kind else "; the last commit is intact"
    _log.warning("could not save step %s: %s%s", f"{step:,}", saved.error, intact, extra=facts)
    return saved.error


def _note_commit(opened: Opened, saved: Saved) -> None:
    step = saved.request.step
    opened.clock.save_ended(saved.blocked_s, saved.total_s)
    opened.recorder.fact(
        "commit",
        step=step,
        name=saved.name,
        bytes=saved.size_bytes,
        seconds=saved.total_s,
        blocked_s=saved.blocked_s,
        removed=list(saved.removed),
        data=saved.account,
    )
    if saved.account is not None and not saved.account["agrees"]:
        _log.error("the data served up to %s is not each sample once: %s", saved.name, saved.account)
    opened.recorder.snapshot(latest_checkpoint=saved.name)
    size, seconds, paused_s = saved.size_bytes, saved.total_s, saved.blocked_s
    facts = event("checkpoint", step=step, name=saved.name, bytes=size, seconds=seconds, paused_s=paused_s)
    if opened.world.is_first:
        _log.info("saved %s in %.1f s (training paused %.2f s)", saved.name, seconds, paused_s, extra=facts)
    # After the commit, never before.
    opened.emergency.sweep(step)


def say_end(outcome: Outcome, *, target: int) -> None:
    """Tell people how the job ended, and what the same command would do next."""
    where = "" if outcome.step is None else f" at step {outcome.step:,}"
    if outcome.status == "completed":
        of = f" of {target:,}" if target and target == outcome.step else ""
        why = f" ({outcome.reason})" if outcome.reason and not outcome.reason.startswith("the target") else ""
        _log.info("run completed%s%s%s", where, of, why)
    elif outcome.status == "stopped":
        _log.info("job stopped%s: %s; the same command resumes the run", where, outcome.reason)
    else:
        next_step = {"again": "the same command resumes the run", "look": "look at the error before starting it again"}
        _log.error("job ended%s: %s; %s", where, outcome.reason, next_step.get(outcome.verdict, outcome.verdict))


def _whose(error: UnbrokenError, here: int) -> tuple[int, str]:
    """The rank that an error came from, and its kind there."""
    return (error.rank, error.cause.kind) if isinstance(error, RankFailed) else (here, error.kind)


def shown(measures: Measures) -> dict[str, object]:
    """What the live snapshot tells of the metrics that were read last, where the loop logs them."""
    tokens = measures.latest.get("tokens")
    return {
        "loss": measures.number("loss"),
        "loss_step": measures.steps.get("loss"),
        "learning_rate": measures.number("lr"),
        "tokens_per_s": measures.number("tokens_per_s"),
        "tokens": tokens if isinstance(tokens, int) else None,
    }


def require_plain_counters(counters: Mapping[str, object]) -> None:
    """Refuse a tensor among the counters at the first edge, not when hours of training are to be saved.

    Raises:
        NeedsPickle: a counter is a tensor.
    """
    for name, value in counters.items():
        if isinstance(value, torch.Tensor):
            raise NeedsPickle(item=COUNTERS, path=f"{COUNTERS}.{name}", type_name="Tensor")


def require_target(total: object) -> None:
    """Refuse a target at the call: a float never reached would train for ever, a negative one would end at once.

    Raises:
        ValueError: it is no whole number of steps.
    """
    if isinstance(total, bool) or not isinstance(total, int) or total < 0:
        raise ValueError(f"steps({total!r}): the target is a whole number of steps, 0 or more")
