"""Reading a folder of torch's Distributed Checkpoint in one process, whatever number of ranks wrote it.

Its index, ``.metadata``, is a pickle: it is opened with the classes that torch writes into it and no others. Each
tensor is put together from its chunks; missing and short files are all named before anything is read.
"""

import io
import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Final, cast

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from unbroken.files import LOCAL
from unbroken.foreign.pickles import UNREADABLE, ForeignFiles, check_zip
from unbroken.store.foreign import DCP_METADATA

_MODULES: Final = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_OTHERS: Final = frozenset(
    {
        *(("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout")),
        *(("pathlib", "PosixPath"), ("pathlib", "WindowsPath"), ("pathlib", "PurePosixPath"), ("pathlib", "Path")),
        *(("pathlib._local", "PosixPath"), ("collections", "OrderedDict"), ("builtins", "set")),
    }
)


class _MetadataUnpickler(pickle.Unpickler):
    """Opens ``.metadata`` with the classes that torch writes into it."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 -- as its base
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout)
        is_record = module in _MODULES and name.lstrip("_")[:1].isupper() and "." not in name
        if is_dtype or is_record or (module, name) in _OTHERS:
            found = super().find_class(module, name)
            if not is_record or (isinstance(found, type) and found.__module__ in _MODULES):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is not read from {DCP_METADATA}; nothing was executed")


def read_dcp(folder: Path, files: ForeignFiles) -> dict[str, Any]:
    """Everything in a folder of DCP, nested as it was saved; what cannot be read is noted, and left out."""
    metadata = _metadata(folder, files)
    if metadata is None or not _are_whole(folder, metadata, files):
        return {}
    found: dict[str, Any] = {}
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    for name, described in metadata.state_dict_metadata.items():
        try:
            value = _value(folder, name, described, metadata, files)
        except UNREADABLE as wrong:
            files.problems.append(f"{name}: {str(wrong).partition(chr(10))[0][:200] or type(wrong).__name__}")
            continue
        path = paths.get(name, (name,))
        _put(found, path if isinstance(path, tuple) and path else (name,), value)
    return cast("dict[str, Any]", _lists(found))


def unpickled_metadata(stream: IO[bytes]) -> Metadata:
    """The index of a folder of DCP, opened with the classes that torch writes into it and no others.

    Raises:
        ValueError: it is no such index; damaged bytes raise what ``UNREADABLE`` names.
    """
    found = _MetadataUnpickler(stream).load()
    if isinstance(found, Metadata) and isinstance(found.storage_data, dict):
        return found
    raise ValueError("it is not an index of torch's Distributed Checkpoint")


def _metadata(folder: Path, files: ForeignFiles) -> Metadata | None:
    path = folder / DCP_METADATA
    files.stamp(path)
    try:
        with path.open("rb") as stream:
            return unpickled_metadata(stream)
    except UNREADABLE as wrong:
        files.note(path, wrong)
    return None


def _are_whole(folder: Path, metadata: Metadata, files: ForeignFiles) -> bool:
    """Whether every file that the index names is there and long enough; each that is not is noted."""
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        name = str(place.relative_path)
        ends[name] = max(ends.get(name, 0), int(place.offset) + int(place.length))
    before = len(files.problems)
    for name, end in sorted(ends.items()):
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            files.problems.append(f"{name}: it is outside the checkpoint")
        elif (found := LOCAL.find(path)) is None:
            files.problems.append(f"{name}: is missing")
        elif found.size_bytes < end:
            files.problems.append(f"{name}: has {found.size_bytes:,} bytes, the index needs {end:,}")
        else:
            files.stamp(path)
    return len(files.problems) == before


def _value(folder: Path, name: str, described: object, metadata: Metadata, files: ForeignFiles) -> object:
    if isinstance(described, BytesStorageMetadata):
        return files.torch_bytes(_stored(folder, MetadataIndex(name), metadata), name)
    if not isinstance(described, TensorStorageMetadata):
        raise TypeError("it is neither a tensor nor a value")
    whole = torch.empty(described.size, dtype=described.properties.dtype)
    covered = 0
    for chunk in described.chunks:
        stored = _stored(folder, MetadataIndex(name, chunk.offsets), metadata)
        part = torch.load(stored, map_location="cpu", weights_only=True)
        _place(whole, chunk).copy_(part.view(chunk.sizes))
        covered += chunk.sizes.numel()
    if covered != whole.numel():
        raise ValueError(f"its chunks have {covered:,} elements, the tensor has {whole.numel():,}")
    return whole


def _stored(folder: Path, index: MetadataIndex, metadata: Metadata) -> io.BytesIO:
    place = metadata.storage_data[index]
    if getattr(place, "transform_descriptors", None):
        raise ValueError("it is compressed, which is not read")
    with (folder / str(place.relative_path)).open("rb") as stream:
        stream.seek(place.offset)
        raw = io.BytesIO(stream.read(place.length))
    if zipfile.is_zipfile(raw):
        with zipfile.ZipFile(raw) as archive:
            check_zip(archive)
    raw.seek(0)
    return raw


def _place(whole: torch.Tensor, chunk: ChunkStorageMetadata) -> torch.Tensor:
    for dimension, (begin, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        whole = whole.narrow(dimension, begin, size)
    return whole


def _put(into: dict[Any, Any], path: Iterable[object], value: object) -> None:
    *above, last = path
    for key in above:
        into = into.setdefault(key, {})
        if not isinstance(into, dict):
            raise ValueError("its name lies below another value")
    into[last] = value


def _lists(value: object) -> object:
    """Dictionaries whose keys count from 0 back to lists, as which they were saved."""
    if not isinstance(value, dict):
        return value
    held = {key: _lists(each) for key, each in value.items()}
    if held and all(type(key) is int for key in held) and sorted(held) == list(range(len(held))):
        return [held[number] for number in range(len(held))]
    return held
