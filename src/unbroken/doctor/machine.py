"""Python, memory, torch, GPUs and gloo of this machine, and what the exact self-test found, as findings."""

import importlib.util
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from unbroken.doctor.finding import CheckResult, note, problem
from unbroken.doctor.self_test_process import (
    EXACT,
    NOT_AVAILABLE,
    NOT_EXACT,
    NOT_TESTED,
    Combination,
    NoReport,
    SelfTestReport,
    cache_folder,
    keep,
    listed,
    run_self_test,
)
from unbroken.quoting import amounts
from unbroken.tested_versions import untested_python, untested_torch

_DRIVER: Final = Path("/sys/module/nvidia/version")
_COPIED_BYTES: Final = 64 << 20
_COPIES: Final = 3


def examine_python() -> Iterator[CheckResult]:
    """The interpreter and the operating system."""
    version, system = platform.python_version(), f"{platform.system()} {platform.release()} {platform.machine()}"
    yield CheckResult("python", f"{version} on {system}", values={"version": version, "executable": sys.executable})
    if untested := untested_python(version):
        yield note("python", "python-untested", untested)


def examine_memory(monotonic: Callable[[], float]) -> CheckResult:
    """How fast this machine copies memory: a save first copies the state."""
    source, target = bytearray(_COPIED_BYTES), bytearray(_COPIED_BYTES)
    took_s = []
    for _ in range(_COPIES):
        started_s = monotonic()
        target[:] = source
        took_s.append(max(monotonic() - started_s, 1e-9))
    speed = _COPIED_BYTES / min(took_s)
    return CheckResult(
        "copy speed", f"{amounts.size(int(speed))}/s in memory", values={"copy_bytes_per_s": round(speed)}
    )


def examine_torch() -> Iterator[CheckResult]:
    """Torch, its GPUs, gloo, and the exact self-test, which is run now and whose result is kept."""
    if importlib.util.find_spec("torch") is None:
        text = "not installed: status, ls, verify, ... work, training does not"
        yield problem("torch", "torch-missing", text, "pip install 'unbroken[train]'")
        return
    try:
        report = run_self_test("auto", with_machine=True)
    except NoReport as failed:
        yield problem("torch", "torch-broken", f"the self-test could not run: {failed}")
        return
    keep(report, cache_folder())
    yield from torch_findings(report, _driver())


def torch_findings(report: SelfTestReport, driver: str | None) -> Iterator[CheckResult]:
    """What a report says, one finding for each subject."""
    found: Mapping[str, Any] | None = report.machine.get("torch")
    if found is None:
        yield problem("torch", "torch-broken", str(report.machine.get("torch_error")))
        return
    kinds = [f"{name} {found[field]}" for name, field in (("CUDA", "cuda"), ("ROCm", "hip")) if found[field]]
    values = {name: found[name] for name in ("version", "build", "cuda", "hip")}
    yield CheckResult("torch", f"{found['version']}, built for {kinds[0] if kinds else 'CPUs'}", values=values)
    if untested := untested_torch(found["version"]):
        yield note("torch", "torch-untested", untested)
    yield from _gpus(found, driver)
    errors = report.machine.get("gloo_errors") or []
    if errors:
        yield problem("gloo", "gloo-unreachable", f"2 ranks could not connect: {errors[0]}")
    else:
        yield CheckResult("gloo", "2 ranks connected")
    yield from _exactness(report)


def _gpus(found: Mapping[str, Any], driver: str | None) -> Iterator[CheckResult]:
    has_cuda = bool(found["cuda"] or found["hip"])
    values = {"driver": driver}
    if not found["gpus"] and has_cuda:
        text = "torch is built for GPUs and finds none: it computes on the CPU"
        yield note("gpu", "gpu-missing", text, **values)
    elif not found["gpus"] and driver is not None:
        text = f"the NVIDIA driver {driver} is loaded, but this torch is built for CPUs"
        yield note("gpu", "gpu-missing", text, **values)
    elif not found["gpus"]:
        yield CheckResult("gpu", "none: torch computes on the CPU", values=values)
    for number, gpu in enumerate(found["gpus"]):
        description = [gpu["name"], amounts.size(gpu["memory_bytes"]), f"compute capability {gpu['capability']}"]
        description += [f"driver {driver}"] if driver else []
        if gpu["copy_bytes_per_s"]:
            description.append(f"copies {amounts.size(int(gpu['copy_bytes_per_s']))}/s to host memory")
        yield CheckResult(f"gpu {number}", ", ".join(description), values={**values, **gpu})


def _exactness(report: SelfTestReport) -> Iterator[CheckResult]:
    device = report.key.get("gpu") or report.key.get("device", "")
    values = {"device": device, "combinations": [vars(each) for each in report.combinations], "took_s": report.took_s}
    if wrong := report.of(NOT_EXACT):
        details = tuple(f"{each}: {reason}" for each in wrong for reason in each.because)
        text = f"not the same bits on {device}: {listed(wrong)}"
        yield problem("exact", "not-exact-here", text, *details, **values)
    elif right := report.of(EXACT):
        text = f"the same bits on 1 rank and 2: {listed(right)}"
        yield CheckResult("exact", text, values=values)
    if missing := report.of(NOT_TESTED):
        details = _reasons(missing)
        text = f"not tested, so not promised: {listed(missing)}"
        yield problem("exact", "self-test-unfinished", text, *details, **values)
    if lacking := report.of(NOT_AVAILABLE):
        details = _reasons(lacking)
        text = f"not available here, so not promised: {listed(lacking)}"
        yield note("exact", "self-test-unfinished", text, *details, **values)


def _reasons(combinations: Sequence[Combination]) -> tuple[str, ...]:
    """Why there is no result, each reason once: it is mostly the same on every rank and in every precision."""
    reasons = (reason for each in combinations for reason in each.because)
    return tuple(dict.fromkeys(reason.partition(": ")[2] or reason for reason in reasons))


def _driver() -> str | None:
    try:
        return _DRIVER.read_text().strip() or None
    except OSError:
        return None
