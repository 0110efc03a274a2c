"""A load that is not what was saved never passes: each tensor is proven, each damage met, each missing count named."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.state.tiny import bits, disk, job, model, quietly, tiny
from unbroken import Run
from unbroken.disk import LocalDisk
from unbroken.errors import DamagedCheckpoint, NotRestored, NoUsableCheckpoint, StateDiffers, StorageFailed
from unbroken.state import payload
from unbroken.state.trainer_state import TrainerState
from unbroken.testing import Fault, FaultyDisk, Operation, Refuse


class Note:
    def __init__(self) -> None:
        self.tensor = torch.arange(4.0)

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


def _spoil(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[..., None]:
    plain = payload.read

    def read(store: Any, name: Any, manifest: Any, index: Any, tensors: Any, world: Any) -> None:  # noqa: ANN401
        found = dict(tensors)
        with torch.no_grad():
            plain(store, name, manifest, index, found, world)
            change(found)

    return read


def _skip(key: str) -> Callable[..., None]:
    plain = payload.read

    def read(store: Any, name: Any, manifest: Any, index: Any, tensors: Any, world: Any) -> None:  # noqa: ANN401
        plain(store, name, manifest, index, {name: t for name, t in tensors.items() if name != key}, world)

    return read


def _flip(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.0.weight"].view(torch.int32)[1, 1] ^= 1


def _swap(tensors: dict[str, torch.Tensor]) -> None:
    weight = tensors["model.0.weight"]
    weight[0, 0], weight[1, 1] = weight[1, 1].item(), weight[0, 0].item()


def _zero(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.0.weight"].zero_()


def _reorder(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.0.weight"].copy_(tensors["model.0.weight"].flip(0))


@pytest.mark.promise("X2", "M27")
@pytest.mark.parametrize("change", [_flip, _swap, _zero, _reorder])
def test_one_element_that_is_not_what_was_saved_is_found_after_the_load(
    change: Callable[[dict[str, torch.Tensor]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(tmp_path / "run", 2, **tiny())
    monkeypatch.setattr(payload, "read", _spoil(change))
    with pytest.raises(NotRestored) as refused:
        job(tmp_path / "run", 4, **tiny(1))
    assert refused.value.names == ("model.0.weight",)


@pytest.mark.promise("M23", "M27")
@pytest.mark.parametrize("key", ["model.2.bias", "optimizer.state.0.weight.exp_avg", "note.state.tensor"])
def test_a_load_that_skips_one_key_names_it_though_the_object_had_the_right_value_before(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = {**tiny(), "note": Note()}
    job(tmp_path / "run", 2, **objects)
    monkeypatch.setattr(payload, "read", _skip(key))
    # The very same objects: what is not written would pass for what was saved, but for the pattern it is filled with.
    with pytest.raises(NotRestored) as refused:
        job(tmp_path / "run", 4, **objects)
    assert refused.value.names == (key,)


@pytest.mark.promise("C12")
@pytest.mark.parametrize("lost", ["step", "counters", "values"])
def test_a_counter_that_is_missing_is_an_error_and_never_step_0(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = TrainerState.encode
    monkeypatch.setattr(TrainerState, "encode", lambda self: plain(self).replace(f'"{lost}"'.encode(), b'"lost"'))
    job(tmp_path / "run", 2, **tiny())
    monkeypatch.undo()
    with pytest.raises(NoUsableCheckpoint) as refused:
        job(tmp_path / "run", 4, **tiny(1))
    assert refused.value.exit_code == 5
    assert "trainer_state.json" in " ".join(refused.value.details()) or lost in " ".join(refused.value.details())
    assert (tmp_path / "run" / "checkpoints" / "quarantine" / "final").exists()


def test_counters_come_back_exactly_and_are_those_of_the_saved_step(tmp_path: Path) -> None:
    def count(run: Run, step: int) -> None:
        run.counters.setdefault("best", float("inf"))
        run.counters.setdefault("seen", []).append(step)

    job(tmp_path / "run", 3, body=count, **tiny())
    with Run(tmp_path / "run", settings=quietly(), **tiny()) as run:
        assert run.counters == {"best": float("inf"), "seen": [0, 1, 2]}


def damage(checkpoint: Path) -> None:
    part = checkpoint / "state" / "__0_0.distcp"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)


def test_a_damaged_newest_checkpoint_is_quarantined_and_the_older_one_is_used(tmp_path: Path) -> None:
    job(tmp_path / "run", 4, **tiny())
    damage(tmp_path / "run" / "checkpoints" / "final")
    objects = tiny(1)
    with Run(tmp_path / "run", settings=quietly(), **objects) as run:
        assert run.step == 2
    assert (tmp_path / "run" / "checkpoints" / "quarantine" / "final").exists()


def test_with_every_checkpoint_damaged_a_run_does_not_start_over_with_half_loaded_objects(tmp_path: Path) -> None:
    job(tmp_path / "run", 2, **tiny())
    damage(tmp_path / "run" / "checkpoints" / "final")
    with pytest.raises(NoUsableCheckpoint) as refused:
        job(tmp_path / "run", 4, **tiny(1))
    assert [name for name, _ in refused.value.skipped] == ["final"]


def test_a_kind_that_changed_is_refused(tmp_path: Path) -> None:
    job(tmp_path / "run", 2, thing=model())
    with pytest.raises(StateDiffers) as refused:
        job(tmp_path / "run", 4, thing=Note())
    assert refused.value.changed == ("thing: module in the checkpoint, object here",)


def test_a_record_without_an_items_values_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = TrainerState.encode

    def without(self: TrainerState) -> bytes:
        kept = copy.copy(dict(self.values))
        kept.pop("note")
        return plain(TrainerState(self.step, self.world_size, self.kinds, kept, self.per_rank, self.counters))

    monkeypatch.setattr(TrainerState, "encode", without)
    job(tmp_path / "run", 2, note=Note())
    monkeypatch.undo()
    with pytest.raises(NoUsableCheckpoint) as refused:
        job(tmp_path / "run", 4, note=Note())
    assert "note" in " ".join(refused.value.details())


def _refuse_reading(suffix: str) -> Callable[[Operation], Fault | None]:
    return lambda operation: Refuse(5) if operation.name == "read_at" and str(operation.path).endswith(suffix) else None


def test_storage_that_refuses_while_tensors_are_read_says_that_the_objects_were_touched(tmp_path: Path) -> None:
    job(tmp_path / "run", 2, **tiny())
    fresh = tiny(1)
    before = bits(fresh["model"])
    with disk(FaultyDisk(LocalDisk(), _refuse_reading(".distcp"))), pytest.raises(StorageFailed) as refused:
        job(tmp_path / "run", 4, **fresh)
    assert bits(fresh["model"]) != before
    assert refused.value.is_half_loaded


def test_storage_that_refuses_before_anything_is_touched_says_nothing_of_the_objects(tmp_path: Path) -> None:
    job(tmp_path / "run", 2, **tiny())
    fresh = tiny(1)
    before = bits(fresh["model"])
    with disk(FaultyDisk(LocalDisk(), _refuse_reading("trainer_state.json"))), pytest.raises(StorageFailed) as refused:
        job(tmp_path / "run", 4, **fresh)
    assert bits(fresh["model"]) == before
    assert not refused.value.is_half_loaded


def test_a_named_checkpoint_that_is_damaged_says_that_the_objects_were_touched(tmp_path: Path) -> None:
    job(tmp_path / "run", 2, **tiny())
    [part] = (tmp_path / "run" / "checkpoints" / "final" / "state").glob("*.distcp")
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    with pytest.raises(DamagedCheckpoint) as refused:
        job(tmp_path / "run", 4, quietly(resume=f"{tmp_path}/run@2"), **tiny(1))
    assert refused.value.is_half_loaded


class Unwilling(Note):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise LookupError("an error of the user's own")


def test_an_object_that_refuses_its_state_leaves_a_note_that_the_others_were_touched(tmp_path: Path) -> None:
    job(tmp_path / "run", 2, note=Note(), **tiny())
    with pytest.raises(LookupError) as refused:
        job(tmp_path / "run", 4, note=Unwilling(), **tiny(1))
    assert "partly loaded" in "".join(refused.value.__notes__)
