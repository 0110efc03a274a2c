"""The drill: a file that makes a job run otherwise, and that is never passed by."""

import json
from pathlib import Path
from typing import Any

import pytest

from unbroken.errors import DrillUnreadable
from unbroken.records.drill import ACTIONS, ENVIRONMENT, PHASES, Drill, Fault, read_drill, write_drill

WHOLE = Drill(
    directory=Path("/elsewhere/run"),
    save_steps=5,
    stop_at=17,
    stops_as="periodic",
    faults=(
        Fault("manifest", "kill", 2),
        Fault("parts", "delay", rank=None, seconds=0.5),
        Fault("latest", "eio", 1, 3),
    ),
)


def recorded(path: Path) -> dict[str, str]:
    return {ENVIRONMENT: str(path)}


@pytest.mark.parametrize("drill", [Drill(), WHOLE, Drill(faults=(Fault("edge", "kill", seconds=0.1),))], ids=str)
def test_what_was_written_is_read(tmp_path: Path, drill: Drill) -> None:
    write_drill(tmp_path / "drill.json", drill)
    assert read_drill(recorded(tmp_path / "drill.json")) == drill


def test_without_the_variable_there_is_no_drill() -> None:
    assert read_drill({}) is None


def test_a_drill_that_is_not_there_is_an_error_and_not_a_real_job(tmp_path: Path) -> None:
    with pytest.raises(DrillUnreadable, match="cannot be read"):
        read_drill(recorded(tmp_path / "gone.json"))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"schema": "unbroken.drill/9"}, "schema"),
        ({"direktory": "/x"}, "unknown member 'direktory'"),
        ({"directory": 3}, "'directory'"),
        ({"save_steps": 0}, "counts from 1"),
        ({"save_steps": True}, "'save_steps'"),
        ({"stop_at": -1}, "'stop_at'"),
        ({"stops_as": "sealed"}, "'stops_as'"),
        ({"faults": [{"at": "moon", "do": "kill", "when": 1, "rank": 0, "seconds": 0.0}]}, "no phase 'moon'"),
        ({"faults": [{"at": "parts", "do": "melt", "when": 1, "rank": 0, "seconds": 0.0}]}, "no fault 'melt'"),
        ({"faults": [{"at": "parts", "do": "kill", "when": 0, "rank": 0, "seconds": 0.0}]}, "first time"),
        ({"faults": [{"at": "edge", "do": "eio", "when": 1, "rank": 0, "seconds": 0.0}]}, "nothing is written"),
        ({"faults": [{"at": "parts", "do": "delay", "when": 1, "rank": 0, "seconds": -1.0}]}, "seconds"),
        ({"faults": [{"at": "parts", "do": "kill", "when": 1, "rank": 0, "seconds": 0.0, "why": ""}]}, "'why'"),
        ({"faults": [{"at": "parts", "do": "kill"}]}, "lacks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_drill_that_says_anything_else_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    path = tmp_path / "drill.json"
    write_drill(path, WHOLE)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(DrillUnreadable, match=complaint):
        read_drill(recorded(path))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": "unbroken.drill/1"}', "[" * 100_000])
def test_a_malformed_drill_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "drill.json").write_text(text)
    with pytest.raises(DrillUnreadable):
        read_drill(recorded(tmp_path / "drill.json"))


def test_every_phase_and_action_has_words() -> None:
    assert all(PHASES.values())
    assert all(ACTIONS.values())


def test_a_drill_describes_its_faults() -> None:
    said = str(WHOLE)
    for word in ("/elsewhere/run", "every 5 steps", "stops at step 17", "kill at manifest, time 2", "on every rank"):
        assert word in said
    assert str(Drill()) == "no difference to a real job"
