"""How ``dcp.save`` and ``dcp.load`` reach a store: a ``StorageWriter`` and a ``StorageReader`` of torch's own kind.

The writer puts the tensors of a rank into one file of a draft, digested on the way, each in the bytes that
``torch.save`` gives it. Torch gathers what the ranks report, and the coordinator commits. A stock ``dcp.load`` reads
the folder. The reader uses a block of a file only after its checksum is verified. What each rank saves and loads,
resharding included, remains the affair of torch's planners.
"""

import io
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from unbroken import torch_private
from unbroken.errors import DamagedCheckpoint, EvidenceMissing, StateDiffers
from unbroken.foreign.dcp import unpickled_metadata
from unbroken.foreign.pickles import UNREADABLE
from unbroken.frameworks.folders import Folder
from unbroken.frameworks.framework_run import FrameworkRun
from unbroken.state.container import container
from unbroken.state.host_copy import as_bits
from unbroken.state.index import DTYPES, dtype_name
from unbroken.state.pieces import LARGE_BYTES
from unbroken.store.commit import Draft
from unbroken.store.directory import Store
from unbroken.store.foreign import DCP_METADATA
from unbroken.store.manifest import Manifest, Part
from unbroken.store.names import DraftName, step_in_name
from unbroken.store.parts import BlockReader, read_whole, require_block

ORIGIN: Final = "torch-dcp"
# What torch's own writer puts there.
_VERSION: Final = "1.0.0"


class _Written(NamedTuple):
    """What a rank reports of one item: where it lies, and with the first item of a file, the evidence of the file."""

    place: Any
    part: Part | None


# ---- writing ----


class Writer(StorageWriter):
    """Writes one checkpoint of a run; made by ``Checkpoints.writer``. For ``dcp.save`` and ``dcp.async_save``.

    It can be used again: then ``checkpoint_id`` names the next one, as in ``out/step-200``.
    """

    def __init__(
        self, run: FrameworkRun, describe: Callable[[int], Folder], step: int | None, name: str | None = None
    ) -> None:
        self._run, self._describe = run, describe
        self._step, self._name = step, name
        self._began_s = 0.0
        self._is_coordinator = False
        self._rank = 0

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Torch begins another save; its name states the step.

        Raises:
            ValueError: it lies in another directory, or states no step or another one.
        """
        if checkpoint_id is None:
            return
        path = Path(checkpoint_id)
        if len(path.parts) > 1 and path.absolute().parent.resolve() != self._run.layout.run.resolve():
            raise ValueError(f"{path} is not in the run's directory {self._run.layout.run}")
        stated = step_in_name(path.name)
        if stated is None or (self._step is not None and self._name is None and stated != self._step):
            asked = "a step, as in step-200" if self._step is None else f"step {self._step}"
            raise ValueError(f"checkpoint_id {path.name!r} does not state {asked}")
        self._step, self._name = stated, path.name

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: Any) -> None:  # noqa: ANN401
        """Torch says who coordinates.

        Raises:
            ValueError: torch would not coordinate the ranks, or no step is known.
        """
        if not kwargs.get("use_collectives", True) or is_coordinator is not self._run.world.is_first:
            # Every rank would write a checkpoint of its own, under the same name.
            raise ValueError("all ranks of the run save together: without no_dist and use_collectives=False")
        if self._step is None:
            raise ValueError("no step is known: use writer(step=...) or dcp.save(..., checkpoint_id='step-200')")
        self._is_coordinator, self._rank = is_coordinator, self._run.world.rank
        self._began_s = time.monotonic()

    @property
    def _draft(self) -> Draft:
        # One name for every attempt at a step: torch gives a writer no way to tell the other ranks of a new one.
        return Draft(self._run.store, DraftName(self._run.lease.job, self._step or 0, 1))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan of this rank, as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the draft, on the coordinator, before any rank writes.

        Raises:
            NoRoom: the file system has no room for the save.
            StorageFailed: I/O error.
        """
        coming_bytes = sum(_size_of(item) for plan in plans for item in plan.items)
        self._run.begin_draft(self._draft, coming_bytes=coming_bytes, coming_files=len(plans) + 8)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Write the items of this rank into one file.

        Raises:
            StorageFailed: I/O error; torch raises it on every rank, and nothing is committed.
        """
        done: Future[list[WriteResult]] = Future()
        if not plan.items:
            done.set_result([])
            return done
        name = f"__{self._rank}_0.distcp"
        places: list[tuple[WriteItem, int, int]] = []
        is_large = sum(map(_size_of, plan.items)) >= LARGE_BYTES
        # crash here: a draft with some of its parts; it is torn.
        part = self._draft.write_part(name, _blobs(plan.items, planner, places), is_large=is_large)
        done.set_result(
            [
                WriteResult(
                    item.index, size, _Written(torch_private.StorageInfo(name, at, size), None if number else part)
                )
                for number, (item, at, size) in enumerate(places)
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit what all ranks have reported, on the coordinator.

        Raises:
            EvidenceMissing: a tensor of the plan was not reported by its writer.
            LeaseLost: another job has taken the run; nothing was committed.
            StorageFailed: I/O error; nothing was committed.
        """
        draft, folder = self._draft, self._describe(self._step or 0)
        written = {result.index: cast("_Written", result.storage_data) for each in results for result in each}
        metadata.storage_data = {index: one.place for index, one in written.items()}
        if "version" in Metadata.__dataclass_fields__:
            metadata.version = _VERSION
        if missing := tuple(_unwritten(metadata)):
            raise EvidenceMissing(path=draft.path, missing=missing)
        parts = [one.part for one in written.values() if one.part is not None]
        # crash here: a draft with all tensors and without its index; it is torn.
        parts.append(draft.write_part(DCP_METADATA, [pickle.dumps(metadata)]))
        seconds = time.monotonic() - self._began_s
        # In torch's own thread for an asynchronous save: training continues meanwhile.
        paused_s = seconds if threading.current_thread() is threading.main_thread() else 0.0
        self._run.commit_draft(
            draft, parts, folder, seconds=seconds, paused_s=paused_s, called=self._name or folder.name
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Whether a name can be saved under: it states a step."""
        return step_in_name(Path(checkpoint_id).name) is not None

    def __getstate__(self) -> NoReturn:
        """The run is held by this process.

        Raises:
            TypeError: always.
        """
        raise TypeError("a save in another process cannot commit to this run: use AsyncCheckpointerType.THREAD")


def _size_of(item: WriteItem) -> int:
    size = item.tensor_storage_size()
    return 0 if size is None else int(size)


def _blobs(
    items: Iterable[WriteItem], planner: SavePlanner, places: list[tuple[WriteItem, int, int]]
) -> Iterator[bytes | memoryview]:
    """The bytes of a file; notes where each item lies. One tensor is copied to the host at a time."""
    position = 0
    for item in items:
        size = 0
        for chunk in _blob(item, planner):
            view = memoryview(chunk).cast("B")
            size += len(view)
            yield view
        places.append((item, position, size))
        position += size


def _blob(item: WriteItem, planner: SavePlanner) -> Iterator[bytes | memoryview]:
    data: Any = planner.resolve_data(item)
    if item.type is WriteItemType.BYTE_IO:
        yield data.getvalue()
        return
    tensor = data.detach().to("cpu")
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided and dtype_name(tensor.dtype) in DTYPES:
        around = container(tensor.dtype, tuple(tensor.shape))
        yield around.head
        if tensor.numel():
            yield memoryview(cast("bytes", as_bits(tensor.contiguous().view(-1)).numpy()))
        yield around.tail
        return
    # What has no plain bytes, torch writes by itself; a copy, so that a view is not saved with all it is a view of.
    saved = io.BytesIO()
    torch.save(tensor.clone(), saved)
    yield saved.getvalue()


def _unwritten(metadata: Metadata) -> Iterator[str]:
    """The tensors of which the index promises a chunk that no rank has reported."""
    for name, described in metadata.state_dict_metadata.items():
        if not isinstance(described, TensorStorageMetadata):
            if MetadataIndex(name) not in metadata.storage_data:
                yield f"{name}: planned and not reported by its writer"
            continue
        for chunk in described.chunks:
            if MetadataIndex(name, chunk.offsets) not in metadata.storage_data:
                yield f"{name} at {list(chunk.offsets)}: planned and not reported by its writer"


# ---- reading ----


@dataclass(frozen=True)
class Source:
    """The checkpoint that is read, and its manifest, in which the checksums are."""

    store: Store
    name: str
    manifest: Manifest

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.store.path(self.name)

    def metadata(self) -> Metadata:
        """The index of its tensors, verified.

        Raises:
            DamagedCheckpoint: there is none, or it cannot be read.
            StorageFailed: I/O error.
        """
        raw = read_whole(self.store.files, self.path, self.manifest, DCP_METADATA)
        if raw is None:
            finding = f"{DCP_METADATA}: is missing; it is not a checkpoint of torch's DCP"
            raise DamagedCheckpoint(path=self.path, findings=(finding,))
        try:
            return unpickled_metadata(io.BytesIO(raw))
        except UNREADABLE as wrong:
            raise DamagedCheckpoint(path=self.path, findings=(f"{DCP_METADATA}: {wrong}",)) from wrong


class SourceReader(StorageReader):
    """Reads one checkpoint for ``dcp.load``; each block of its files is verified before it is used."""

    def __init__(self, source: Source, *, partial: bool, loaded: Callable[[], None] = lambda: None) -> None:
        self._source, self._partial, self._loaded = source, partial, loaded
        # Now, where its error is raised as it is: torch takes an error of `read_metadata` for an older format.
        self._metadata = source.metadata()

    @property
    def path(self) -> Path:
        """The folder of the checkpoint."""
        return self._source.path

    @property
    def step(self) -> int:
        """Its step."""
        return self._source.manifest.step

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Torch begins another load.

        Raises:
            ValueError: it names another checkpoint than this reader was made for.
        """
        if checkpoint_id is not None and Path(checkpoint_id).name not in (self._source.name, str(self.step)):
            raise ValueError(f"this reader reads {self._source.name}, not {Path(checkpoint_id).name}")

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """The index of the tensors."""
        return self._metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,
        *args: object,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Nothing is to be set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan of this rank, as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Refuse a load that leaves something of the checkpoint out, on the coordinator.

        Torch leaves out what the state dict does not ask for: the moments of an optimizer that has made no step yet.

        Raises:
            StateDiffers: the state dict does not ask for all that was saved; nothing was loaded.
        """
        asked = {item.storage_index.fqn for plan in plans for item in plan.items}
        unasked = sorted(name for name in _with_elements(self._metadata.state_dict_metadata) if name not in asked)
        if unasked and not self._partial:
            raise StateDiffers(checkpoint=str(self.path), unexpected=tuple(unasked), is_dcp=True)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Fill what this rank asked for.

        Raises:
            DamagedCheckpoint: a block is not what was written; nothing of it was loaded.
            StorageFailed: I/O error.
        """
        by_file: dict[str, list[tuple[int, int, ReadItem]]] = {}
        for item in plan.items:
            place: Any = self._metadata.storage_data[item.storage_index]
            if getattr(place, "transform_descriptors", None):
                finding = f"{item.storage_index.fqn}: it was compressed by torch's own writer, which is not read here"
                raise DamagedCheckpoint(path=self.path, findings=(finding,))
            by_file.setdefault(str(place.relative_path), []).append((int(place.offset), int(place.length), item))
        for name, items in by_file.items():
            file = _VerifiedFile(self._source, name)
            for at, size, item in sorted(items, key=lambda each: each[:2]):
                self._fill(item, io.BytesIO(file.read(at, size)), planner)
        self._loaded()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _fill(self, item: ReadItem, stored: io.BytesIO, planner: LoadPlanner) -> None:
        if item.type is LoadItemType.BYTE_IO:
            planner.load_bytes(item, stored)
            return
        tensor = torch.load(stored, map_location="cpu", weights_only=True)
        for dimension, (begin, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dimension, begin, size)
        target = planner.resolve_tensor(item).detach()
        if target.size() != tensor.size():
            changed = f"{item.dest_index.fqn}: {list(tensor.size())} saved, {list(target.size())} asked for"
            raise StateDiffers(checkpoint=str(self.path), changed=(changed,))
        target.copy_(tensor)
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Whether a name can be read: torch asks only where it is given no reader."""
        return Path(checkpoint_id).exists()


def _with_elements(described: Mapping[str, object]) -> Iterator[str]:
    """The names that a load of everything asks for: a tensor without elements is asked for by nobody."""
    for name, each in described.items():
        if not isinstance(each, TensorStorageMetadata) or each.size.numel():
            yield name


class _VerifiedFile:
    """One file of a checkpoint; a block is read once as long as the ranges come in their order."""

    def __init__(self, source: Source, name: str) -> None:
        part = next((each for each in source.manifest.parts if each.name == name), None)
        if part is None:
            raise DamagedCheckpoint(path=source.path, findings=(f"{name}: the manifest does not name it",))
        self._source, self._part = source, part
        self._block_bytes = source.manifest.block_bytes
        self._reader = BlockReader(source.store.files, self._block_bytes, is_shared=True)
        self._held: tuple[int, memoryview] = (-1, memoryview(b""))

    def read(self, at: int, size: int) -> bytes:
        """So many bytes from a place on, verified."""
        if at < 0 or at + size > self._part.size_bytes:
            finding = f"{self._part.name}: has {self._part.size_bytes:,} bytes, the index needs {at + size:,}"
            raise DamagedCheckpoint(path=self._source.path, findings=(finding,))
        taken = []
        end = at + size
        while at < end:
            number, inside = divmod(at, self._block_bytes)
            piece = self._block(number)[inside : inside + end - at]
            taken.append(bytes(piece))
            at += len(piece)
        return b"".join(taken)

    def _block(self, number: int) -> memoryview:
        if self._held[0] != number:
            start = number * self._block_bytes
            end = min(start + self._block_bytes, self._part.size_bytes)
            path, name, expected = self._source.path, self._part.name, self._part.digest.blocks[number]
            block = self._reader.read(path / name, start, end)
            require_block(path, name, (start, end), block, expected)
            self._held = (number, block)
        return self._held[1]
