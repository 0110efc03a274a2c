"""A leg of the schedule in terms of one script: at which step, at the how-manieth save, how slowly. Pure."""

from typing import Final

from unbroken.prove.baseline import Baseline
from unbroken.prove.schedule import Leg
from unbroken.run.drill import Drill, Fault

# A script whose steps take no time is over before anybody can interrupt it: from where it is to end, it is held up.
_STEP_S: Final = 0.05
# A request to stop is looked for once a second.
_STEP_TO_STOP_S: Final = 0.3
_SLOW_WRITE_S: Final = 0.05
# A fault that is not met, a sweep with nothing to sweep, must not let the job complete the run.
_SAVES_TO_WAIT: Final = 4


def step_of(leg: Leg, baseline: Baseline, begin: int) -> int:
    """The step at which a leg ends: behind the one it goes on from, before the last."""
    return min(max(int(leg.at * baseline.steps), begin + 1), baseline.steps - 1)


def drill_for(leg: Leg, baseline: Baseline, *, begin: int, ranks: int) -> Drill:
    """The drill of one job: what strikes inside it, and what lets it be struck from outside in time."""
    every, at = baseline.save_steps, step_of(leg, baseline, begin)
    saves = max(1, at // every - begin // every)
    edges = max(1, at - begin)
    faults = list(_trouble(leg, ranks, saves))
    stop_at: int | None = None
    if leg.ending == "save":
        when = 1 if leg.phase == "sweep" else saves
        faults.append(Fault(leg.phase, "kill", when, leg.rank % ranks if leg.phase == "parts" else 0))
        stop_at = min(baseline.steps - 1, at + _SAVES_TO_WAIT * every)
    elif leg.ending == "rank":
        faults.append(Fault("edge", "kill", edges, leg.rank % ranks, leg.pause * max(baseline.step_s, _STEP_S)))
        faults.append(_held_up(edges, _STEP_S))
        stop_at = min(baseline.steps - 1, at + _SAVES_TO_WAIT * every)
    else:
        pace_s = _STEP_TO_STOP_S if leg.ending == "stop" else _STEP_S
        if baseline.step_s < pace_s:
            faults.append(_held_up(1 if leg.trouble == "full" else edges, pace_s))
    if stop_at is not None and stop_at <= begin:
        stop_at = None
    return Drill(save_steps=every, stop_at=stop_at, faults=tuple(faults))


def _held_up(edge: int, seconds: float) -> Fault:
    return Fault("edge", "delay", edge, None, seconds)


def _trouble(leg: Leg, ranks: int, saves: int) -> list[Fault]:
    if leg.trouble == "slow":
        return [Fault("parts", "delay", 1, None, _SLOW_WRITE_S)]
    if leg.trouble == "error":
        # An earlier save than the one it is killed in, where there is one.
        rank = leg.rank % ranks if leg.refused_at == "parts" else 0
        return [Fault(leg.refused_at, leg.refusal, max(1, saves - 1), rank)]
    return []


def in_words(fault: Fault) -> str | None:
    """What a fault of a drill does to a job; None for one that only gives others the time to strike."""
    match fault.do, fault.at:
        case "delay", "edge":
            return None
        case "delay", _:
            return "slow storage"
        case "kill", "edge":
            return "one rank killed"
        case "kill", _:
            return f"killed in a save, at {fault.at}"
    return f"{fault.do.upper()} at {fault.at}"
