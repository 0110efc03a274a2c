"""A run whose holder was on another machine: waited for while it may be dead, never taken while it lives."""

from collections.abc import Callable
from pathlib import Path

import pytest

from unbroken.errors import RunHeld
from unbroken.run.lease import DEFAULT_TTL_S, Holder, Lease, acquire, release, renew
from unbroken.run.takeover import ENVIRONMENT, patience_s, take_over

ELSEWHERE = Holder("n1/boot", 7, "1")
HERE = Holder("n2/boot", 8, "2")


class Time:
    """A clock that passes only while somebody waits, and what happens meanwhile."""

    def __init__(self, happens: Callable[[float], None] = lambda now_s: None) -> None:
        self.now_s = 0.0
        self._happens = happens

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self._happens(self.now_s)


def taken(
    run: Path, time: Time, patience: float = 65.0, process_of: Callable[[str, int], str | None] | None = None
) -> Lease:
    return take_over(
        run,
        HERE,
        token="t",
        clock=lambda: time.now_s,
        wait=time.wait,
        patience_s=patience,
        process_of=process_of,
    )


def test_a_dead_holder_elsewhere_is_waited_out(tmp_path: Path) -> None:
    acquire(tmp_path, ELSEWHERE, token="o", now_s=0.0)
    time = Time()
    assert taken(tmp_path, time).number == 2
    assert time.now_s == DEFAULT_TTL_S, "not a second before it counts as dead"


def test_a_holder_that_gives_a_sign_of_life_keeps_its_run(tmp_path: Path) -> None:
    lease = acquire(tmp_path, ELSEWHERE, token="o", now_s=0.0)

    def live(now_s: float) -> None:
        if now_s == 15.0:
            renew(tmp_path, lease, now_s=now_s)

    time = Time(live)
    with pytest.raises(RunHeld):
        taken(tmp_path, time)
    assert time.now_s == 15.0, "and nobody waits longer than until then"


def test_a_run_that_is_let_go_is_taken_at_once(tmp_path: Path) -> None:
    lease = acquire(tmp_path, ELSEWHERE, token="o", now_s=0.0)
    time = Time(lambda now_s: release(tmp_path, lease, now_s=now_s) if now_s == 3.0 else None)
    assert (taken(tmp_path, time).number, time.now_s) == (2, 3.0)


def test_on_this_machine_a_process_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    acquire(tmp_path, ELSEWHERE, token="o", now_s=0.0)
    time = Time()
    assert taken(tmp_path, time, process_of=lambda host, pid: "").number == 2
    assert time.now_s == 0.0


def test_without_patience_a_held_run_is_refused_at_once(tmp_path: Path) -> None:
    acquire(tmp_path, ELSEWHERE, token="o", now_s=0.0)
    time = Time()
    with pytest.raises(RunHeld):
        taken(tmp_path, time, patience=patience_s({}))
    assert time.now_s == 0.0
    assert patience_s({ENVIRONMENT: "1"}) > DEFAULT_TTL_S
