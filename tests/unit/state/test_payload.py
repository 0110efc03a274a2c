"""Tensors go to parts and come back bit for bit, in one process; nothing is lost, doubled or made up."""

from pathlib import Path

import pytest
import torch

from tests.unit.state.payloads import (
    ALONE,
    differing,
    load,
    poisoned,
    random_bits,
    same_bits,
    save,
    tensors_of_every_kind,
)
from unbroken import Run, Settings, errors
from unbroken.state import read as read_module
from unbroken.state.description import finish
from unbroken.state.index import Box
from unbroken.state.items import OptimizerItem, make_items
from unbroken.state.payload import Written, plan_save, read_index, write
from unbroken.state.pieces import LARGE_BYTES, number_of_files
from unbroken.state.planners import Piece
from unbroken.state.save import expected_bytes
from unbroken.state.stage import Buffers, stage
from unbroken.store import parts
from unbroken.store.commit import begin
from unbroken.store.digest import digest_bytes
from unbroken.store.directory import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.mark.filterwarnings("ignore:.* support is experimental")
@pytest.mark.parametrize(("files", "arena_bytes"), [(1, 1 << 26), (3, 1 << 12)])
def test_tensors_of_every_dtype_shape_and_layout_come_back_bit_for_bit(
    store: Store, files: int, arena_bytes: int
) -> None:
    tensors = tensors_of_every_kind()
    name = save(store, tensors, files=files, arena_bytes=arena_bytes)
    fresh = poisoned(tensors)
    load(store, name, fresh)
    assert differing(tensors, fresh) == []
    parts = {part.name for part in store.read_manifest(name).parts}
    assert parts == {f"state/__0_{n}.distcp" for n in range(files)} | {"state/index.json", "state/.metadata"}


def test_a_part_of_the_tensors_can_be_read_alone(store: Store) -> None:
    tensors = tensors_of_every_kind()
    name = save(store, tensors)
    wanted = {key: tensors[key] for key in ("model.bfloat16", "flat")}
    fresh = poisoned(wanted)
    load(store, name, fresh)
    assert differing(wanted, fresh) == []


def test_a_tensor_larger_than_a_block_and_than_an_arena_comes_back(store: Store) -> None:
    tensors = {"a": random_bits((5_000_001,), torch.float32), "b": random_bits((1001, 5003), torch.int16, 1)}
    name = save(store, tensors, arena_bytes=1 << 20)
    fresh = poisoned(tensors)
    load(store, name, fresh)
    assert differing(tensors, fresh) == []
    assert max(len(part.digest.blocks) for part in store.read_manifest(name).parts) > 1


def test_small_tensors_lie_together_at_the_front_of_a_part(store: Store) -> None:
    """A rank that needs the step counts of an optimizer must not read all blocks of another rank's part."""
    tensors: dict[str, torch.Tensor] = {}
    for number in range(20):
        tensors[f"optimizer.{number}.exp_avg"] = random_bits((5000,), torch.float32, number)
        tensors[f"optimizer.{number}.step"] = torch.tensor(float(number))
    name = save(store, tensors)
    index = read_index(store, name, store.read_manifest(name))
    places = {each: chunk.at for each, entry in index.tensors.items() for chunk in entry.chunks}
    assert max(places[each] for each in places if each.endswith("step")) < min(
        places[each] for each in places if each.endswith("exp_avg")
    )
    fresh = poisoned(tensors)
    load(store, name, fresh)
    assert differing(tensors, fresh) == []


def test_a_view_is_written_without_the_rest_of_its_storage(store: Store) -> None:
    whole = torch.randn(1000, 1000)
    name = save(store, {"view": whole[10:12, 5:9]})
    assert store.read_manifest(name).size_bytes < 8_000
    fresh = {"view": torch.zeros(2, 4)}
    load(store, name, fresh)
    assert torch.equal(fresh["view"], whole[10:12, 5:9])


def test_tied_tensors_are_written_once_and_found_under_both_names(store: Store) -> None:
    weight = torch.randn(500, 100)
    tied = {"model.wte.weight": weight, "model.head.weight": weight.detach(), "model.other": torch.randn(3)}
    name = save(store, tied)
    assert store.read_manifest(name).size_bytes < 1.2 * weight.nbytes
    fresh = poisoned(tied)
    load(store, name, fresh)
    assert differing(tied, fresh) == []


def test_another_view_of_the_same_memory_is_not_taken_for_the_same_tensor(store: Store) -> None:
    weight = torch.randn(40, 40)
    views = {"a": weight, "b": weight.t(), "c": weight[:20], "d": weight.view(torch.int32)}
    name = save(store, views)
    fresh = poisoned(views)
    load(store, name, fresh)
    assert differing(views, fresh) == []


def test_live_tensors_that_do_not_fit_are_named_and_none_is_loaded(store: Store) -> None:
    name = save(store, {"a": torch.ones(3), "b": torch.ones(4), "c": torch.ones(5)})
    fresh = {"a": torch.zeros(3), "b": torch.zeros(5), "c": torch.zeros(5, dtype=torch.float64), "d": torch.zeros(1)}
    with pytest.raises(errors.StateDiffers) as refused:
        load(store, name, fresh)
    assert refused.value.missing == ("d",)
    assert refused.value.changed == (
        "b: float32 [4] in the checkpoint, float32 [5] here",
        "c: float32 [5] in the checkpoint, float64 [5] here",
    )
    assert not fresh["a"].any()


def test_a_reader_that_skips_one_box_is_found_out_by_the_tensors_name(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"a": torch.ones(3), "b": torch.ones(4), "c": torch.ones(5)}
    name = save(store, tensors)
    real = read_module._arrivals
    monkeypatch.setattr(read_module, "_arrivals", lambda *given: [a for a in real(*given) if a.name != "b"])
    with pytest.raises(errors.NotRestored) as refused:
        load(store, name, poisoned(tensors))
    assert refused.value.names == ("b",)


def test_a_reader_that_loses_one_block_is_found_out(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": random_bits((5_000_000,), torch.float32), "b": torch.ones(4)}
    name = save(store, tensors)
    real = read_module._needed_blocks
    monkeypatch.setattr(read_module, "_needed_blocks", lambda *given: real(*given)[1:])
    with pytest.raises(errors.NotRestored) as refused:
        load(store, name, poisoned(tensors))
    assert "a" in refused.value.names


def test_every_block_is_read_once_however_many_tensors_lie_in_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"t{n}": torch.full((100,), float(n)) for n in range(50)}
    name = save(store, tensors)
    manifest = store.read_manifest(name)
    index = read_index(store, name, manifest)
    digested: list[int] = []

    def counting(data: memoryview) -> bytes:
        digested.append(len(data))
        return digest_bytes(data)

    monkeypatch.setattr(parts, "digest_bytes", counting)
    read_module.read(store, name, manifest, index, poisoned(tensors), ALONE)
    assert digested == [manifest.parts[1].size_bytes]


def test_a_target_with_the_conjugate_bit_gets_the_right_numbers(store: Store) -> None:
    numbers = torch.randn(6, dtype=torch.complex64)
    name = save(store, {"plain": numbers, "conjugate": numbers.conj()})
    fresh = {"plain": torch.zeros(6, dtype=torch.complex64).conj(), "conjugate": torch.zeros(6, dtype=torch.complex64)}
    load(store, name, fresh)
    assert torch.equal(fresh["plain"], numbers)
    assert torch.equal(fresh["conjugate"], numbers.conj().resolve_conj())


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.eye(3).to_sparse(), "its layout is sparse_coo"),
        (torch.empty(3, device="meta"), "it is on the meta device and has no elements"),
        (torch.empty(3, dtype=vars(torch)["int4"]), "its dtype is int4"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "jagged"),
    ],
    ids=["sparse", "meta", "int4", "nested"],
)
def test_what_cannot_be_kept_is_refused_by_name(tensor: torch.Tensor, reason: str) -> None:
    with pytest.raises(errors.TensorUnsupported) as refused:
        plan_save({"fine": torch.ones(2), "odd": tensor}, ALONE)
    assert refused.value.name == "odd"
    assert reason in refused.value.reason


def test_a_plan_is_reused_while_the_structure_stays_and_made_again_when_it_changes() -> None:
    tensors = {"a": torch.ones(3), "b": torch.ones(4)}
    plan = plan_save(tensors, ALONE)
    assert plan_save({"a": torch.zeros(3), "b": torch.zeros(4)}, ALONE, plan) is plan
    for changed in (
        {"a": torch.ones(3)},
        {"a": torch.ones(3), "b": torch.ones(5)},
        {"a": torch.ones(3), "b": torch.ones(4, dtype=torch.float64)},
        {"a": (tied := torch.ones(4)), "b": tied},
    ):
        anew = plan_save(changed, ALONE, plan)
        assert anew is not plan
        assert anew.tensors.keys() == changed.keys()


def test_a_piece_that_was_planned_and_not_written_stops_the_save(store: Store) -> None:
    tensors = {"a": torch.ones(3), "b": torch.ones(4)}
    plan = plan_save(tensors, ALONE)
    staged = stage(plan, tensors, Buffers())
    draft = begin(store, step=1, job="j")
    written = write(staged, draft, 0)
    short = Written(written.parts, {key: place for key, place in written.places.items() if key[0] != "b"})
    with pytest.raises(errors.EvidenceMissing) as refused:
        finish(plan, [short], draft)
    assert refused.value.missing == ("b at [0]: planned and not written",)


def test_the_index_says_what_the_checkpoint_holds(store: Store) -> None:
    name = save(store, {"model.a": torch.ones(3, 4, dtype=torch.bfloat16), "n": torch.tensor(1)})
    found = read_index(store, name, store.read_manifest(name))
    assert {key: (entry.dtype, entry.shape) for key, entry in found.tensors.items()} == {
        "model.a": (torch.bfloat16, (3, 4)),
        "n": (torch.int64, ()),
    }


def test_nothing_is_saved_or_loaded_by_way_of_numbers(store: Store) -> None:
    # Every NaN there is in 16 bits, quiet and signalling: a copy that looks at numbers would quiet some of them.
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    tensors = {"half": every.view(torch.float16), "brain": every.view(torch.bfloat16).view(256, 256).t()}
    name = save(store, tensors)
    fresh = poisoned(tensors)
    load(store, name, fresh)
    assert all(same_bits(tensors[key], fresh[key]) for key in tensors)


@pytest.mark.parametrize(("size_bytes", "files"), [(0, 1), (LARGE_BYTES - 1, 1), (2 * LARGE_BYTES, 2), (1 << 40, 2)])
def test_a_large_state_is_written_into_two_files(size_bytes: int, files: int) -> None:
    pieces = [Piece(name, "uint8", Box((0,), (size_bytes // 4,))) for name in "abcd"]
    assert number_of_files(pieces, None) == files
    assert number_of_files(pieces, 3) == 3
    assert number_of_files(pieces[:1], None) == 1


def test_a_large_state_comes_back_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files past the page cache, in a run with default settings; its memory made ready beside the first step."""
    monkeypatch.setattr("unbroken.state.pieces.LARGE_BYTES", 1 << 12)
    monkeypatch.setattr("unbroken.state.payload.LARGE_BYTES", 1 << 12)
    monkeypatch.setattr("unbroken.state.save._WORTH_PREPARING_BYTES", 0)

    def job(steps: int) -> torch.nn.Module:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        optimizer = torch.optim.AdamW(model.parameters())
        with Run(tmp_path / "run", settings=Settings(console=False), model=model, optimizer=optimizer) as run:
            for _ in run.steps(steps):
                model(torch.randn(8, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return model

    saved, resumed = job(3), job(3)
    parts = sorted((tmp_path / "run" / "checkpoints" / "final" / "state").glob("*.distcp"))
    assert len(parts) == 2
    for name, tensor in saved.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name])


def test_the_memory_of_a_save_is_known_before_the_first_step() -> None:
    model = torch.nn.Linear(1000, 100)
    items = make_items({"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    expected, device = expected_bytes(items, 1)
    assert (expected, device) == (3 * 4 * 100_100, None)
    model(torch.randn(2, 1000)).sum().backward()
    assert isinstance(items[1], OptimizerItem)
    items[1].optimizer.step()
    assert expected_bytes(items, 1)[0] == expected + 2 * 4, "and one counter each of weight and bias"
    assert expected_bytes(items, 4)[0] <= expected // 4 + 4
    items[1].optimizer.state[torch.empty(0)] = 7
    assert expected_bytes(items, 1)[0] == expected + 2 * 4, "a value that is of no parameter"


def test_without_a_gpu_no_memory_is_taken_before_the_job_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unbroken.state.save._WORTH_PREPARING_BYTES", 1)
    prepared: list[int] = []
    monkeypatch.setattr(Buffers, "prepare", lambda self, size_bytes, device: prepared.append(size_bytes))
    model = torch.nn.Linear(8, 8)
    with Run(tmp_path / "run", settings=Settings(console=False), model=model) as run:
        for _ in run.steps(1):
            pass
    assert not prepared
