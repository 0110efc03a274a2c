"""Runs that this and an earlier version wrote, kept in git, still open, and resume bit for bit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Tool
from tests.format.make_golden_run import HERE, TARGET, on_the_golden_host, train
from unbroken.records.journal import KINDS, read_history
from unbroken.records.layout import Layout
from unbroken.records.outcome import read_outcome
from unbroken.records.summary import summarize
from unbroken.store.check import Level, verify
from unbroken.store.directory import Store
from unbroken.store.rewind import last_request
from unbroken.store.scan import newest_first, scan
from unbroken.testing.states import compare_checkpoints

RUNS = ("run-1", "run-2")
COMMITTED = ["checkpoint-18-shutdown", "checkpoint-16", "checkpoint-14-shutdown", "checkpoint-4"]
# What each kind of event has; the first version called some of them otherwise.
FIELDS = {
    "job-start": {"world_size", "processes", "placement", "deadline_s", "keep"},
    "resume": {"step", "name", "notes", "abandoned", "changed", "requested"},
    "checkpoint-skipped": {"name", "reason"},
    "commit": {"step", "name", "bytes", "seconds", "paused_s", "removed", "data"},
    "emergency-save": {"step", "seconds", "bytes", "host", "path", "reason"},
    "grace-too-short": {"step", "remaining_s"},
    "job-end": {"status", "exit_code", "class", "reason", "step"},
}


@pytest.fixture(params=RUNS)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a golden run, and of its emergency area beside it."""
    shutil.copytree(HERE / request.param, tmp_path, symlinks=True, dirs_exist_ok=True)
    return tmp_path / "run"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training in one job."""
    run = tmp_path_factory.mktemp("alone") / "run"
    train(run)
    return run


def test_all_of_its_checkpoints_are_found_and_verify(golden: Path) -> None:
    store = Store(golden / "checkpoints")
    found = scan(store)
    assert newest_first(store, found.committed) == COMMITTED
    assert found.quarantined == ("checkpoint-20",) and found.abandoned == ("abandoned/checkpoint-18-shutdown",)
    assert all(verify(store, name, Level.FULL).is_sound for name in found.committed)
    request = last_request(store)
    assert request is not None and (request.text, request.target) == ("16", "checkpoint-16")


def test_its_events_have_the_names_of_today(golden: Path) -> None:
    history = read_history(Layout(golden))
    assert history.torn == 0 and {fact.kind for fact in history.events} <= KINDS.keys()
    for kind, names in FIELDS.items():
        found = history.of_kind(kind)
        assert found and {name for fact in found for name in fact.values} == names, kind
    assert [fact.text("name") for fact in history.of_kind("checkpoint-skipped")] == ["checkpoint-20"]
    outcome = read_outcome(Layout(golden), now_s=0.0)
    assert outcome is not None and (outcome.status, outcome.verdict, outcome.step) == ("stopped", "again", 19)


def test_the_commands_read_it(golden: Path, unbroken: Tool) -> None:
    def document(*arguments: str) -> dict[str, Any]:
        ended = unbroken(*arguments, "--json")
        assert ended.returncode == 0, ended.stderr
        found: dict[str, Any] = json.loads(ended.stdout)
        return found

    run = str(golden)
    assert [entry["state"] for entry in document("ls", run)["entries"]].count("committed") == len(COMMITTED)
    assert document("show", f"{run}@16")["metadata"]["world_size"] == 1
    assert document("verify", run)["is_sound"]
    status = document("status", run)
    assert (status["status"], status["class"], status["resumable_step"]) == ("stopped", "again", 18)
    assert [dumps["world_size"] for dumps in status["emergency_dumps"]] == [1]
    ended = unbroken("diff", f"{run}@16", f"{run}@4", "--json")
    assert ended.returncode == 3 and "model.weight" in {each["name"] for each in json.loads(ended.stdout)["differ"]}


def test_continued_on_another_host_it_ends_with_the_bits_of_a_run_without_interruption(
    golden: Path, uninterrupted: Path
) -> None:
    model = train(golden)
    assert read_history(Layout(golden)).of_kind("resume")[-1].whole("step") == 18
    _require_same(golden, uninterrupted, model.weight)


def test_continued_on_its_own_host_it_resumes_from_its_dump(golden: Path, uninterrupted: Path) -> None:
    assert [dumps.step for dumps in summarize(Store(golden / "checkpoints"), now_s=0.0).emergencies] == [19]
    with on_the_golden_host(golden.parent):
        model = train(golden, emergency_dir=str(golden.parent / "local"))
    assert read_history(Layout(golden)).of_kind("resume")[-1].whole("step") == 19
    _require_same(golden, uninterrupted, model.weight)


def _require_same(golden: Path, uninterrupted: Path, weight: torch.Tensor) -> None:
    # Nobody seeds python's and numpy's generators here, and nobody draws from them.
    stores = [Store(run / "checkpoints") for run in (golden, uninterrupted)]
    found = compare_checkpoints(stores[0], "final", stores[1], "final", drawn={"torch"})
    assert found.step == TARGET and found.is_equal, found.lines()
    assert found.tensors and not weight.eq(1.0).any()
