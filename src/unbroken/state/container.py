"""The few hundred bytes around a tensor's elements that make them a file ``torch.load`` reads.

A blob is a head, the elements row by row, and a tail. Head and tail depend on dtype and shape alone, so they are made
without the elements at hand: nothing is copied to be wrapped. Our own reader never looks at them; it goes to the
elements by the offset in the index. They are there for stock tools.
"""

import io
import math
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, cast

import torch

# Fake tensors are the documented way to save a file without its data; the class itself is exported under this name
# only. If it moves, every save fails at once and loudly, and the elements could be wrapped by an empty real tensor.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data


@dataclass(frozen=True)
class Container:
    """What stands before and behind the elements of a tensor."""

    head: bytes
    tail: bytes


@lru_cache(maxsize=1 << 14)
def container(dtype: torch.dtype, shape: tuple[int, ...]) -> Container:
    """The container of a contiguous tensor; the same for the same dtype and shape."""
    with FakeTensorMode(), warnings.catch_warnings():
        # That some operators do not know a dtype is no news here: none is applied.
        warnings.simplefilter("ignore", UserWarning)
        stand_in = torch.empty(shape, dtype=dtype, device="cpu")
    file = _FileWithoutData(math.prod(shape) * dtype.itemsize)
    with skip_data(materialize_fake_tensors=True):
        torch.save(stand_in, cast("IO[bytes]", file))
    return file.finish()


class _FileWithoutData(io.RawIOBase):
    """Takes what torch writes and remembers where it left out the elements."""

    def __init__(self, data_bytes: int) -> None:
        super().__init__()
        self._data_bytes = data_bytes
        self._head: bytes | None = None
        self._written = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]  # torch hands over nothing else
        self._written += data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if self._head is not None or (offset, whence) != (self._data_bytes, io.SEEK_CUR):
            # Then torch writes its files in another way than this one understands.
            raise io.UnsupportedOperation(f"seek by {offset} from {whence} in a file of {self._data_bytes} data bytes")
        self._head, self._written = bytes(self._written), bytearray()
        return len(self._head) + offset

    def finish(self) -> Container:
        """What stands before and behind the elements; without elements all stands before them."""
        if self._head is None:
            if self._data_bytes:
                raise io.UnsupportedOperation("the elements were not left out")
            return Container(bytes(self._written), b"")
        return Container(self._head, bytes(self._written))
