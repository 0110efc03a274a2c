"""A state of many small tensors: what each of them may cost, counted in operations, and that the bits are the same."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan

from tests.unit.state import fingerprint_reference as reference
from tests.unit.state.payloads import ALONE, load, random_bits, save, tensors_of_every_kind
from unbroken.state import mixing, payload, pieces, read, stage
from unbroken.state.fingerprint import contribution, fingerprints
from unbroken.state.pieces import first_names, held_by, plan_save
from unbroken.store.directory import Store


def small(count: int) -> dict[str, torch.Tensor]:
    """So many tensors of four elements."""
    return {f"layers.{number}": torch.full((2, 2), float(number)) for number in range(count)}


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:  # noqa: ANN401 - any module
    """A list that grows by one at every call of a function."""
    calls, known = list[int](), getattr(owner, name)

    def count(*passed: Any, **named: Any) -> Any:  # noqa: ANN401 - passed on as it is
        calls.append(1)
        return known(*passed, **named)

    monkeypatch.setattr(owner, name, count)
    return calls


@pytest.mark.parametrize("chunk_words", [1, 7, 1 << 15])
@pytest.mark.parametrize("ranks", [1, 3])
def test_tensors_of_every_kind_mixed_together_have_the_fingerprints_that_each_has_alone(
    chunk_words: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixing, "CPU_CHUNK_WORDS", chunk_words)
    tensors = {name: tensor for name, tensor in tensors_of_every_kind().items() if tensor.numel() <= 100} | {
        'a "name" of \u00fcmlauts\n': random_bits((3,), torch.float16),
        "wide": random_bits((300,), torch.float32),
    }
    expected = {name: reference.print_of(name, tensor) for name, tensor in tensors.items()}
    assert fingerprints(tensors, ALONE) == expected
    for name, tensor in tensors.items():
        shares = [contribution(name, tensor, rank=rank, size=ranks) for rank in range(ranks)]
        assert "".join(f"{sum(lane) & reference.MASK:016x}" for lane in zip(*shares, strict=True)) == expected[name]


def test_the_passes_of_a_fingerprint_do_not_begin_anew_for_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = counted(monkeypatch, mixing, "_mix_here")
    fingerprints(small(2_000), ALONE)
    plan = plan_save(small(2_000), ALONE)
    staged = stage.stage(plan, small(2_000), stage.Buffers())
    stage.staged_sums(staged, plan)
    # Once at the edge or at a resume, and once for each thread that looks at the copies.
    assert len(passes) <= 1 + 8


def test_plain_tensors_are_planned_and_read_without_torchs_planner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = counted(monkeypatch, pieces, "create_default_local_save_plan")
    planned = list[int]()

    def load_planned(live: dict[str, Any], metadata: Any) -> Any:  # noqa: ANN401 - passed on as it is
        planned.append(len(live))
        return create_default_local_load_plan(live, metadata)

    monkeypatch.setattr(read, "create_default_local_load_plan", load_planned)
    tensors = small(500)
    store = Store(tmp_path)
    name = save(store, tensors)
    found = {each: torch.empty(2, 2) for each in tensors}
    load(store, name, found)
    assert all(torch.equal(found[each], tensor) for each, tensor in tensors.items())
    assert (len(saving), sum(planned)) == (0, 0)


def test_the_layout_of_a_plain_tensor_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tensors_of_every_kind()
    quick = held_by(tensors)
    monkeypatch.setattr(pieces, "_PLAIN", frozenset())
    assert held_by(tensors) == quick


@pytest.mark.parametrize("count", [1_000, 10_000])
def test_small_tensors_are_written_together(count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chunks = list[int]()
    cut = payload._at_blocks

    def noted(found: Any) -> Iterator[memoryview]:  # noqa: ANN401 - passed on as it is
        for each in cut(found):
            chunks.append(len(each))
            yield each

    monkeypatch.setattr(payload, "_at_blocks", noted)
    save(Store(tmp_path), small(count))
    assert len(chunks) <= 1 + sum(chunks) // payload._GATHERED_BYTES


def test_names_of_the_same_memory_are_found_as_by_comparing_every_two() -> None:
    whole = torch.arange(12.0)
    tensors: Mapping[str, torch.Tensor] = {
        "whole": whole,
        "same": whole.view(12),
        "start": whole[:4],
        "other shape": whole.view(3, 4),
        "start again": whole[:4],
        "later": whole[4:],
        "bits": whole.view(torch.int32),
        "empty": torch.empty(0),
        "empty at the start": whole[:0],
        "parameter": torch.nn.Parameter(whole),
        **small(3),
    }
    keys = {name: pieces._memory(tensor) for name, tensor in tensors.items()}
    assert first_names(tensors) == {
        name: "" if key is None else next(other for other, theirs in keys.items() if theirs == key)
        for name, key in keys.items()
    }


@pytest.mark.parametrize("shape", [(0, 0), (0, 3, 0)])
def test_a_tensor_without_elements_shares_none(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = {"empty": torch.empty(shape), "column": torch.empty(3, 2)[:, :1].t()[:0]}
    load(Store(tmp_path), save(Store(tmp_path), tensors), {name: each.clone() for name, each in tensors.items()})
