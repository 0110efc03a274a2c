"""A run whose holder cannot be seen: its lease is watched on the local clock, and taken only if nobody renews it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from unbroken.errors import RunHeld
from unbroken.records.lease import DEFAULT_TTL_S, Holder, Lease, ProcessOf, Standing, acquire, release, renew
from unbroken.records.takeover import LeaseWatch, take_over

ELSEWHERE = Holder("n1/boot", 7, "1")
HERE = Holder("n2/boot", 8, "2")


class Time:
    """A monotonic clock that passes only while somebody waits, and what happens meanwhile."""

    def __init__(self, happens: Callable[[float], None] = lambda now_s: None) -> None:
        self.now_s = 0.0
        self._happens = happens

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self._happens(self.now_s)


def taken(run: Path, time: Time, process_of: ProcessOf | None = None, *, wall_s: float = 0.0) -> Lease:
    return take_over(
        run,
        HERE,
        token="t",
        clock=lambda: wall_s + time.now_s,
        monotonic=lambda: time.now_s,
        wait=time.wait,
        process_of=process_of,
    )


# The taker's clock against the holder's: equal, behind, ahead, and far off.
skewed = pytest.mark.parametrize("skew_s", [0.0, -90.0, 90.0, 1e9])


@skewed
@pytest.mark.promise("U6")
def test_a_dead_holder_elsewhere_is_waited_out_whatever_its_clock_says(tmp_path: Path, skew_s: float) -> None:
    acquire(tmp_path, ELSEWHERE, token="o", now_s=5000.0)
    time = Time()
    assert taken(tmp_path, time, wall_s=5000.0 + skew_s).number == 2
    assert time.now_s == DEFAULT_TTL_S, "not a second before it counts as dead"


@skewed
@pytest.mark.promise("U6")
def test_a_holder_that_renews_keeps_its_run_whatever_its_clock_says(tmp_path: Path, skew_s: float) -> None:
    lease = acquire(tmp_path, ELSEWHERE, token="o", now_s=5000.0)

    def live(now_s: float) -> None:
        if now_s == 15.0:
            # A clock that stands still: only the count of renewals changes.
            renew(tmp_path, lease, now_s=5000.0)

    time = Time(live)
    with pytest.raises(RunHeld) as held:
        taken(tmp_path, time, wall_s=5000.0 + skew_s)
    assert (held.value.proof, held.value.watched_s) == ("renewed", 15.0)
    assert time.now_s == 15.0, "and nobody waits longer than until then"


def test_a_run_that_is_released_is_taken_at_once(tmp_path: Path) -> None:
    lease = acquire(tmp_path, ELSEWHERE, token="o", now_s=0.0)
    time = Time(lambda now_s: release(tmp_path, lease, now_s=now_s) if now_s == 3.0 else None)
    assert (taken(tmp_path, time).number, time.now_s) == (2, 3.0)


def test_a_process_that_can_be_seen_is_not_waited_for(tmp_path: Path) -> None:
    acquire(tmp_path, ELSEWHERE, token="o", now_s=0.0)
    time = Time()
    with pytest.raises(RunHeld, check=lambda each: each.proof == "process"):
        taken(tmp_path, time, lambda holder: holder.process_started)
    assert taken(tmp_path, time, lambda holder: "").number == 2
    assert time.now_s == 0.0


@pytest.mark.promise("U6")
def test_of_two_that_watch_a_dead_holder_one_gets_the_run(tmp_path: Path) -> None:
    acquire(tmp_path, ELSEWHERE, token="o", now_s=0.0)
    time = Time(lambda now_s: _take_at(tmp_path, now_s, DEFAULT_TTL_S))
    with pytest.raises(RunHeld):
        taken(tmp_path, time)


def _take_at(run: Path, now_s: float, at_s: float) -> None:
    if now_s == at_s:
        acquire(run, Holder("n3/boot", 9, "3"), token="q", now_s=0.0, process_of=lambda holder: "")


@pytest.mark.promise("U6")
def test_a_damaged_lease_is_watched_like_any_other(tmp_path: Path) -> None:
    acquire(tmp_path, ELSEWHERE, token="o", now_s=0.0)
    (tmp_path / ".lease" / "000001.json").write_text("ruined")
    time = Time()
    assert taken(tmp_path, time, lambda holder: None).number == 2
    assert time.now_s == DEFAULT_TTL_S


def test_a_watch_that_continues_finds_the_end_of_a_living_holder(tmp_path: Path) -> None:
    lease = acquire(tmp_path, ELSEWHERE, token="o", now_s=0.0, ttl_s=4.0)

    def live(now_s: float) -> None:
        if now_s == 2.0:
            renew(tmp_path, lease, now_s=0.0)

    time = Time(live)
    watch = LeaseWatch(tmp_path, monotonic=lambda: time.now_s)
    found = []
    for _ in range(8):
        found.append(watch.look())
        time.wait(1.0)
    unknown, alive, gone = Standing.UNKNOWN, Standing.ALIVE, Standing.GONE
    assert found == [unknown, unknown, alive, alive, alive, alive, gone, gone]
