"""The result of the exact self-test for the devices of this process: looked up, or run once, by ``exact.pin``.

The test runs in a process of its own, and its result is kept per torch build and device. On each node the process with
local rank 0 runs it; the others look up the result, so that none waits for another.
"""

import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any, Final

import torch

from unbroken.doctor.self_test_process import (
    EXACT,
    NOT_EXACT,
    NOT_TESTED,
    NoReport,
    SelfTestReport,
    cache_folder,
    find_kept,
    is_switched_off,
    keep,
    listed,
    run_self_test,
)
from unbroken.errors import NotExactHere
from unbroken.quoting.log import logger
from unbroken.version import VERSION

_log = logger(__name__)
_CPU_INFO: Final = Path("/proc/cpuinfo")
_DRIVER: Final = Path("/sys/module/nvidia/version")
_TESTED_DEVICES: Final = ("cpu", "cuda")

# By type of device: what ``pin`` asked about, and what is known.
_asked: dict[str, dict[str, str]] = {}
_found: dict[str, SelfTestReport] = {}


def self_test_once(device: torch.device) -> None:
    """Look up the result for a device, or run the self-test if there is none; what it found is logged.

    Nothing is raised here: which layout and precision a training uses is known to its ``Reducer``.
    """
    _asked.pop(device.type, None)
    _found.pop(device.type, None)
    if is_switched_off() or device.type not in _TESTED_DEVICES:
        return
    device = _with_index(device)
    key = make_key(device)
    _asked[device.type] = key
    report = find_kept(key, cache_folder())
    if report is None and os.environ.get("LOCAL_RANK", "0") == "0":
        report = _run(device, key)
    if report is not None:
        _found[device.type] = report
        if os.environ.get("RANK", "0") == "0":
            _say(report)


def require_exact(layout: str, dtype: torch.dtype | None, device: torch.device) -> None:
    """Raise if the self-test found that this layout and precision has not the same bits here; silent if unknown.

    Raises:
        NotExactHere: it has not.
    """
    key = _asked.get(device.type)
    if key is None:
        return
    report = _found.get(device.type) or find_kept(key, cache_folder())
    name = str(dtype or torch.float32).removeprefix("torch.")
    for each in () if report is None else report.of(NOT_EXACT):
        if (each.layout, each.dtype) == (layout, name):
            where = key.get("gpu") or device.type
            raise NotExactHere(layout=layout, dtype=name, device=where, torch=key["torch"], because=each.because)


def _run(device: torch.device, key: dict[str, str]) -> SelfTestReport | None:
    try:
        report = run_self_test(str(device))
        if report.key != key:
            differing = sorted(name for name in {*key, *report.key} if key.get(name) != report.key.get(name))
            raise NoReport(f"its process has another {', '.join(differing)}")
    except NoReport as failed:
        _log.warning("the exact self-test could not run, so exactness is not tested here: %s", failed)
        return None
    keep(report, cache_folder())
    if right := report.of(EXACT):
        _log.info("exact self-test passed in %.1f s: %s", report.took_s, listed(right))
    return report


def _say(report: SelfTestReport) -> None:
    if wrong := report.of(NOT_EXACT):
        _log.warning("not exact on this machine: %s (unbroken doctor shows what differs)", listed(wrong))
    if missing := report.of(NOT_TESTED):
        _log.warning("exactness not tested: %s (unbroken doctor shows why)", listed(missing))


def _with_index(device: torch.device) -> torch.device:
    """The device of this rank: asking about another GPU would make a context on it."""
    if str(device) != "cuda":
        return device
    given = os.environ.get("LOCAL_RANK")
    number = torch.cuda.current_device() if given is None else int(given) % torch.cuda.device_count()
    return torch.device("cuda", number)


# ---- what a result holds for ----


def make_key(device: torch.device) -> dict[str, str]:
    """What the result of the self-test holds for: this package, the build of torch and the device."""
    backends: Any = torch.backends
    found = {
        "unbroken": VERSION,
        "sources": _sources(),
        "torch": str(torch.__version__),
        "torch_build": str(getattr(torch.version, "git_version", None)),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "instructions": str(backends.cpu.get_cpu_capability()),
        "device": device.type,
    }
    if device.type == "cuda":
        found |= {
            "gpu": torch.cuda.get_device_name(device),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
            "cuda": str(torch.version.cuda or torch.version.hip),
            "driver": _text(_DRIVER),
            "triton": _installed("triton"),
        }
    return found


def _sources() -> str:
    """A digest of the modules that are tested: a changed one is tested again."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _cpu_model() -> str:
    lines = _text(_CPU_INFO).splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
