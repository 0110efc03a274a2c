"""The bytes around a tensor's elements are those that torch itself would write."""

import io
import mmap
import zipfile
from typing import IO, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.state.payloads import random_bits, same_bits
from unbroken.state.container import container
from unbroken.state.host_copy import as_bits
from unbroken.state.index import DTYPES


def blob(tensor: torch.Tensor) -> bytes:
    around = container(tensor.dtype, tuple(tensor.shape))
    return around.head + as_bits(tensor.contiguous()).reshape(-1).numpy().tobytes() + around.tail


@pytest.mark.filterwarnings("ignore:.* support is experimental")
@pytest.mark.parametrize("shape", [(), (3,), (0,), (5, 0), (4, 3, 2)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_torch_loads_a_blob_without_unpickling_objects(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_bits(shape, dtype)
    assert same_bits(torch.load(io.BytesIO(blob(tensor)), weights_only=True), tensor)


def written_without_data(tensor: torch.Tensor) -> bytes:
    """What torch itself writes if it leaves out the elements, as zeros."""
    file = _FileWithHoles()
    with torch.serialization.skip_data():
        torch.save(tensor, cast("IO[bytes]", file))
    return bytes(file.written)


class _FileWithHoles(io.RawIOBase):
    """Keeps what is written, and nothing of the elements."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]  # torch hands over nothing else
        self.written += data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_CUR
        return offset


# Python has a name for it since 3.13.
_MAP_NORESERVE = 0x4000


def untouched(size_bytes: int) -> torch.Tensor:
    """A tensor whose memory is never touched, and so takes none."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, size_bytes, flags=flags), dtype=torch.uint8)


@pytest.mark.filterwarnings("ignore:.* support is experimental")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_the_pickle_is_the_one_that_torch_writes(dtype: torch.dtype) -> None:
    for shape in ((), (7,), (2, 0, 3), (300, 70)):
        itself = io.BytesIO()
        tensor = random_bits(shape, dtype)
        torch.save(tensor, itself)
        ours, theirs = zipfile.ZipFile(io.BytesIO(blob(tensor))), zipfile.ZipFile(itself)
        assert ours.read("archive/data.pkl") == theirs.read("archive/data.pkl")


def test_the_other_bytes_are_those_that_torch_writes_without_data() -> None:
    tensors = [torch.randn(7, 5), torch.zeros(0), torch.zeros((), dtype=torch.uint16)]
    # Above 4 GiB the sizes and places of an archive need other fields.
    tensors += [untouched((1 << 32) + more) for more in (-1800, -1200, -700, -2, -1, 0, 1, 1 << 20)]
    for tensor in tensors:
        theirs = written_without_data(tensor)
        if ".storage_alignment" not in str(theirs):
            pytest.skip("this torch writes fewer records than newer ones")
        around = container(tensor.dtype, tuple(tensor.shape))
        assert around.head + around.tail == theirs


def test_a_container_enters_no_torch_mode_and_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # A mode that is entered in a thread ends the process in some builds of torch.
    monkeypatch.setattr(TorchDispatchMode, "__enter__", lambda mode: pytest.fail("a torch mode is entered"))
    around = container(torch.float32, (1 << 20, 1 << 20, 3))
    assert len(around.head) + len(around.tail) < 4096


def test_the_same_dtype_and_shape_give_the_same_container() -> None:
    assert container(torch.int8, (3,)) is container(torch.int8, (3,))
    assert container(torch.int8, (3,)) != container(torch.int8, (4,))
