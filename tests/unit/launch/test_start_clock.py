"""How long a job takes to start: parts that follow one another, from the command on."""

import time

import pytest

from unbroken.launch.start_clock import (
    COMPILE,
    FIRST_STEP,
    LAUNCHED,
    StartClock,
    launched_now,
    process_began_s,
    uptime_s,
)


def test_parts_follow_one_another_and_add_up() -> None:
    times, spent = iter([10.0, 12.5, 15.0, 15.5]), iter([1.0, 2.0, 4.0, 4.25])
    clock = StartClock(lambda: next(times), lambda: next(spent))
    for part in (FIRST_STEP, COMPILE, FIRST_STEP):
        clock.done(part)
    assert clock.as_json() == {
        "seconds": 5.5,
        "parts": {"compile": 2.5, "first_step": 3.0},
        "cpu_parts": {"compile": 2.0, "first_step": 1.25},
    }


def test_a_process_counts_since_its_command() -> None:
    environ = {LAUNCHED: f"{uptime_s() - 100:.3f}"}
    began_s = process_began_s()
    assert began_s is not None
    found = StartClock.of_process(environ).as_json()
    parts = found["parts"]
    assert isinstance(parts, dict) and list(parts) == ["launch", "interpreter"]
    assert parts["interpreter"] == pytest.approx(uptime_s() - began_s, abs=30)
    assert found["seconds"] == pytest.approx(100, abs=30) or parts["interpreter"] > 100, "this process is older"


@pytest.mark.parametrize("environ", [{}, {LAUNCHED: "soon"}, {LAUNCHED: "1", "TORCHELASTIC_RESTART_COUNT": "2"}])
def test_a_launch_that_is_not_known_or_of_an_earlier_job_is_not_counted(environ: dict[str, str]) -> None:
    assert list(StartClock.of_process(environ).as_json()["parts"]) == ["interpreter"]  # type: ignore[call-overload]


def test_a_restart_counts_from_its_own_start() -> None:
    time.sleep(0.02)
    first, again = (float(launched_now(is_restart=each)[LAUNCHED]) for each in (False, True))
    assert first == pytest.approx(process_began_s(), abs=0.001)
    assert again == pytest.approx(uptime_s(), abs=30) and again > first
