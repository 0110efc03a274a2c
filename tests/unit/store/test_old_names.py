"""Names of earlier versions are read as today's, in every schema, and never written."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.format.make_golden_run import HERE
from unbroken.data.stream_record import read_stream_record
from unbroken.store.fields import Malformed
from unbroken.store.old_names import updated, updated_event

ERA = {"at_sample": 0, "epochs": 1, "on_exhausted": "halt", "sequences": {}, "shards": {}}
TODAY = {
    "schema": "unbroken.stream/2",
    "split": "train",
    "max_length": 8,
    "overlap": 0,
    "seed": "1",
    "packing": True,
    "shuffle": True,
    "eras": [ERA],
}


def documents(run: str, name: str) -> list[dict[str, Any]]:
    """The golden run's files of one name, parsed; the quarantined checkpoint is damaged."""
    found = [path for path in sorted((HERE / run).rglob(name)) if "quarantine" not in path.parts]
    return [json.loads(line) for path in found for line in path.read_text().splitlines() if line]


RECORDS = ["trainer_state.json", "ranks/*.json", "emergency.json", "emergency/rank-*.json", ".rewinds/*.json"]


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_of_the_first_version_has_the_fields_of_today_s(name: str) -> None:
    old, today = (documents(run, name) for run in ("run-1", "run-2"))
    assert old and today and "/1" in old[0]["schema"]
    for one, other in zip(old, today, strict=True):
        found = updated(one)
        assert found.keys() == other.keys() and found["schema"] == other["schema"]
        assert updated(other) is other


def test_no_event_is_written_under_an_old_name() -> None:
    for line in documents("run-2", "job-*.jsonl"):
        kind = line.pop("kind", None)
        if kind is not None:
            assert updated_event(kind, line) == (kind, line)


def test_a_stream_of_the_first_version_is_read_as_today_s() -> None:
    old_era = {"on_dry" if name == "on_exhausted" else name: value for name, value in ERA.items()}
    assert read_stream_record({**TODAY, "schema": "unbroken.stream/1", "eras": [old_era]}) == read_stream_record(TODAY)


def test_a_name_of_today_in_an_old_record_is_refused() -> None:
    with pytest.raises(Malformed, match="world_size"):
        updated({"schema": "unbroken.trainer-state/1", "world": 1, "world_size": 1})


@pytest.mark.parametrize("value", [None, 7, [], "x", {}, {"schema": 1}, {"schema": "other/1", "world": 1}])
def test_what_has_no_old_schema_is_left_as_it_is(value: object) -> None:
    assert updated(value) is value


def test_an_event_of_a_kind_that_is_not_known_is_left_as_it_is() -> None:
    assert updated_event("mine", {"world": 1}) == ("mine", {"world": 1})
    assert updated_event("emergency-mirror", {"path": "/s"}) == ("emergency-copy", {"path": "/s"})
    # A damaged line may have both: today's counts.
    assert updated_event("job-end", {"verdict": "look", "class": "again"}) == ("job-end", {"class": "again"})


def test_the_golden_directories_are_there() -> None:
    assert {path.name for path in Path(HERE).iterdir()} >= {"format-1", "format-2", "run-1", "run-2", "shards-1"}
