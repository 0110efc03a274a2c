"""The arithmetic is pinned, recorded, and compared by name."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.torch_versions import torch_is_older
from unbroken import exact, tested_versions
from unbroken.errors import ArithmeticDiffers
from unbroken.exact.numerics import _fp32_precision, differences


@pytest.fixture(autouse=True)
def _unpinned() -> Iterator[None]:
    before = dict(os.environ)
    switches: Any = torch.utils.deterministic
    fill = switches.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    switches.fill_uninitialized_memory = fill
    torch.backends.cudnn.deterministic = False
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.backends.cudnn.allow_tf32 = True
    os.environ.clear()
    os.environ.update(before)


def test_pinning_sets_the_defaults_and_keeps_the_users_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    exact.pin("cpu")
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["TORCHINDUCTOR_DETERMINISTIC"] == "1"


# Whether pinning loads inductor, is in force, and is known to inductor once that is loaded.
PINNING = """
import sys, torch
from unbroken import exact
exact.pin("cpu")
print("torch._inductor" in sys.modules, torch.are_deterministic_algorithms_enabled())
import torch._inductor.config
print(torch._inductor.config.deterministic)
"""


@pytest.mark.skipif(torch_is_older(2, 13), reason="older versions of torch load it by themselves")
def test_pinning_does_not_load_the_compiler_and_binds_it_all_the_same() -> None:
    environ = {**os.environ, "UNBROKEN_SELF_TEST": "off"}
    said = subprocess.run([sys.executable, "-c", PINNING], env=environ, check=True, capture_output=True, text=True)
    assert said.stdout.split() == ["False", "True", "True"]


def test_the_record_is_json_and_a_process_agrees_with_itself() -> None:
    numerics = exact.pin("cpu")
    record = numerics.state_dict()
    assert json.loads(json.dumps(record)) == record
    assert {"torch", "torch_build", "deterministic", "threads", "instructions"} <= record.keys()
    numerics.load_state_dict(json.loads(json.dumps(record)))


def test_nothing_in_the_record_depends_on_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    before = exact.Numerics("cpu").record()
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert exact.Numerics("cpu").record() == before


def test_each_difference_is_named_with_both_values() -> None:
    numerics = exact.pin("cpu")
    saved = {**numerics.state_dict(), "torch": "2.11.0", "threads": 64, "gpu": "NVIDIA H200"}
    saved.pop("machine")
    with pytest.raises(ArithmeticDiffers) as refused:
        numerics.load_state_dict(saved)
    found = {name: (before, here) for name, before, here in refused.value.differences}
    assert found.keys() == {"torch", "threads", "gpu", "machine"}
    assert found["torch"] == ("2.11.0", torch.__version__)
    assert found["gpu"] == ("NVIDIA H200", "(not recorded)")


def test_a_switch_that_was_turned_off_is_a_difference() -> None:
    saved = exact.pin("cpu").state_dict()
    torch.use_deterministic_algorithms(False)
    with pytest.raises(ArithmeticDiffers, match="deterministic"):
        exact.Numerics("cpu").load_state_dict(saved)


def test_a_difference_that_is_accepted_by_name_is_reported_and_another_one_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved = {**exact.Numerics("cpu").state_dict(), "threads": 64}
    with caplog.at_level(logging.WARNING):
        exact.Numerics("cpu", accept=["threads"]).load_state_dict(saved)
    assert "threads" in caplog.text
    with pytest.raises(ArithmeticDiffers, match="torch"):
        exact.Numerics("cpu", accept=["threads"]).load_state_dict({**saved, "torch": "1"})


def test_none_is_not_the_same_as_not_recorded() -> None:
    assert differences({"a": None}, {}) == [("a", "None", "(not recorded)")]
    assert differences({"a": 1}, {"a": 1}) == []


@pytest.mark.parametrize("value", ["ieee", "tf32"])
def test_how_float32_is_multiplied_is_recorded_by_every_version_of_torch(value: str) -> None:
    newer, older = SimpleNamespace(fp32_precision=value), SimpleNamespace(allow_tf32=value == "tf32")
    assert _fp32_precision(newer, None) == _fp32_precision(None, older) == value


def test_pinning_names_a_torch_that_was_not_tested(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tested_versions, "TESTED_TORCH", ("1.0",))
    tested_versions.say_if_untested.cache_clear()
    try:
        exact.pin("cpu")
    finally:
        tested_versions.say_if_untested.cache_clear()
    assert torch.__version__ in caplog.text
