"""The bytes around a tensor's elements are those that torch itself would write."""

import io
import zipfile

import pytest
import torch

from tests.unit.state.payloads import random_bits, same_bits
from unbroken.state.index import DTYPES
from unbroken.state.payload import container
from unbroken.state.stage import as_bits


def blob(tensor: torch.Tensor) -> bytes:
    around = container(tensor.dtype, tuple(tensor.shape))
    return around.head + as_bits(tensor.contiguous()).reshape(-1).numpy().tobytes() + around.tail


@pytest.mark.parametrize("shape", [(), (3,), (0,), (5, 0), (4, 3, 2)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_torch_loads_a_blob_without_unpickling_objects(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_bits(shape, dtype)
    assert same_bits(torch.load(io.BytesIO(blob(tensor)), weights_only=True), tensor)


def test_a_blob_has_the_records_and_the_pickle_that_torch_writes() -> None:
    tensor = torch.randn(7, 5)
    itself = io.BytesIO()
    torch.save(tensor, itself)
    ours, theirs = zipfile.ZipFile(io.BytesIO(blob(tensor))), zipfile.ZipFile(itself)
    assert [info.filename for info in ours.infolist()] == [info.filename for info in theirs.infolist()]
    assert ours.read("archive/data.pkl") == theirs.read("archive/data.pkl")
    assert len(blob(tensor)) == len(itself.getvalue())


def test_a_container_is_made_without_the_memory_of_its_tensor() -> None:
    around = container(torch.float32, (1 << 20, 1 << 20))
    assert len(around.head) + len(around.tail) < 4096


def test_the_same_dtype_and_shape_give_the_same_container() -> None:
    assert container(torch.int8, (3,)) is container(torch.int8, (3,))
    assert container(torch.int8, (3,)) != container(torch.int8, (4,))
