"""Whether torch and a compiler are good enough for a model is looked at before anything is built."""

import dataclasses
from pathlib import Path

import pytest
import torch

from unbroken import torch_private
from unbroken.config import Config
from unbroken.errors import CompilerMissing, TorchTooOld
from unbroken.gpt.build import require_compiler, require_torch


def test_a_cpu_without_a_compiler_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = Config()
    compiled = dataclasses.replace(config, training=dataclasses.replace(config.training, compile=True))
    with pytest.raises(CompilerMissing, match="no-such-compiler"):
        require_compiler(compiled, torch.device("cpu"))


def test_what_is_not_compiled_for_a_cpu_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = Config()
    plain = dataclasses.replace(config, training=dataclasses.replace(config.training, compile=False))
    require_compiler(plain, torch.device("cpu"))


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_gpu_needs_a_c_compiler_whether_the_model_is_compiled_or_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_compiled: bool
) -> None:
    config = Config()
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, compile=is_compiled))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(CompilerMissing, match="no-such-compiler"):
        require_compiler(config, torch.device("cuda"))
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompilerMissing, check=lambda missing: missing.compiler == "gcc"):
        require_compiler(config, torch.device("cuda"))
    (tmp_path / "clang").write_text("#!/bin/sh\n")
    (tmp_path / "clang").chmod(0o755)
    require_compiler(config, torch.device("cuda"))


def sharded() -> Config:
    config = Config()
    return dataclasses.replace(config, training=dataclasses.replace(config.training, sharding="fsdp2"))


@pytest.mark.parametrize("version", ["2.6.0+cu124", "2.7.1"])
def test_a_torch_whose_attention_is_wrong_is_refused_with_the_version_that_is_needed(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(TorchTooOld) as refused:
        require_torch(Config())
    assert (refused.value.required, refused.value.installed) == ("2.8", version)


def test_a_sharded_trainer_names_the_torch_that_it_needs_on_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    monkeypatch.setattr(torch_private, "DefaultReduceScatter", torch_private._Absent)
    require_torch(sharded())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TorchTooOld) as refused:
        require_torch(sharded())
    assert refused.value.required == "2.9"
    require_torch(Config())
