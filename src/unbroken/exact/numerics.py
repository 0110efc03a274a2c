"""Deterministic numerics of a process: settings for reproducible kernels, and a record of all that bits depend on.

``pin`` sets what can be set. What cannot be set (torch build, GPU, instruction set) is recorded; a ``Numerics``
registered with ``Run`` compares the record at every resume and names what differs.
"""

import os
import platform
import sys
import warnings
from collections.abc import Collection, Mapping
from typing import Any, Final

import torch

from unbroken import torch_private
from unbroken.errors import ArithmeticDiffers
from unbroken.exact.self_tested import self_test_once
from unbroken.quoting.log import logger
from unbroken.tested_versions import say_if_untested

_log = logger(__name__)
# torch's switches have no types.
_backends: Any = torch.backends
_deterministic: Any = torch.utils.deterministic

Record = dict[str, str | int | bool | None]

_WORKSPACE: Final = "CUBLAS_WORKSPACE_CONFIG"
_INDUCTOR: Final = "TORCHINDUCTOR_DETERMINISTIC"
_INDUCTOR_PACKAGE: Final = "torch._inductor"
_TF32_OVERRIDE: Final = "NVIDIA_TF32_OVERRIDE"


class Numerics:
    """What the bits of this process depend on.

    Args:
        device: the kind of device that trains, ``cpu`` or ``cuda``.
        accept: names of differences the user accepts, so that a run may resume without being exact.
    """

    def __init__(self, device: str | torch.device | None = None, *, accept: Collection[str] = ()) -> None:
        self._device = torch.device(device) if device is not None else _usual_device()
        self._accept = frozenset(accept)

    def record(self) -> Record:
        """Everything relevant by name, as JSON values."""
        found: Record = {
            "torch": str(torch.__version__),
            "torch_build": getattr(torch.version, "git_version", None),
            "device": self._device.type,
            "machine": platform.machine(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "default_dtype": _short(torch.get_default_dtype()),
            "inductor_deterministic": os.environ.get(_INDUCTOR),
        }
        return found | (_cuda_record(self._device) if self._device.type == "cuda" else _cpu_record())

    def state_dict(self) -> dict[str, Any]:
        """The record, for a checkpoint."""
        return dict(self.record())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise unless this process computes like the one that saved.

        Raises:
            ArithmeticDiffers: there are differences that were not accepted; each is named.
        """
        require_alike(state, self.record(), self._accept)


def require_alike(saved: Mapping[str, Any], here: Mapping[str, Any], accept: Collection[str]) -> None:
    """Raise unless two records are equal; an accepted difference is only logged.

    Raises:
        ArithmeticDiffers: there are differences that were not accepted; each is named.
    """
    found = differences(saved, here)
    refused = tuple(each for each in found if each[0] not in accept)
    if refused:
        raise ArithmeticDiffers(differences=refused)
    for name, before, now in found:
        _log.warning("not exact: %s accepted: %s in the checkpoint, %s here", name, before, now)


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What differs between two records: the name, what was saved, what is here."""
    names = [*here, *(name for name in saved if name not in here)]
    return [
        (name, _shown(saved, name), _shown(here, name))
        for name in names
        if saved.get(name) != here.get(name) or (name in saved) != (name in here)
    ]


def pin(
    device: str | torch.device | None = None, *, allow_tf32: bool = False, accept: Collection[str] = ()
) -> Numerics:
    """Make kernels deterministic, and return the record of it. Call it before the first computation.

    Turns on deterministic algorithms (an operation without one raises) and a fixed cuBLAS workspace; turns off
    cuDNN benchmark, cuDNN attention, and timing-based choices in inductor.

    Runs the exact self-test, in a process of its own, the first time that it sees this build of torch and this device,
    and logs what it found. A ``Reducer`` whose layout and precision is not exact here is then an error. The environment
    variable ``UNBROKEN_SELF_TEST=off`` turns the test off.

    Args:
        device: the kind of device that trains, ``cpu`` or ``cuda``.
        allow_tf32: round float32 products to TF32: faster and as repeatable, but other bits.
        accept: names of differences the user accepts at a resume.
    """
    say_if_untested(torch.__version__, _log.warning)
    set_backends(allow_tf32=allow_tf32)
    _use_deterministic_algorithms()
    self_test_once(torch.device(device) if device is not None else _usual_device())
    return Numerics(device, accept=accept)


def set_backends(*, allow_tf32: bool = False) -> None:
    """The settings of ``pin`` for the libraries below torch."""
    # cuBLAS reads it on first use; a value that is already set stays, and torch rejects one that is not deterministic.
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    os.environ.setdefault(_INDUCTOR, "1")
    # Filling memory that is about to be written costs time and changes no result of a correct program.
    _deterministic.fill_uninitialized_memory = False
    _backends.cudnn.benchmark = False
    _backends.cudnn.deterministic = True
    with warnings.catch_warnings():
        # torch 2.9 and 2.10 advise the newer switches; once those are set, torch's own code that reads these fails.
        warnings.filterwarnings("ignore", message="Please use the new API settings")
        _backends.cuda.matmul.allow_tf32 = allow_tf32
        _backends.cudnn.allow_tf32 = allow_tf32
    _backends.cuda.enable_cudnn_sdp(False)


def _use_deterministic_algorithms() -> None:
    """As ``torch.use_deterministic_algorithms(True)``, which also loads inductor to tell it: about a second.

    Inductor reads the same from the environment when it is loaded, so a process that does not compile can do without.
    """
    if (
        _INDUCTOR_PACKAGE in sys.modules
        or os.environ[_INDUCTOR] != "1"
        or not torch_private.inductor_reads_environment()
    ):
        torch.use_deterministic_algorithms(True)
    else:
        torch.set_deterministic_debug_mode("error")


def _usual_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _cpu_record() -> Record:
    return {
        "instructions": _backends.cpu.get_cpu_capability(),
        # The number of threads decides how a product is split.
        "threads": torch.get_num_threads(),
        "mkldnn": _backends.mkldnn.is_available() and bool(_backends.mkldnn.enabled),
    }


def _fp32_precision(setting: Any, older: Any) -> str:  # noqa: ANN401 - torch's switches have no types
    # Before torch 2.9 there is only the older switch, with two of the values.
    try:
        return str(setting.fp32_precision)
    except AttributeError:
        return "tf32" if older.allow_tf32 else "ieee"


def _cuda_record(device: torch.device) -> Record:
    matmul = _backends.cuda.matmul
    return {
        "gpu": torch.cuda.get_device_name(device),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": _backends.cudnn.version(),
        "cublas_workspace": os.environ.get(_WORKSPACE),
        "tf32_override": os.environ.get(_TF32_OVERRIDE),
        "matmul_fp32": _fp32_precision(matmul, matmul),
        "conv_fp32": _fp32_precision(getattr(_backends.cudnn, "conv", None), _backends.cudnn),
        "matmul_bf16_reduced": str(matmul.allow_bf16_reduced_precision_reduction),
        "matmul_fp16_reduced": str(matmul.allow_fp16_reduced_precision_reduction),
        "cudnn_benchmark": _backends.cudnn.benchmark,
        "cudnn_deterministic": _backends.cudnn.deterministic,
        "attention": _attention_backends(),
    }


def _attention_backends() -> str:
    enabled = {
        "flash": _backends.cuda.flash_sdp_enabled(),
        "efficient": _backends.cuda.mem_efficient_sdp_enabled(),
        "math": _backends.cuda.math_sdp_enabled(),
        "cudnn": _backends.cuda.cudnn_sdp_enabled(),
    }
    return ", ".join(name for name, is_on in enabled.items() if is_on)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shown(record: Mapping[str, Any], name: str) -> str:
    return str(record[name]) if name in record else "(not recorded)"
