"""Whether a model can be compiled is looked at before anything is built."""

import dataclasses

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
    require_compiler(config, torch.device("cuda"))
