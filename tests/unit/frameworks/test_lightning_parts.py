"""The parts of a run of Lightning: links of ModelCheckpoint, the order of an epoch, the progress in a checkpoint."""

import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import unbroken
from unbroken.frameworks.epoch_rng import packed, unpacked
from unbroken.frameworks.folders import Folder
from unbroken.frameworks.framework_run import FrameworkRun, open_framework_run
from unbroken.frameworks.lightning_leftovers import Leftovers, WrittenFile, metadata_of
from unbroken.frameworks.lightning_links import FILE, SAVED_AS, Linked, Links, forget_missing, moved
from unbroken.frameworks.lightning_loader import TrainPosition, problem_of, sizes_of
from unbroken.frameworks.lightning_state import described, progress_of
from unbroken.records.layout import Layout
from unbroken.records.stop import StopReason, StopSources
from unbroken.store.keep import LastK
from unbroken.store.scan import read_quietly

SETTINGS = unbroken.Settings(save_steps=None, keep_last_k=None, console=False, catch_signals=False)


@pytest.fixture
def run(tmp_path: Path) -> Any:  # noqa: ANN401
    opened = open_framework_run(tmp_path / "run", SETTINGS, origin="lightning")
    yield opened
    opened.close(StopReason("done"), step=0)


def save(run: FrameworkRun, step: int, links: Links, path: Path | None = None) -> str:
    """As rank 0 does it: written, committed, and then linked."""

    def write(folder: Path) -> None:
        assert path is None or not path.exists()
        (folder / FILE).write_bytes(b"x" * step)

    metadata = {} if path is None else {SAVED_AS: path.name}
    policies = LastK(1), Linked(links.all())
    done = run.save_by_first(Folder(step, "lightning", {}, metadata, policies), write, coming_bytes=0)
    assert done.name is not None, done.error
    if path is not None:
        assert links.point(path, done.name)
    return done.name


@pytest.mark.promise("C11")
def test_a_link_keeps_its_checkpoint_and_lost_links_are_made_again(run: FrameworkRun, tmp_path: Path) -> None:
    models = tmp_path / "models"
    links = Links(run.store, [models], job=run.lease.job)
    best, second = models / "best.ckpt", models / "second.ckpt"
    save(run, 1, links, best)
    for step in (2, 3):
        save(run, step, links)
    assert [each.step for each in unbroken.checkpoints(run.layout.run)] == [3, 1]
    assert links.all() == {"checkpoint-1": "best.ckpt"} and best.read_bytes() == b"x"
    assert links.holds(best) and not links.holds(tmp_path / "other.ckpt")
    # Killed between the commit and the link; and one whose checkpoint is gone.
    save(run, 4, links, second)
    second.unlink()
    (models / "gone.ckpt").symlink_to("../run/checkpoint-99/lightning.ckpt")
    existing = links.mend([best, second, models / "gone.ckpt"])
    assert existing == {str(best), str(second)} and links.name_of(second) == "checkpoint-4"
    assert not (models / "gone.ckpt").is_symlink()
    # Removed: the link alone, and never a file that is not ours.
    (models / "file.ckpt").write_text("of the user")
    assert links.remove(best) and not links.remove(models / "file.ckpt")
    run.sweep((LastK(1), Linked(links.all())))
    assert [each.step for each in unbroken.checkpoints(run.layout.run)] == [4]


@pytest.mark.promise("C11")
def test_a_save_that_storage_refuses_leaves_no_draft_and_is_returned(run: FrameworkRun) -> None:
    def write(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    done = run.save_by_first(Folder(5, "lightning"), write, coming_bytes=0)
    assert done.name is None and done.error is not None and done.error.kind == "storage-failed"
    assert unbroken.checkpoints(run.layout.run) == [] and not list(run.layout.run.glob(".tmp-*"))


@pytest.mark.promise("C11")
def test_a_model_checkpoint_forgets_what_is_gone_and_follows_a_moved_run() -> None:
    scores = {"/a/1.ckpt": torch.tensor(1.0), "/a/2.ckpt": torch.tensor(2.0), "/a/3.ckpt": torch.tensor(3.0)}
    saver = SimpleNamespace(
        mode="min", best_k_models=dict(scores), best_model_path="/a/1.ckpt", kth_best_model_path="/a/3.ckpt"
    )
    forget_missing(saver, {"/a/2.ckpt", "/a/3.ckpt"})
    assert saver.best_model_path == "/a/2.ckpt" and saver.kth_best_model_path == "/a/3.ckpt"
    assert float(saver.best_model_score) == 2.0 and list(saver.best_k_models) == ["/a/2.ckpt", "/a/3.ckpt"]
    alone = SimpleNamespace(mode="max", best_k_models={}, best_model_path="/a/9.ckpt")
    forget_missing(alone, set())
    assert alone.best_model_path == ""
    state: dict[str, Any] = {"dirpath": "/a", "best_model_path": "/a/1.ckpt", "kth_best_model_path": "/a/3.ckpt"}
    state |= {"last_model_path": "/elsewhere/last.ckpt", "best_k_models": scores}
    found = moved(state, "/b")
    assert found["best_model_path"] == "/b/1.ckpt" and found["last_model_path"] == "/elsewhere/last.ckpt"
    assert list(found["best_k_models"]) == ["/b/1.ckpt", "/b/2.ckpt", "/b/3.ckpt"] and found["dirpath"] == "/b"


def drawn(loader: DataLoader[Any], batches: int) -> list[list[float]]:
    """So many batches, each with the number that a step draws after it."""
    served = iter(loader)
    return [[*next(served).tolist(), float(torch.rand(()))] for _ in range(batches)]


@pytest.mark.promise("C11")
@pytest.mark.parametrize("has_generator", [False, True])
def test_the_order_of_an_epoch_continues_after_the_batches_that_were_served(has_generator: bool) -> None:
    def loader() -> DataLoader[Any]:
        own = torch.Generator().manual_seed(int(torch.rand(()) * 1000)) if has_generator else None
        return DataLoader(list(range(20)), batch_size=3, shuffle=True, generator=own)  # type: ignore[arg-type]

    torch.manual_seed(3)
    whole = drawn(loader(), 6)
    torch.manual_seed(3)
    first = loader()
    position = TrainPosition(first)
    assert drawn(first, 2) == whole[:2]
    assert position.is_made_from_global_rng != has_generator
    saved = unpacked(packed(position.states()))
    torch.manual_seed(99)
    second = loader()
    TrainPosition(second).resume(2, saved)
    assert drawn(second, 4) == whole[2:]


@pytest.mark.promise("C11")
def test_of_several_loaders_each_resumes_in_its_own_pass() -> None:
    class Drawing(torch.utils.data.Dataset[list[float]]):
        def __getitem__(self, index: int) -> list[float]:
            return [float(index), float(torch.rand(()))]

        def __len__(self) -> int:
            return 20

    def loaders() -> list[DataLoader[Any]]:
        data = [Drawing(), torch.utils.data.Subset(Drawing(), range(7))]
        return [DataLoader(each, batch_size=3, shuffle=True) for each in data]

    def batches(of: list[DataLoader[Any]], number: int) -> list[str]:
        served = [iter(each) for each in of]
        found = []
        for _ in range(number):
            for place, loader in enumerate(of):
                batch = next(served[place], None)
                if batch is None:
                    served[place] = iter(loader)
                    batch = next(served[place])
                found.append(str(batch))
        return found

    for cut in range(1, 7):
        torch.manual_seed(3)
        whole = batches(loaders(), 7)
        torch.manual_seed(3)
        first = loaders()
        position = TrainPosition(first)
        assert batches(first, cut) == whole[: 2 * cut]
        saved = unpacked(packed(position.states()))
        torch.manual_seed(99)
        second = loaders()
        TrainPosition(second).resume(cut, saved)
        assert batches(second, 7 - cut) == whole[2 * cut :], cut


@pytest.mark.promise("C11")
def test_a_leftover_is_the_very_file_that_was_written_after_the_last_commit(run: FrameworkRun, tmp_path: Path) -> None:
    models = tmp_path / "run" / "models"
    links = Links(run.store, [models], job=run.lease.job)
    held, left, changed, old = (models / f"{name}.ckpt" for name in ("held", "left", "changed", "old"))
    save(run, 1, links, old)
    for path in (held, left, changed):
        path.write_bytes(b"weights")
        found = WrittenFile.now(run.store.files, path, run.store.root, 3)
        assert found is not None
        run.recorder.event("file-written", **vars(found))
    changed.write_bytes(b"of the user")

    def leftovers(step: int) -> Leftovers:
        return Leftovers(links, run.store.files, run.store.root, run.recorder.history().events, step)

    assert leftovers(2).written_again([held]) == {str(left)}
    assert leftovers(3).written_again([held]) == set()
    name = save(run, 4, links)
    assert leftovers(2).written_again([held]) == set()
    # Given up by the save of a checkpoint: what is held again, or is another file, or elsewhere, stays.
    (tmp_path / "elsewhere.ckpt").write_bytes(b"weights")
    names = ["models/held.ckpt", "models/left.ckpt", "models/changed.ckpt", "models/old.ckpt", "../elsewhere.ckpt"]
    manifest = read_quietly(run.store, name)
    assert manifest is not None
    leftovers(4).remove_given_up(replace(manifest, metadata=dict(metadata_of(names))), [held])
    assert [path.exists() for path in (held, left, changed, old)] == [True, False, True, False]
    assert (tmp_path / "elsewhere.ckpt").exists()
    # After a way back the files of the abandoned steps are the user's.
    again = WrittenFile.now(run.store.files, held, run.store.root, 9)
    assert again is not None
    run.recorder.event("file-written", **vars(again))
    assert leftovers(4).written_again([]) == {str(held)}
    run.recorder.event("resume", step=4, name=name, abandoned=["checkpoint-9"])
    assert leftovers(4).written_again([]) == set()


@pytest.mark.promise("C11")
def test_loaders_whose_position_cannot_be_restored_are_named() -> None:
    data: Any = list(range(8))
    assert problem_of(DataLoader(data, batch_size=2)) is None
    assert "num_workers=2" in str(problem_of(DataLoader(data, num_workers=2)))
    assert "no state_dict" in str(problem_of([1, 2]))

    class Own(BatchSampler):
        pass

    assert "batch sampler" in str(problem_of(DataLoader(data, batch_sampler=Own(RandomSampler(data), 2, False))))
    assert sizes_of({"a": DataLoader(data, batch_size=2)}) == {"batch_size": 2, "dataset_length": 8}


def checkpoint(**batch: Any) -> dict[str, Any]:  # noqa: ANN401
    counts = {"ready": 4, "started": 4, "processed": 4, "completed": 3}
    loop: dict[str, Any] = {"epoch_progress": {"current": {"started": 1, "processed": 0}}}
    loop["epoch_loop.batch_progress"] = {"current": counts, "total": counts, "is_last_batch": False, **batch}
    return {"loops": {"fit_loop": loop}, "state_dict": {"w": torch.ones(2)}, "callbacks": {"path": "/a"}}


@pytest.mark.promise("C11")
def test_a_checkpoint_says_where_its_loop_stands_and_what_it_holds() -> None:
    found = progress_of(checkpoint())
    assert found.batches == 4 and found.is_inside and not found.is_last_batch and not found.is_settled
    assert progress_of(checkpoint(is_last_batch=True)).is_last_batch
    one, other = described(checkpoint()), described({**checkpoint(), "callbacks": {"path": "/b"}})
    assert one == other and one["state_dict.w"].shape == (2,)
    assert described({**checkpoint(), "state_dict": {"w": torch.tensor([1.0, 2.0])}}) != one


@pytest.mark.promise("C11")
def test_handlers_that_a_framework_installed_are_replaced_and_the_first_ones_restored(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    stops = StopSources(Layout(tmp_path), job=1, clock=lambda: 0.0)
    with stops:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        stops.install_again()
        signal.raise_signal(signal.SIGUSR1)
        assert stops.signalled is not None and stops.signalled.detail == "SIGUSR1"
    assert signal.getsignal(signal.SIGUSR1) == before
