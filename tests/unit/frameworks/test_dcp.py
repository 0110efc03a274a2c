"""The writer and the reader for ``dcp.save`` and ``dcp.load``: what is committed, refused and verified."""

import contextlib
import logging
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

import unbroken
from tests.trackers.board import Board
from unbroken.errors import DamagedCheckpoint, NoUsableCheckpoint, RunHeld, StartsOver, StateDiffers
from unbroken.files import LOCAL
from unbroken.frameworks.dcp import Checkpoints, Reader
from unbroken.frameworks.dcp_storage import Writer
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.store.directory import Store
from unbroken.store.seal import seal

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(seed: int = 0, **more: object) -> dict[str, Any]:
    """Tensors of all kinds, views, scalars, an empty one, and a value that is pickled."""
    made = torch.Generator().manual_seed(seed)
    wide = torch.randn(40, 30, generator=made)
    return {
        "weights": wide,
        "view": wide.t()[3:7],
        "half": torch.randn(5, generator=made).to(torch.bfloat16),
        "complex": torch.randn(4, generator=made, dtype=torch.complex64).conj(),
        "flags": torch.tensor([True, False]),
        "count": torch.tensor(seed),
        "empty": torch.zeros(0, 3),
        "schedule": {"seen": seed, "name": "cosine"},
        **more,
    }


def blank(**more: object) -> dict[str, Any]:
    return {
        name: torch.full_like(value, 1) if isinstance(value, torch.Tensor) else {"seen": -1, "name": ""}
        for name, value in state().items()
    } | more


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    assert one.keys() == other.keys()
    pairs = [(one[name], other[name]) for name in one]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def save(directory: Path, *steps: int, **options: Any) -> None:  # noqa: ANN401
    with Checkpoints(directory, console=False, catch_signals=False, **options) as checkpoints:
        if checkpoints.path:
            dcp.load(blank(), storage_reader=checkpoints.reader())
        for step in steps:
            checkpoints.step_done(step, loss=1.0 / step)
            dcp.save(state(step), storage_writer=checkpoints.writer(step))


def opened(directory: Path, **options: Any) -> Checkpoints:  # noqa: ANN401
    return Checkpoints(directory, console=False, catch_signals=False, **options)


@pytest.mark.promise("C7", "G24")
def test_a_tracker_shows_each_step_once_in_one_run(tmp_path: Path) -> None:
    board = Board()
    shown: dict[str, Any] = {"tracker_mode": "committed", "tracker_run_name": "mine", "tracker_config": {"width": 4}}
    save(tmp_path / "run", 1, 2, trackers=(board,), **shown)
    with opened(tmp_path / "run", trackers=(board,), **shown) as checkpoints:
        dcp.load(blank(), storage_reader=checkpoints.reader())
        # Never committed: it is not shown.
        checkpoints.step_done(3, loss=9.0)
    save(tmp_path / "run", 3, 4, trackers=(board,), **shown)
    assert list(board.runs.values()) == [[(1, 1.0), (2, 1 / 2), (3, 1 / 3), (4, 1 / 4)]]
    assert {(each.name, each.config["width"]) for each in board.started} == {("mine", 4)}


@pytest.mark.promise("C7")
def test_save_steps_auto_saves_after_a_minute_and_one_is_kept_per_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr("unbroken.loop.opening._monotonic", lambda: now_s)
    due = []
    kept: dict[str, Any] = {"keep_last_k": 1, "keep_every_seconds": 3600.0}
    with opened(tmp_path / "run", save_steps="auto", **kept) as checkpoints:
        for step in range(1, 9):
            now_s += 10.0
            if checkpoints.step_done(step):
                due.append(step)
            if step >= 6:
                dcp.save(state(step), storage_writer=checkpoints.writer(step))
    # At the last edge before the minute is over, and then not at every step.
    assert due == [6]
    assert [each.step for each in unbroken.checkpoints(tmp_path / "run")] == [8, 6]
    with pytest.raises(TypeError, match="Checkpoints has no option keep_all"):
        opened(tmp_path / "run", keep_all=True)


@pytest.mark.promise("C7", "X6")
def test_a_checkpoint_loads_bit_for_bit_and_stock_dcp_reads_it(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, 2)
    with opened(tmp_path / "run") as checkpoints:
        assert checkpoints.step == 2
        loaded = blank()
        dcp.load(loaded, storage_reader=checkpoints.reader())
        assert equal(loaded, state(2))
    by_torch = blank()
    dcp.load(by_torch, checkpoint_id=tmp_path / "run" / "checkpoint-2")
    assert equal(by_torch, state(2))
    older = blank()
    dcp.load(older, storage_reader=Reader(f"{tmp_path / 'run'}@1"))
    assert equal(older, state(1))
    commits = read_history(Layout(tmp_path / "run")).of_kind("commit")
    assert [event.values["name"] for event in commits] == ["checkpoint-1", "checkpoint-2"]
    assert unbroken.checkpoints(tmp_path / "run")[0].metrics == {"loss": 0.5}


@pytest.mark.promise("C7")
def test_what_the_state_dict_leaves_out_or_asks_in_vain_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    with opened(tmp_path / "run") as checkpoints:
        left_out, by_torch = blank(), blank()
        for each in (left_out, by_torch):
            del each["schedule"], each["half"]
        # Torch alone loads the rest, and says nothing.
        dcp.load(by_torch, checkpoint_id=tmp_path / "run" / "checkpoint-1")
        with pytest.raises(dcp.CheckpointException, match=r"only in the checkpoint: half(.|\n)*schedule"):
            dcp.load(left_out, storage_reader=checkpoints.reader())
        assert torch.equal(left_out["weights"], blank()["weights"])
        with pytest.raises(dcp.CheckpointException, match="Missing key in checkpoint state_dict: bias"):
            dcp.load(blank(bias=torch.zeros(3)), storage_reader=checkpoints.reader())
        # Both on request.
        dcp.load(left_out, storage_reader=checkpoints.reader(partial=True))
        planner = DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(blank(bias=torch.zeros(3)), storage_reader=checkpoints.reader(), planner=planner)


@pytest.mark.promise("C3", "X6")
def test_a_damaged_byte_is_never_loaded(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run, 1, 2)
    part = run / "checkpoint-2" / "__0_0.distcp"
    with opened(run) as checkpoints:
        reader = checkpoints.reader()
        data = bytearray(part.read_bytes())
        data[700] ^= 1
        part.write_bytes(data)
        # Damaged after it was chosen: the reader notices.
        loaded = blank()
        with pytest.raises(dcp.CheckpointException, match=r"__0_0[.]distcp: bytes 0 to"):
            dcp.load(loaded, storage_reader=reader)
        assert equal(loaded, blank())
    with opened(run) as checkpoints:
        # Damaged before: the next older one is chosen.
        assert checkpoints.step == 1 and (run / "quarantine" / "checkpoint-2").is_dir()
    index = run / "checkpoint-1" / ".metadata"
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpoint, match=r"\.metadata"):
        Reader(run / "checkpoint-1")
    with pytest.raises(NoUsableCheckpoint):
        opened(run)


@pytest.mark.promise("C12", "C7")
def test_a_loop_that_does_not_load_or_counts_from_the_start_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "run", 4)
    with opened(tmp_path / "run") as checkpoints:
        with pytest.raises(StartsOver, match="checkpoint-4"):
            checkpoints.step_done(5)
        with pytest.raises(StartsOver, match="checkpoint-4"):
            checkpoints.writer(5)
        dcp.load(blank(), storage_reader=checkpoints.reader())
        with pytest.raises(StartsOver):
            checkpoints.step_done(1)
        assert not checkpoints.step_done(5)
        with pytest.raises(RunHeld):
            opened(tmp_path / "run")


@pytest.mark.promise("X6")
def test_a_save_that_was_not_reported_whole_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    real = Writer.finish

    def without_one(self: Writer, metadata: Metadata, results: list[list[Any]]) -> None:
        real(self, metadata, [[each for each in results[0] if each.index.fqn != "half"]])

    with opened(run) as checkpoints:
        monkeypatch.setattr(Writer, "finish", without_one)
        with pytest.raises(dcp.CheckpointException, match=r"half at .*planned and not reported"):
            dcp.save(state(1), storage_writer=checkpoints.writer(1))
        monkeypatch.undo()
        assert not unbroken.checkpoints(run) and list(run.glob(".tmp-*"))
        # The next attempt at the step makes a new draft.
        dcp.save(state(1), storage_writer=checkpoints.writer(1))
    assert [each.name for each in unbroken.checkpoints(run)] == ["checkpoint-1"]
    assert not list(run.glob(".tmp-*"))


@pytest.mark.promise("X6")
def test_a_checkpoint_id_names_the_checkpoint_and_states_its_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with opened(run, keep_last_k=1, keep_milestone_every=10) as checkpoints:
        writer = checkpoints.writer()
        for step in (10, 15, 20):
            dcp.save(state(step), storage_writer=writer, checkpoint_id=run / f"step-{step}")
        with pytest.raises(ValueError, match="does not state a step"):
            dcp.save(state(1), storage_writer=checkpoints.writer(), checkpoint_id=run / "best")
        with pytest.raises(ValueError, match="does not state step 21"):
            dcp.save(state(1), storage_writer=checkpoints.writer(21), checkpoint_id=run / "step-22")
        with pytest.raises(ValueError, match="is not in the run's directory"):
            dcp.save(state(1), storage_writer=writer, checkpoint_id=tmp_path / "other" / "step-22")
    assert [each.name for each in unbroken.checkpoints(run)] == ["step-20", "step-10"]
    with opened(run) as checkpoints:
        loaded = blank()
        dcp.load(loaded, storage_reader=checkpoints.reader(), checkpoint_id=run / "step-20")
        assert equal(loaded, state(20))
        with pytest.raises(ValueError, match="reads step-20, not step-10"):
            dcp.load(loaded, storage_reader=checkpoints.reader(), checkpoint_id=run / "step-10")
    with opened(run, resume=10) as checkpoints:
        assert checkpoints.step == 10


@pytest.mark.promise("X6")
def test_folders_of_stock_dcp_from_before_are_not_thrown_away_and_load_once_sealed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    dcp.save(state(7), checkpoint_id=run / "step-7")
    with pytest.raises(NoUsableCheckpoint, match="step-7"):
        opened(run)
    seal(Store(run, LOCAL), "step-7", at_ns=1)
    with opened(run) as checkpoints:
        loaded = blank()
        dcp.load(loaded, storage_reader=checkpoints.reader())
        assert checkpoints.step == 7 and equal(loaded, state(7))


@pytest.mark.promise("X6")
def test_other_folders_and_files_stay(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "tensorboard").mkdir(parents=True)
    (run / "notes.txt").write_text("mine")
    for _ in range(2):
        # The second job finds the records of one that ended before its first save.
        opened(run).close()
        assert (run / "tensorboard").is_dir() and (run / "notes.txt").read_text() == "mine"


@pytest.mark.promise("X6")
def test_a_save_from_another_process_or_by_each_rank_alone_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "run") as checkpoints:
        writer = checkpoints.writer(1)
        with pytest.raises(TypeError, match=r"AsyncCheckpointerType[.]THREAD"):
            pickle.dumps(writer)
        with pytest.raises(ValueError, match="all ranks of the run save together"):
            writer.set_up_storage_writer(True, rank=0, use_collectives=False)
        with pytest.raises(ValueError, match="all ranks of the run save together"):
            writer.set_up_storage_writer(False, rank=1, use_collectives=True)


@pytest.mark.promise("X6")
def test_an_index_that_leads_out_of_the_checkpoint_reads_nothing_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run, 1)
    store = Store(run, LOCAL)
    reader = Reader(run / "checkpoint-1")
    for place in reader.read_metadata().storage_data.values():
        place.relative_path = "../../secret"
    with pytest.raises(dcp.CheckpointException, match="the manifest does not name it"):
        dcp.load(blank(), storage_reader=reader)
    assert store.read_manifest("checkpoint-1").origin == "torch-dcp"


@pytest.mark.promise("C7")
def test_a_resumed_job_says_that_the_data_is_positioned_by_the_script(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 2)
    assert not [record for record in caplog.records if "batches" in record.message]
    with caplog.at_level(logging.INFO):
        opened(tmp_path).close()
    assert [record for record in caplog.records if "batches" in record.message and "2 steps" in record.message]


@pytest.mark.promise("C7")
def test_steps_that_the_loop_left_unsaved_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1, 2)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    with opened(tmp_path, save_steps=10) as checkpoints:
        dcp.load(blank(), storage_reader=checkpoints.reader())
        for step in (3, 4):
            assert not checkpoints.step_done(step)
    assert [record for record in caplog.records if record.levelname == "WARNING" and "2 steps" in record.message]


def ends(directory: Path) -> list[tuple[str | None, str | None, str | None]]:
    events = read_history(Layout(directory)).of_kind("job-end")
    return [(event.text("status"), event.text("class"), event.text("reason")) for event in events]


@pytest.mark.promise("C7")
def test_a_loop_that_an_exception_left_is_recorded_as_an_error_and_can_be_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def fails(message: str) -> None:
        """A cell of a notebook, without ``with``."""
        checkpoints = opened(run)
        if checkpoints.path:
            dcp.load(blank(), storage_reader=checkpoints.reader())
        step = checkpoints.step + 1
        checkpoints.step_done(step)
        dcp.save(state(step), storage_writer=checkpoints.writer(step))
        raise ValueError(message)

    with contextlib.suppress(ValueError):
        fails("caught, and nobody knows it any more")
    try:
        fails("loss of a batch is odd")
    except ValueError:
        # Tried again where it is handled.
        with contextlib.suppress(ValueError):
            fails("nobody caught it")
    shown = ValueError("nobody caught it")
    try:
        raise shown
    except ValueError:
        monkeypatch.setattr("sys.last_value", shown, raising=False)
    opened(run).close()
    assert ends(run) == [
        (
            "error",
            "look",
            "TrainingLeft: an exception or sys.exit left the training at step 1, or it ended without close()",
        ),
        ("error", "look", "ValueError: loss of a batch is odd"),
        ("error", "look", "ValueError: nobody caught it"),
        ("completed", "done", "the target is reached"),
    ]


@pytest.mark.promise("C13")
def test_signals_are_left_alone_until_the_loop_asks_whether_to_stop(tmp_path: Path) -> None:
    def listeners() -> list[object]:
        return [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]

    own = listeners()
    with Checkpoints(tmp_path / "run", console=False) as checkpoints:
        for step in (1, 2):
            dcp.save(state(step), storage_writer=checkpoints.writer(step))
        # This loop could not be ended by a signal that a handler of ours had taken.
        assert listeners() == own
        checkpoints.step_done(3)
        assert all(now is not before for now, before in zip(listeners(), own, strict=True))
        signal.raise_signal(signal.SIGTERM)
        assert checkpoints.step_done(4) and checkpoints.is_stopping
    assert listeners() == own


@pytest.mark.promise("C13")
@pytest.mark.parametrize(("is_asking", "count"), [(False, 1), (True, 0)])
def test_a_loop_that_saves_and_never_asks_gets_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_asking: bool, count: int
) -> None:
    with opened(tmp_path / "run") as checkpoints:
        for step in (1, 2, 3, 4):
            if is_asking:
                checkpoints.step_done(step)
            dcp.save(state(step), storage_writer=checkpoints.writer(step))
    told = [record for record in caplog.records if record.levelname == "WARNING" and "step_done" in record.message]
    assert len(told) == count


@pytest.mark.promise("C7")
def test_a_resumed_script_learns_which_batches_to_skip(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path / "run", 1, 2)
    with caplog.at_level("INFO"), opened(tmp_path / "run"):
        pass
    assert "unless the state dict contains the loader" in caplog.text and "skip the batches of 2 steps" in caplog.text
    caplog.clear()

    class SavesItsLoader(Checkpoints):
        _position = ""

    with caplog.at_level("INFO"), SavesItsLoader(tmp_path / "run", console=False, catch_signals=False):
        pass
    assert "position in the data" not in caplog.text


@pytest.mark.promise("C7")
def test_the_refusal_of_an_optimizer_before_its_first_step_says_what_to_do(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    asked = blank()
    del asked["weights"]
    with opened(tmp_path / "run") as checkpoints, pytest.raises(dcp.CheckpointException) as refused:
        dcp.load(asked, storage_reader=checkpoints.reader())
    ((cause, _),) = refused.value.failures.values()
    assert isinstance(cause, StateDiffers) and [each.command for each in cause.help()] == [
        "get_optimizer_state_dict(...)",
        "reader(partial=True)",
    ]
