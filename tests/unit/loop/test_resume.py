"""Which checkpoint a job resumes from: the newest, none, a named one, or one of another run."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.unit.state.tiny import bits, job, model, quietly, tiny
from unbroken import Run
from unbroken.errors import (
    CheckpointsExist,
    CheckpointUnknown,
    FormatUnknown,
    NotExact,
    NoUsableCheckpoint,
    PathMissing,
    UnbrokenError,
)
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.store.directory import Store


def names(directory: Path) -> set[str]:
    store = directory / "checkpoints"
    return {path.name for path in store.iterdir() if not path.name.startswith(".")} - {"latest"}


def skipped(directory: Path) -> list[str | None]:
    """The checkpoints that a job of the run skipped."""
    return [event.text("name") for event in read_history(Layout(directory)).of_kind("checkpoint-skipped")]


def began(directory: Path, **changes: object) -> int:
    with Run(directory, settings=quietly(**changes), **tiny(7)) as run:
        return run.step


@pytest.mark.promise("G4")
def test_a_start_over_with_lost_checkpoints_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job(tmp_path / "run", 3, **tiny())
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    caplog.clear()
    assert began(tmp_path / "run") == 0
    [said] = [record.message for record in caplog.records if record.name == "unbroken.loop.job_start"]
    assert "step 3," in said and str(tmp_path / "run" / "checkpoints") in said
    # Who asked for a start from scratch knows it.
    job(tmp_path / "run", 2, **tiny())
    assert began(tmp_path / "run", resume="scratch", force=True) == 0
    caplog.clear()
    assert began(tmp_path / "run") == 0
    assert [record for record in caplog.records if record.name == "unbroken.loop.job_start"] == []


@pytest.mark.promise("G4", "K1")
def test_auto_starts_in_an_empty_directory_and_resumes_every_time_after(tmp_path: Path) -> None:
    assert began(tmp_path / "run") == 0
    for target in (3, 5, 5, 8):
        before = began(tmp_path / "run")
        assert job(tmp_path / "run", target, **tiny()).step == target
        assert began(tmp_path / "run") == target
        assert before <= target


@pytest.mark.promise("G4")
def test_scratch_refuses_where_there_are_checkpoints_and_force_sets_them_aside(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert began(run, resume="scratch") == 0
    job(run, 4, **tiny())
    before = names(run)
    with pytest.raises(CheckpointsExist) as refused:
        began(run, resume="scratch")
    assert refused.value.count == 2
    assert names(run) == before
    assert began(run, resume="scratch", force=True) == 0
    assert names(run) == {"abandoned"}
    assert {path.name for path in (run / "checkpoints" / "abandoned").iterdir()} == before
    # A crash right after it: auto starts at 0 and never meets the old ones.
    assert began(run) == 0


@pytest.mark.promise("G4", "K5")
def test_a_rewind_sets_the_abandoned_branch_aside_and_auto_never_meets_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job(run, 7, **tiny())
    assert {"checkpoint-4", "checkpoint-6", "final"} <= names(run)
    objects = tiny(3)
    with Run(run, settings=quietly(resume=str(run / "checkpoints" / "checkpoint-4")), **objects) as held:
        assert held.step == 4
    # It crashed before it saved anything: the next job resumes from step 4, not from the branch that was left.
    assert began(run) == 4
    assert names(run) & {"checkpoint-6", "final"} == set()
    assert {"checkpoint-6", "final"} <= {path.name for path in (run / "checkpoints" / "abandoned").iterdir()}
    job(run, 5, **tiny())
    assert began(run) == 5


@pytest.mark.promise("G4", "K3")
def test_a_path_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    for changes in ({"resume": str(tmp_path / "nothing")}, {"load_path": str(tmp_path / "nothing")}):
        with pytest.raises(PathMissing):
            began(tmp_path / "run", **changes)


@pytest.mark.promise("K3")
def test_a_warm_start_from_another_run_gives_way_to_the_runs_own_checkpoints(tmp_path: Path) -> None:
    source = tiny(1)
    job(tmp_path / "old", 6, **source)
    warm = quietly(load_path=str(tmp_path / "old"))
    objects = tiny(2)
    with Run(tmp_path / "new", settings=warm, **objects) as run:
        assert run.step == 6
        assert run.resumed_from == str(tmp_path / "old" / "checkpoints" / "final")
    assert bits(objects["model"]) == bits(source["model"])
    job(tmp_path / "new", 8, warm, **objects)
    # The same command again: its own checkpoint wins, also when the other run is gone.
    assert began(tmp_path / "new", load_path=str(tmp_path / "old")) == 8
    assert began(tmp_path / "new", load_path=str(tmp_path / "gone")) == 8


def test_a_checkpoint_of_a_newer_format_is_never_thrown_away_and_never_started_over(tmp_path: Path) -> None:
    job(tmp_path / "run", 2, **tiny())
    path = tmp_path / "run" / "checkpoints" / "final" / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"unbroken.checkpoint/2", b"unbroken.checkpoint/9"))
    with pytest.raises((NoUsableCheckpoint, FormatUnknown)):
        began(tmp_path / "run")
    assert "final" in names(tmp_path / "run")


def test_a_named_checkpoint_that_is_damaged_is_an_error_and_no_other_is_taken(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job(run, 5, **tiny())
    part = run / "checkpoints" / "checkpoint-4" / "state" / "__0_0.distcp"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    with pytest.raises(UnbrokenError) as refused:
        began(run, resume=str(run / "checkpoints" / "checkpoint-4"))
    assert refused.value.exit_code in (3, 5)


@pytest.mark.promise("K4")
@pytest.mark.parametrize("part", ["state/.metadata", "state/index.json", "state/__0_0.distcp", "trainer_state.json"])
def test_one_bit_of_any_part_is_seen_even_where_no_job_has_a_use_for_it(tmp_path: Path, part: str) -> None:
    run = tmp_path / "run"
    job(run, 5, **tiny())
    path = run / "checkpoints" / "final" / part
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert began(run) == 4
    assert (run / "checkpoints" / "quarantine" / "final").is_dir()


@pytest.mark.promise("K4")
def test_a_run_whose_every_checkpoint_is_damaged_never_silently_starts_over(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job(run, 2, **tiny())
    for part in (run / "checkpoints").glob("*/state/*.distcp"):
        part.write_bytes(bytes(part.stat().st_size))
    with pytest.raises(NoUsableCheckpoint):
        began(run)
    # They are in quarantine now; the next job must not take the empty store for a run that never began.
    assert names(run) == {"quarantine"}
    with pytest.raises(NoUsableCheckpoint) as refused:
        began(run)
    assert "quarantine/" in str(list(refused.value.details()))
    assert began(run, resume="scratch") == 0


def test_a_checkpoint_of_another_run_is_never_taken_for_one_of_this_run(tmp_path: Path) -> None:
    job(tmp_path / "one", 3, **tiny())
    job(tmp_path / "two", 5, **tiny())
    assert began(tmp_path / "new", resume=str(tmp_path / "two" / "checkpoints" / "checkpoint-4")) == 4
    with pytest.raises(CheckpointUnknown):
        began(tmp_path / "one", resume=str(tmp_path / "two" / "checkpoints" / "checkpoint-4"))


@pytest.mark.parametrize("wanted", ["4", "checkpoint-4", "00_4"])
def test_a_bare_step_or_name_is_a_checkpoint_of_this_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    job(tmp_path / "run", 7, **tiny())
    # Whatever is called so where the job is started.
    (tmp_path / wanted).mkdir()
    monkeypatch.chdir(tmp_path)
    assert began(Path("run"), resume=wanted) == 4


def test_the_hint_may_be_named_alone(tmp_path: Path) -> None:
    job(tmp_path / "run", 7, **tiny())
    assert began(tmp_path / "run", resume="latest") == 7


def test_a_bare_step_that_was_never_saved_is_reported_with_those_that_were(tmp_path: Path) -> None:
    job(tmp_path / "run", 4, **tiny())
    with pytest.raises(CheckpointUnknown) as refused:
        began(tmp_path / "run", resume="99")
    assert refused.value.reference == "99" and set(refused.value.known) == {"checkpoint-2", "final"}
    with pytest.raises(CheckpointUnknown):
        began(tmp_path / "empty", resume="99")


def test_a_newer_checkpoint_that_lost_its_manifest_is_skipped_and_journaled(tmp_path: Path) -> None:
    job(tmp_path / "run", 5, **tiny())
    store = tmp_path / "run" / "checkpoints"
    (store / "checkpoint-4" / "manifest.json").unlink()
    assert began(tmp_path / "run") == 5 and skipped(tmp_path / "run") == []
    job(tmp_path / "other", 5, **tiny())
    store = tmp_path / "other" / "checkpoints"
    (store / "checkpoint-4" / "manifest.json").unlink()
    (store / "final").rename(tmp_path / "final")
    assert began(tmp_path / "other") == 2
    assert skipped(tmp_path / "other") == ["checkpoint-4"]
    (store / "checkpoint-2" / "manifest.json").unlink()
    with pytest.raises(NoUsableCheckpoint):
        began(tmp_path / "other")


@pytest.mark.promise("U9")
def test_a_rewind_happens_once_and_the_same_request_continues_its_branch(tmp_path: Path) -> None:
    run = tmp_path / "run"
    all_kept = quietly(keep_last_k=None)
    job(run, 7, all_kept, **tiny())
    # The job that goes back is killed before it saves anything, and the next ones get the same settings.
    assert began(run, resume="4") == 4
    assert began(run, resume="4") == 4
    assert job(run, 9, quietly(resume="4", keep_last_k=None), **tiny()).step == 9
    assert began(run, resume="4") == 9
    assert read_history(Layout(run)).of_kind("resume")[-1].text("carried_out_by") is not None
    # Another request, the first one after it, and the same one twice on purpose.
    for count, resume in enumerate(("6", "4", "4#2"), start=2):
        assert began(run, resume=resume) == int(resume[0])
        job(run, 9, all_kept, **tiny())
        assert began(run, resume=resume) == 9
        assert len(list((run / "checkpoints" / ".rewinds").iterdir())) == count


@pytest.mark.promise("U9")
def test_a_request_is_remembered_where_nothing_newer_stood(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job(run, 4, **tiny())
    job(run, 9, quietly(resume="4", keep_last_k=1), **tiny())
    assert "checkpoint-4" not in names(run) and began(run, resume="4") == 9


@pytest.mark.promise("U9")
def test_a_start_from_scratch_or_from_another_run_happens_once_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job(run, 5, **tiny())
    anew = {"resume": "scratch", "force": True}
    assert began(run, **anew) == 0
    job(run, 3, quietly(**anew), **tiny())
    assert began(run, **anew) == 3
    assert began(run, resume="scratch#2", force=True) == 0
    other = {"resume": str(run) + "@2"}
    job(run, 3, **tiny())
    for _ in range(2):
        assert began(tmp_path / "other", **other) == 2
    job(tmp_path / "other", 6, quietly(**other), **tiny())
    assert began(tmp_path / "other", **other) == 6


@pytest.mark.promise("U9", "K5")
def test_a_target_that_cannot_be_loaded_abandons_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job(run, 7, **tiny())
    before = names(run)
    part = run / "checkpoints" / "checkpoint-4" / "state" / "__0_0.distcp"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    for _ in range(2):
        with pytest.raises(UnbrokenError):
            began(run, resume="4")
    assert names(run) == before and began(run) == 7


def test_final_is_the_newest_end_of_an_extended_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for target in (3, 4, 6):
        job(run, target, quietly(keep_last_k=None), **tiny())
        assert (run / "checkpoints" / "latest").readlink() == Path("final")
        assert Store(run / "checkpoints").read_manifest("final").step == target
    assert names(run) == {"checkpoint-2", "checkpoint-3", "checkpoint-4", "final"}
    assert began(run, resume="3") == 3


@pytest.mark.promise("U8")
def test_what_was_accepted_about_a_checkpoint_stays_accepted_until_the_next_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job(run, 4, **tiny())

    def more() -> dict[str, Any]:
        return {**tiny(), "average": model(3)}

    with pytest.raises(NotExact):
        job(run, 6, **more())
    with pytest.raises(RuntimeError), Run(run, settings=quietly(accept=("average",)), **more()):
        raise RuntimeError("killed before it saves")
    # The same script without the word, and then with its own checkpoint: one that lacks it needs a word again.
    assert job(run, 6, **more()).step == 6
    with pytest.raises(NotExact):
        job(run, 8, **tiny())
