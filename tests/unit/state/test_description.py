"""The description of a save: made once for a plan, made again as soon as a piece lies elsewhere."""

import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from tests.unit.state.payloads import ALONE, JOB
from unbroken import torch_private
from unbroken.state import description
from unbroken.state.description import Describer, describe
from unbroken.state.index import Box, decode
from unbroken.state.payload import INDEX_PART, METADATA_PART, Location, WriteReport, Written, plan_save, write
from unbroken.state.pieces import Planned, SavePlan
from unbroken.state.planners import Piece
from unbroken.state.stage import Buffers, stage
from unbroken.store.commit import Draft, begin
from unbroken.store.digest import PartDigest
from unbroken.store.directory import Store
from unbroken.store.manifest import Part

TENSORS = {f"model.{number}": torch.arange(40.0 + number) for number in range(6)}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def written(plan: SavePlan, draft: Draft, files: int) -> list[WriteReport]:
    """The report of the one rank, which has written into so many files."""
    staged = stage(plan, TENSORS, Buffers())
    try:
        return [WriteReport.of(write(staged, draft, 0, files=files), plan.pieces)]
    finally:
        staged.release()


def saved(describer: Describer, store: Store, plan: SavePlan, step: int, files: int) -> tuple[bytes, bytes]:
    """Both descriptions of a save, as they are on disk."""
    draft = begin(store, step=step, job=JOB)
    describer.write(plan, written(plan, draft, files), draft)
    return (draft.path / INDEX_PART).read_bytes(), (draft.path / METADATA_PART).read_bytes()


def test_a_save_with_the_same_plan_and_places_is_not_described_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def counted(plan: SavePlan, reports: Sequence[WriteReport], draft: Draft) -> tuple[bytes, bytes]:
        calls.append(draft)
        return describe(plan, reports, draft)

    monkeypatch.setattr(description, "describe", counted)
    plan, describer = plan_save(TENSORS, ALONE), Describer()
    first = saved(describer, store, plan, 1, files=2)
    assert saved(describer, store, plan, 2, files=2) == first
    assert len(calls) == 1


def test_a_save_whose_pieces_lie_elsewhere_is_described_again(store: Store) -> None:
    plan, describer = plan_save(TENSORS, ALONE), Describer()
    for step, files in enumerate((1, 2, 1), start=1):
        assert saved(describer, store, plan, step, files) == saved(Describer(), store, plan, step + 10, files)


def test_a_save_with_another_plan_is_described_again(store: Store) -> None:
    one, describer = plan_save(TENSORS, ALONE), Describer()
    # The same places under other names: only the plan says so.
    tensors = {f"other.{name}": planned for name, planned in one.tensors.items()}
    tensors = {name: Planned(each.dtype, each.shape, name) for name, each in tensors.items()}
    pieces = tuple(Piece(f"other.{name}", dtype, box) for name, dtype, box in one.pieces)
    other = SavePlan(0, tensors, (pieces,), (), one.total_bytes)
    draft = begin(store, step=1, job=JOB)
    reports = written(one, draft, 1)
    describer.write(one, reports, draft)
    another = begin(store, step=2, job=JOB)
    describer.write(other, reports, another)
    sizes = {part.name: part.size_bytes for part in reports[0].parts}
    assert decode((another.path / INDEX_PART).read_bytes(), sizes).tensors.keys() == tensors.keys()


def test_the_metadata_says_of_every_piece_what_the_index_says(store: Store) -> None:
    draft = begin(store, step=1, job=JOB)
    # Two tensors in rows over two ranks, and a third name of the first.
    boxes = [Box((0, 0), (2, 8)), Box((2, 0), (2, 8))]
    tensors = {name: Planned("float32", (4, 8), same_as) for name, same_as in (("a", "a"), ("b", "b"), ("c", "a"))}
    by_rank = tuple((Piece("a", "float32", box), Piece("b", "float32", box)) for box in boxes)
    plan = SavePlan(0, tensors, by_rank, (), 256)
    reports = []
    for rank, pieces in enumerate(by_rank):
        part = Part(f"state/__{rank}_0.distcp", PartDigest(4096, (bytes(16),)))
        places = {
            (piece.name, piece.box): Location(part.name, 512 * number, 400, 512 * number + 64)
            for number, piece in enumerate(pieces)
        }
        reports.append(WriteReport.of(Written((part,), places), pieces))
    index, metadata = describe(plan, reports, draft)
    found: Metadata = pickle.loads(metadata)
    entries = decode(index, {part.name: 4096 for each in reports for part in each.parts}).tensors
    assert found.planner_data == {name: (name,) for name in tensors}
    for name, entry in entries.items():
        described = found.state_dict_metadata[name]
        assert isinstance(described, TensorStorageMetadata)
        assert described.size == torch.Size(entry.shape) and described.properties.dtype is entry.dtype
        assert described.chunks == [
            ChunkStorageMetadata(torch.Size(chunk.box.offsets), torch.Size(chunk.box.sizes)) for chunk in entry.chunks
        ]
        for number, chunk in enumerate(entry.chunks):
            key = MetadataIndex(name, chunk.box.offsets, number)
            expected = torch_private.StorageInfo(chunk.part.removeprefix("state/"), chunk.at - 64, 400)
            assert found.storage_data[key] == expected
    assert len(found.storage_data) == 6
