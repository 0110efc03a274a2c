"""Whether a model can be compiled is looked at before anything is built."""

import dataclasses
from pathlib import Path

import pytest
import torch

from unbroken.config import Config
from unbroken.errors import CompilerMissing
from unbroken.gpt.build import require_compiler


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
    with pytest.raises(CompilerMissing, match="needs a C compiler, and 'gcc' is not installed"):
        require_compiler(config, torch.device("cuda"))
    (tmp_path / "clang").write_text("#!/bin/sh\n")
    (tmp_path / "clang").chmod(0o755)
    require_compiler(config, torch.device("cuda"))
