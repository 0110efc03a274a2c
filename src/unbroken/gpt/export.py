"""Export weights to files for other programs: a plain ``.pt``, or safetensors.

A file is written under a temporary name, synced, and renamed, so it is never visible half-written; an existing file is
replaced only on request. Safetensors are written one tensor at a time, so that a conversion needs memory for the
largest tensor, not for all.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from unbroken.disk import NodeKind
from unbroken.errors import StorageFailed, UnbrokenError, WouldOverwrite
from unbroken.files import LOCAL, Appender, Files

SAFETENSORS_DTYPES: Final = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
# A folder with these files was written by an export.
EXPORTED_NAMES: Final = frozenset({"config.json", "model.safetensors"})
_LENGTH_BYTES: Final = 8


def to_torch(
    state: Mapping[str, Tensor],
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    is_replacing: bool = False,
    files: Files = LOCAL,
) -> None:
    """Write a state as ``torch.load(path, weights_only=True)`` reads it, in its own dtype or another.

    Raises:
        WouldOverwrite: the path exists, and is not to be replaced or is not a file.
        StorageFailed: an I/O error.
    """
    plain = {name: converted(tensor, dtype) for name, tensor in state.items()}

    def write(scratch: Path) -> None:
        sink = _Sink(files.appending(scratch))
        try:
            torch.save(plain, sink)  # type: ignore[arg-type]  # it only needs write and flush
            sink.finish()
        finally:
            sink.appender.close()

    publish(path, write, files, is_replacing=is_replacing)


def to_safetensors(
    state: Mapping[str, Tensor],
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    is_replacing: bool = False,
    files: Files = LOCAL,
) -> None:
    """Write a state as one safetensors file, in its own dtype or another.

    Raises:
        WouldOverwrite: the path exists, and is not to be replaced or is not a file.
        StorageFailed: an I/O error.
    """

    def write(scratch: Path) -> None:
        files.write_new(scratch, safetensors_chunks(state, dtype))

    publish(path, write, files, is_replacing=is_replacing)


def publish(path: Path, write: Callable[[Path], None], files: Files, *, is_replacing: bool = False) -> None:
    """Write a file or folder under a temporary name, then rename it atomically.

    Raises:
        WouldOverwrite: the path exists, and is not to be replaced or is something else.
        StorageFailed: an I/O error.
    """
    if not is_replacing and files.find(path) is not None:
        raise WouldOverwrite(path=path)
    files.make_directory(path.parent, durable=True)
    scratch = path.with_name(f".{path.name}.partial")
    # crash here: leftovers of an earlier export are partly removed; they have a temporary name.
    files.remove_tree(scratch)
    # crash here: a part of the export under a temporary name; the next export removes it.
    try:
        write(scratch)
        _require_replaceable(files, path, scratch, is_replacing=is_replacing)
    except UnbrokenError:
        with contextlib.suppress(StorageFailed):
            files.remove_tree(scratch)
        raise
    if files.find(path) is not None and _is_folder(files, path):
        _exchange(files, scratch, path)
    else:
        # crash here: the whole export under one name or the other, never half of it under its own.
        files.publish(scratch, path)


def _require_replaceable(files: Files, path: Path, scratch: Path, *, is_replacing: bool) -> None:
    """A file may replace a file; a folder may replace a folder that holds an export and nothing else."""
    if files.find(path) is None:
        return
    is_alike = _is_folder(files, path) == _is_folder(files, scratch)
    if not is_replacing or not is_alike or (_is_folder(files, path) and not is_export(files, path)):
        raise WouldOverwrite(path=path)


def _is_folder(files: Files, path: Path) -> bool:
    found = files.find(path)
    return found is not None and found.kind is NodeKind.DIRECTORY


def is_export(files: Files, folder: Path) -> bool:
    """Whether a folder holds an export and nothing else, or is empty."""
    nodes = files.list_directory(folder)
    names = {node.name for node in nodes}
    return all(node.kind is NodeKind.FILE for node in nodes) and (not names or names >= EXPORTED_NAMES)


def _exchange(files: Files, scratch: Path, folder: Path) -> None:
    """Replace a folder by another; not all file systems can do this atomically."""
    old = folder.with_name(f".{folder.name}.replaced")
    # crash here: an older folder that was replaced is partly removed.
    files.remove_tree(old)
    # crash here: the old folder, or for a moment none under this name; then both exist, complete, next to it.
    files.publish(folder, old)
    files.publish(scratch, folder)
    # crash here: the new folder, and what is left of the old one, which the next replacement removes.
    files.remove_tree(old)


def safetensors_chunks(state: Mapping[str, Tensor], dtype: torch.dtype | None) -> Iterator[memoryview | bytes]:
    """The bytes of a safetensors file: the header's length, the header, then every tensor."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in state.items():
        written_as = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        start, end = end, end + tensor.numel() * written_as.itemsize
        kind = SAFETENSORS_DTYPES[written_as]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Padded with spaces to a multiple of eight, so that tensors are aligned when the file is mapped.
    text += b" " * (-len(text) % _LENGTH_BYTES)
    yield len(text).to_bytes(_LENGTH_BYTES, "little") + text
    for tensor in state.values():
        plain = converted(tensor, dtype)
        yield plain.reshape(-1).view(torch.uint8).numpy().data


def converted(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A contiguous copy on the CPU with storage of its own, in another dtype if given."""
    is_float = tensor.is_floating_point()
    plain = tensor.detach().to("cpu", dtype if is_float and dtype is not None else tensor.dtype).contiguous()
    # A view would save its whole storage.
    return plain if plain.untyped_storage().nbytes() == plain.numel() * plain.itemsize else plain.clone()


class _Sink:
    """The file object for ``torch.save``: bytes go straight to the file."""

    def __init__(self, appender: Appender) -> None:
        self.appender = appender
        self._refusal: StorageFailed | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Append a copy; after an I/O error nothing more, since torch would replace the error by its own."""
        if self._refusal is None:
            try:
                self.appender.append(bytes(data))
            except StorageFailed as refusal:
                self._refusal = refusal
        return len(data)

    def flush(self) -> None:
        """Nothing is buffered."""

    def finish(self) -> None:
        """Make the bytes durable.

        Raises:
            StorageFailed: an I/O error, now or before.
        """
        if self._refusal is not None:
            raise self._refusal
        self.appender.sync()
