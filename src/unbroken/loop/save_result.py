"""How a save ended: what the journal, the log and the save clock learn of it, at the edge after it."""

from typing import Final

from unbroken.errors import PeerLost, RankFailed, RunGone, UnbrokenError
from unbroken.loop.opened_run import OpenRun
from unbroken.quoting import amounts
from unbroken.quoting.log import logger
from unbroken.records.event_lines import event
from unbroken.state.save import Saved

_log = logger(__name__)
# After an error the other ranks may be gone, and a save that needs them would never end.
LAST_SAVE_WAIT_S: Final = 60.0
_SHOWN: Final = 4


def note_save(opened: OpenRun, saved: Saved) -> UnbrokenError | None:
    """Record how a save ended; a failed one is logged, and training continues."""
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
        _log.warning("lost contact during the save of step %s: %s", f"{step:,}", saved.error.message)
        return saved.error
    opened.recorder.event(
        "save-failed", step=step, error=saved.error.kind, reason=saved.error.message, rank=rank, cause=cause
    )
    extra = event("save-failed", step=step, error=saved.error.kind, reason=saved.error.message)
    intact = "" if cause == RunGone.kind else "; the last commit is intact"
    _log.warning("could not save step %s: %s%s", f"{step:,}", saved.error.message, intact, extra=extra)
    return saved.error


def _note_commit(opened: OpenRun, saved: Saved) -> None:
    step = saved.request.step
    opened.clock.save_ended(saved.paused_s, saved.total_s)
    opened.recorder.event(
        "commit",
        step=step,
        name=saved.name,
        bytes=saved.size_bytes,
        seconds=saved.total_s,
        paused_s=saved.paused_s,
        removed=list(saved.removed),
        data=saved.account,
        **({"held": len(saved.held)} if saved.held else {}),
    )
    opened.recorder.committed(step)
    opened.last_commit = saved.name
    if saved.account is not None and not saved.account["agrees"]:
        _log.error("the data served up to %s is not each sample exactly once: %s", saved.name, saved.account)
    opened.recorder.snapshot(latest_checkpoint=saved.name)
    size, seconds, paused_s = saved.size_bytes, saved.total_s, saved.paused_s
    extra = event("checkpoint", step=step, name=saved.name, bytes=size, seconds=seconds, paused_s=paused_s)
    if opened.world.is_first:
        _log.info("saved %s in %.1f s (training paused %.2f s)", saved.name, seconds, paused_s, extra=extra)
        if saved.held:
            _log.info("kept until they are mirrored: %s", amounts.listed(saved.held, _SHOWN))
    if opened.mirrors is not None and saved.name is not None:
        opened.mirrors.saved(saved.name)
    # After the commit, never before.
    opened.emergency.sweep(step)


def _whose(error: UnbrokenError, here: int) -> tuple[int, str]:
    """The rank where an error was raised, and its kind there."""
    return (error.rank, error.cause.kind) if isinstance(error, RankFailed) else (here, error.kind)
