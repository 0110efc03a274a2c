"""One picture of a run: its status, its lines, and what the live snapshot may say."""

import errno
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.unit.store.saving import save, store_with
from unbroken.cli.json_fields import iso_time, number
from unbroken.disk import LocalDisk
from unbroken.files import Files
from unbroken.records.journal import History
from unbroken.records.layout import Layout, run_of
from unbroken.records.lease import Holder, Lease, acquire, release
from unbroken.records.outcome import derive
from unbroken.records.snapshot import RunState, read_run_state
from unbroken.records.summary import checkpoint_lines, summarize
from unbroken.store.choose import quarantine
from unbroken.store.commit import begin
from unbroken.store.directory import Store
from unbroken.store.keep import LastK
from unbroken.store.names import DraftName, trash_name
from unbroken.store.rewind import rewind
from unbroken.testing import FaultyDisk, Refuse, always

HELD = Lease(1, "a", Holder("h", 1, "s"), 0.0, 0.0)
FREED = Lease(1, "a", Holder("h", 1, "s"), 0.0, 0.0, is_released=True)


@pytest.mark.parametrize(
    ("said", "lease", "is_live", "status"),
    [
        ("running", HELD, True, "running"),
        ("completed", HELD, True, "running"),
        (None, HELD, True, "running"),
        ("running", HELD, False, "crashed"),
        ("running", None, False, "crashed"),
        ("running", FREED, False, "crashed"),
        (None, HELD, False, "crashed"),
        ("completed", HELD, False, "completed"),
        ("stopped", FREED, False, "stopped"),
        ("halted", HELD, False, "halted"),
        ("error", FREED, False, "error"),
        (None, FREED, False, None),
        (None, None, False, None),
    ],
)
def test_the_status_of_a_run_without_a_journal(
    said: str | None, lease: Lease | None, is_live: bool, status: str | None
) -> None:
    state = RunState(status=said) if said else None
    found = derive(lease, History(), state, is_live=is_live)
    assert (found.status if found else None) == status


def test_a_summary_says_who_holds_the_run_and_what_it_could_resume_from(tmp_path: Path) -> None:
    store = store_with(tmp_path / "run" / "checkpoints", 1, 2)
    (store.root / "checkpoint-2" / "trainer_state.json").unlink()
    lease = acquire(tmp_path / "run", Holder("h", 1, "s"), token="a", now_s=0.0)
    found = summarize(store, now_s=1.0)
    assert (found.run, found.status, found.newest_usable_name) == (str(tmp_path / "run"), "running", "checkpoint-1")
    assert found.skipped == (("checkpoint-2", "trainer_state.json: is missing"),)
    assert found.lease == lease
    assert summarize(store, now_s=1000.0).status == "crashed"
    release(tmp_path / "run", lease, now_s=2.0)
    assert summarize(store, now_s=3.0).status == "idle"


def test_a_newer_checkpoint_without_its_manifest_is_skipped(tmp_path: Path) -> None:
    store = store_with(tmp_path / "run" / "checkpoints", 1, 2, 3, 4)
    for step in (1, 3, 4):
        folder = store.root / f"checkpoint-{step}"
        (folder / "state").mkdir(exist_ok=True)
        (folder / "state" / "index.json").write_text("{}")
        (folder / ("trainer_state.json" if step == 3 else "manifest.json")).unlink()
    found = summarize(store, now_s=0.0)
    assert found.newest_usable_name == "checkpoint-2"
    assert found.skipped == (
        ("checkpoint-4", "manifest.json: is missing"),
        ("checkpoint-3", "trainer_state.json: is missing"),
    )


def test_a_run_that_holds_nothing_is_empty(tmp_path: Path) -> None:
    found = summarize(Store(tmp_path / "checkpoints"), now_s=0.0)
    assert found.status == "empty" and found.newest_usable is None


def test_every_entry_in_a_store_has_its_line(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2, 3, 4, 5)
    begin(store, step=6, job="j9").write_part("a", [b"123"])
    quarantine(store, "checkpoint-5", ("why",), job="j", at_ns=1)
    rewind(store, ["checkpoint-4", "checkpoint-3"], target="checkpoint-3", job="j", at_ns=1)
    (tmp_path / "checkpoint-2" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-1" / "manifest.json").write_bytes(b"ruined")
    (tmp_path / "quarantine" / "checkpoint-5" / "manifest.json").write_bytes(b"ruined")
    (tmp_path / trash_name("x")).mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "step_9.pt").write_text("")
    (tmp_path / "mine.txt").write_text("")
    command = f"unbroken seal {tmp_path / 'mine'}"
    (tmp_path / "latest").symlink_to("checkpoint-3")
    lines = checkpoint_lines(store, [LastK(1)])
    assert [(line.name, line.state, line.step, line.note) for line in lines] == [
        ("checkpoint-3", "committed", 3, "latest"),
        ("checkpoint-2", "damaged", 2, "trainer_state.json: is missing"),
        ("checkpoint-1", "damaged", None, lines[2].note),
        (str(DraftName("j9", 6, 1)), "torn", 6, "written by j9, never committed"),
        ("quarantine/checkpoint-5", "quarantined", None, "its manifest does not verify"),
        ("abandoned/checkpoint-4", "abandoned", 4, None),
        (trash_name("x"), "leftover", None, "the next sweep removes it"),
        ("mine", "foreign", None, f"not ours, never touched; to make it a checkpoint: {command}"),
        ("mine.txt", "foreign", None, "not ours, never touched"),
    ]
    assert lines[0].kept_because == ("newest usable", "last 1") and lines[3].size_bytes == 3


def _state(tmp_path: Path, value: Any) -> RunState | None:  # noqa: ANN401 -- whatever JSON can hold
    (tmp_path / ".run_state.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return read_run_state(Layout(tmp_path))


def test_the_snapshot_is_read_by_the_names_that_tools_know(tmp_path: Path) -> None:
    assert read_run_state(Layout(tmp_path)) is None
    written = {"status": "stopped", "pid": 7, "global_step": 5, "max_steps": 9, "tokens_trained": 99, "loss": 1}
    found = _state(tmp_path, {**written, "error": "e", "updated_at": "2025-01-02T03:04:05+00:00"})
    at = datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp()
    assert found == RunState("stopped", 7, 5, 9, 99, 1.0, "e", at)
    zoneless = _state(tmp_path, {"updated_at": "2025-01-02T03:04:05"})
    assert zoneless is not None and zoneless.updated_at_s == at


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "\ufeff[]", '{"pid": 1' + "0" * 5000 + "}"])
def test_a_snapshot_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    assert _state(tmp_path, text) is None


def test_a_field_that_is_written_wrongly_is_none(tmp_path: Path) -> None:
    wrong = {"status": "dancing", "pid": True, "global_step": -1, "max_steps": 1.5, "tokens_trained": "9"}
    found = _state(tmp_path, {**wrong, "loss": 10**400, "error": 5, "updated_at": "yesterday"})
    assert found == RunState()
    listed = _state(tmp_path, {"status": ["running"], "loss": True, "updated_at": []})
    assert listed == RunState()


def test_the_run_of_a_store_is_found_from_inside_it_and_through_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_with(tmp_path / "run" / "checkpoints", 1)
    (tmp_path / "link").symlink_to("run/checkpoints")
    save(Store(tmp_path / "outputs"), 1)
    run = tmp_path / "run"
    assert run_of(Store(run / "checkpoints")).run == run
    assert run_of(Store(tmp_path / "link")).run == run
    assert run_of(Store(tmp_path / "outputs")).run == tmp_path / "outputs"
    monkeypatch.chdir(run / "checkpoints")
    assert run_of(Store(Path())).run == run
    monkeypatch.chdir(run / "checkpoints" / "checkpoint-1")
    assert run_of(Store(Path(".."))).run == run


def test_the_names_of_a_run_are_those_of_the_layout(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    names = [layout.checkpoints.name, layout.config.name, layout.run_state.name]
    assert names == ["checkpoints", "config.json", ".run_state.json"]


def test_an_instant_beyond_every_calendar_is_none() -> None:
    assert iso_time(None) is None and iso_time(10**40) is None
    assert iso_time(1_000_000_000) == "1970-01-01T00:00:01+00:00"
    assert [number(value) for value in (0.5, float("nan"), float("-inf"))] == [0.5, "nan", "-inf"]


def test_what_could_not_be_read_is_not_called_damaged(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2, 3)
    manifest = tmp_path / "checkpoint-3" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"unbroken.checkpoint/2", b"unbroken.checkpoint/9"))
    refusing = always("open", Refuse(errno.EIO))
    assert [line.state for line in checkpoint_lines(store)] == ["newer-format", "committed", "committed"]
    unreadable = Store(tmp_path, Files(FaultyDisk(LocalDisk(), refusing)))
    assert {line.state for line in checkpoint_lines(unreadable)} == {"unreadable"}


def test_a_checkpoint_of_ours_without_its_manifest_is_damaged_and_a_folder_of_another_tool_is_not(
    tmp_path: Path,
) -> None:
    store = store_with(tmp_path, 1)
    save(store, 2, parts={"state/index.json": b"{}"})
    save(store, 3, parts={"ranks/rank-00000.json": b"{}"})
    for name in ("checkpoint-1", "checkpoint-2", "checkpoint-3"):
        (tmp_path / name / "manifest.json").unlink()
    found = {line.name: (line.state, line.note) for line in checkpoint_lines(store)}
    assert found["checkpoint-2"] == found["checkpoint-3"] == ("damaged", "manifest.json: is missing")
    # Other trainers have this name and this file too.
    assert found["checkpoint-1"][0] == "foreign"
