"""Weights as files: read back by the programs they are for, bit for bit, and never half there."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.unit.gpt.models import config_of, model_of
from unbroken.errors import StorageFailed, WouldOverwrite
from unbroken.files import Files
from unbroken.gpt import to_safetensors, to_torch
from unbroken.testing import MemoryDisk

safetensors = pytest.importorskip("safetensors.torch")


def state() -> dict[str, Tensor]:
    return model_of(config_of(use_bias=True)).state_dict()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16, torch.float64])
def test_a_plain_file_is_read_without_running_code(dtype: torch.dtype | None, tmp_path: Path) -> None:
    to_torch(state(), tmp_path / "model.pt", dtype=dtype)
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert list(found) == list(state())
    assert all(torch.equal(found[name], tensor.to(dtype or tensor.dtype)) for name, tensor in state().items())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16, torch.float64])
def test_safetensors_reads_what_was_written(dtype: torch.dtype | None, tmp_path: Path) -> None:
    to_safetensors(state(), tmp_path / "model.safetensors", dtype=dtype)
    found = safetensors.load_file(tmp_path / "model.safetensors")
    assert set(found) == set(state())
    assert all(torch.equal(found[name], tensor.to(dtype or tensor.dtype)) for name, tensor in state().items())
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_a_view_takes_only_itself_into_the_file(tmp_path: Path) -> None:
    whole = torch.randn(1000, 10)
    to_torch({"row": whole[3], "column": whole[:, 2]}, tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(found["row"], whole[3]) and torch.equal(found["column"], whole[:, 2])
    assert (tmp_path / "model.pt").stat().st_size < 10_000


@pytest.mark.parametrize("export", [to_torch, to_safetensors])
def test_a_file_that_exists_is_never_replaced(export: type, tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    with pytest.raises(WouldOverwrite):
        export(state(), tmp_path / "model")
    assert (tmp_path / "model").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("export", [to_torch, to_safetensors])
def test_a_folder_that_is_not_there_yet_is_made(export: type, tmp_path: Path) -> None:
    export(state(), tmp_path / "a" / "b" / "model")
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["model"]


@pytest.mark.parametrize("export", [to_torch, to_safetensors])
def test_a_full_disk_leaves_nothing_behind(export: type) -> None:
    disk = MemoryDisk([Path("/out")], capacity_bytes=1000)
    with pytest.raises(StorageFailed):
        export(state(), Path("/out/model"), files=Files(disk))
    assert Files(disk).list_directory(Path("/out")) == []
