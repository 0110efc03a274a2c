"""The tensors in a safetensors file, told by its header: a length, then JSON, then bytes. No code is run."""

import json
from pathlib import Path
from typing import Any, Final

from unbroken.errors import CannotSeal
from unbroken.files import Files, Source
from unbroken.store.digest import BLOCK_BYTES, BlockDigester
from unbroken.store.manifest import Tensor

_HEADER_LIMIT_BYTES: Final = 100 << 20
_LENGTH_BYTES: Final = 8


def tensors_in(files: Files, path: Path) -> dict[str, Tensor]:
    """Name, type, shape and a digest of each tensor's bytes; empty if the file is not what its name says.

    Raises:
        CannotSeal: the file is shorter than its header says.
        StorageFailed: the system refused to read.
    """
    with files.reading(path) as source:
        header, start = _header(source, files, path)
        found = {}
        for name, entry in header.items():
            described = _described(entry)
            # A name that is no Unicode could not be written down.
            if name != "__metadata__" and described is not None and _is_text(name):
                dtype, shape, begin, end = described
                found[name] = Tensor(dtype, shape, _digest(source, start + begin, start + end))
        return found


def _header(source: Source, files: Files, path: Path) -> tuple[dict[str, Any], int]:
    length = bytearray(_LENGTH_BYTES)
    source.fill(0, memoryview(length))
    size = int.from_bytes(length, "little")
    status = files.find(path)
    if status is None or size > min(_HEADER_LIMIT_BYTES, status.size_bytes):
        return {}, 0
    raw = bytearray(size)
    source.fill(_LENGTH_BYTES, memoryview(raw))
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        return {}, 0
    return (header, _LENGTH_BYTES + size) if isinstance(header, dict) else ({}, 0)


def _is_text(name: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def _described(entry: object) -> tuple[str, tuple[int, ...], int, int] | None:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            sizes = tuple(n for n in shape if type(n) is int and n >= 0)
            if len(sizes) == len(shape) and 0 <= begin <= end:
                return dtype, sizes, begin, end
    return None


def _digest(source: Source, start: int, end: int) -> str:
    digester = BlockDigester()
    buffer = memoryview(bytearray(min(BLOCK_BYTES, max(end - start, 1))))
    while start < end:
        taken = source.fill(start, buffer[: min(len(buffer), end - start)])
        if taken == 0:
            reason = f"{source.path.name} ends before its tensors do"
            raise CannotSeal(path=source.path.parent, reason=reason)
        digester.update(buffer[:taken])
        start += taken
    return digester.finish().whole
