"""The exact self-test as a process of its own, and its results, kept in the user's cache directory.

The process imports torch, this module does not. A result is kept under what it holds for: versions, sources, torch
build and device. One that is damaged, or of something else, counts as none; a cache that cannot be written is no error.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from unbroken.errors import StorageFailed
from unbroken.files import LOCAL, Files
from unbroken.quoting.log import logger

_log = logger(__name__)
SWITCH: Final = "UNBROKEN_SELF_TEST"
SCHEMA: Final = "unbroken.self-test/1"
EXACT, NOT_EXACT, NOT_TESTED, NOT_AVAILABLE = "exact", "not-exact", "not-tested", "not-available"
_VERDICTS: Final = frozenset({EXACT, NOT_EXACT, NOT_TESTED, NOT_AVAILABLE})
# A busy machine may need more than the usual limits; only a hang lasts that long.
TIMEOUT_VARIABLE: Final = "UNBROKEN_TEST_TIMEOUT_S"
# Longer than the limits inside: those name the rank that hangs.
_LIMIT_S: Final = 60 + float(os.environ.get(TIMEOUT_VARIABLE, "120"))
_LIMIT_BYTES: Final = 1 << 20
# The module is found as it is here, however this process came by its path.
_PROGRAM: Final = """\
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from unbroken.exact.self_test import main
main()
"""
# What a launcher set for this process about its own world, which the ranks of the test are no part of.
_OF_A_WORLD: Final = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG"),
)
_SET: Final = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # cuBLAS reads it when it is loaded.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # The process tests; it does not ask for a test.
    SWITCH: "off",
}


class NoReport(Exception):
    """The process ended without a report; the text says why."""


@dataclass(frozen=True)
class Combination:
    """One layout in one precision: ``verdict`` is that of the self-test, ``because`` what differs or is missing."""

    layout: str
    dtype: str
    verdict: str
    because: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.layout} {self.dtype}"


@dataclass(frozen=True)
class SelfTestReport:
    """What the self-test found on one device.

    Attributes:
        key: what it holds for.
        combinations: the verdicts.
        machine: facts about torch and its GPUs, if they were asked for.
        took_s: how long the test took, without the import of torch.
    """

    key: Mapping[str, str]
    combinations: tuple[Combination, ...]
    machine: Mapping[str, Any] = field(default_factory=dict)
    took_s: float = 0.0

    def of(self, *verdicts: str) -> tuple[Combination, ...]:
        """The combinations with one of these verdicts."""
        return tuple(each for each in self.combinations if each.verdict in verdicts)


def is_switched_off(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ``UNBROKEN_SELF_TEST=off`` forbids to run and to use it."""
    return environ.get(SWITCH, "").lower() in ("off", "0", "no", "false")


# ---- the process ----


def run_self_test(device: str, *, with_machine: bool = False, limit_s: float = _LIMIT_S) -> SelfTestReport:
    """Run the self-test on a device (``cpu``, ``cuda:0``, or ``auto``), in a process of its own.

    Raises:
        NoReport: there is no report; the reason is given.
    """
    command = [sys.executable or "python3", "-W", "ignore", "-c", _PROGRAM, json.dumps(sys.path), "--device", device]
    command += ["--with-machine"] if with_machine else []
    environ = {name: text for name, text in os.environ.items() if name not in _OF_A_WORLD} | _SET
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
            text=True,
            errors="replace",
            # Its own group: it is killed with its ranks, and a Ctrl-C reaches it through us.
            start_new_session=True,
        )
    except OSError as refused:
        raise NoReport(f"Python could not be started: {refused.strerror}") from refused
    try:
        out, said = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as late:
        raise NoReport(f"it did not end within {limit_s:.0f} s") from late
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    if process.returncode:
        raise NoReport(_reason(process.returncode, said))
    report = _decoded(out)
    if report is None:
        raise NoReport(f"its answer is not understood: {out[:80]!r}")
    return report


def _reason(code: int, said: str) -> str:
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"it ended with exit code {code}"


def _decoded(text: str | bytes) -> SelfTestReport | None:
    try:
        found = json.loads(text)
        key = {str(name): str(value) for name, value in found["key"].items()}
        combinations = tuple(
            Combination(str(each["layout"]), str(each["dtype"]), str(each["verdict"]), tuple(map(str, each["because"])))
            for each in found["combinations"]
        )
        machine, took_s = found.get("machine") or {}, float(found.get("took_s", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not combinations or any(each.verdict not in _VERDICTS for each in combinations):
        return None
    return SelfTestReport(key, combinations, machine, took_s)


# ---- the cache ----


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder of the results: that of the XDG specification; None if there is no home directory."""
    given = environ.get("XDG_CACHE_HOME", "")
    if Path(given).is_absolute():
        return Path(given, "unbroken", "self-test")
    try:
        return Path.home() / ".cache" / "unbroken" / "self-test"
    except RuntimeError:
        return None


def find_kept(key: Mapping[str, str], folder: Path | None, files: Files = LOCAL) -> SelfTestReport | None:
    """The result that was kept for exactly this key; None if there is none, or it cannot be read."""
    if folder is None:
        return None
    path = folder / _name(key)
    try:
        data = files.read_bytes(path, limit_bytes=_LIMIT_BYTES) if files.find(path) is not None else b""
    except StorageFailed:
        return None
    body, _, digest = data.rstrip(b"\n").rpartition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        return None
    found = _decoded(body)
    return found if found is not None and found.key == dict(key) else None


def keep(report: SelfTestReport, folder: Path | None, files: Files = LOCAL) -> bool:
    """Keep a result, unless something could not be tested this time; says whether it is kept."""
    if folder is None or report.of(NOT_TESTED):
        return False
    kept = {"schema": SCHEMA, "key": dict(report.key), "combinations": [asdict(each) for each in report.combinations]}
    body = json.dumps(kept, sort_keys=True).encode()
    data = body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"
    path = folder / _name(report.key)
    try:
        files.make_directory(folder)
        # crash here: no result, or the old one: both lead to another test.
        files.replace(path, data, scratch=f"{path.name}.{os.getpid()}", durable=False)
    except StorageFailed as refused:
        _log.info("the result of the self-test is not kept: could not %s: %s", refused.operation, refused.cause)
        return False
    return True


def _name(key: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:32] + ".json"


def listed(combinations: Sequence[Combination]) -> str:
    """Combinations by layout: ``replicated and sharded (float32, bfloat16)``."""
    by_layout: dict[str, list[str]] = {}
    for each in combinations:
        by_layout.setdefault(each.layout, []).append(each.dtype)
    by_dtypes: dict[tuple[str, ...], list[str]] = {}
    for layout, dtypes in by_layout.items():
        by_dtypes.setdefault(tuple(dtypes), []).append(layout)
    return "; ".join(f"{' and '.join(layouts)} ({', '.join(dtypes)})" for dtypes, layouts in by_dtypes.items())
