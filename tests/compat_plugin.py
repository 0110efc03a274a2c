"""A pytest plugin for runs with other versions of torch (`tools/compat.sh`): sorts and counts the results as JSON.

Some tests cannot pass with an old torch: what they prove is refused there by name, or fails inside torch itself. They
are counted as lacking, with the reason. In no other run is this plugin loaded, so that it cannot hide a failure there.
"""

import json
import os
import platform
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from tests.torch_versions import torch_is_older

LACKS: Final = (
    # Version in which it is there, what is said before, the reason.
    ((2, 9), "exact under FSDP2 needs torch", "exact under FSDP2 is refused (torch-too-old)"),
    ((2, 8), "the GPT trainer needs torch", "the trainer is refused (torch-too-old)"),
    ((2, 9), "TorchTooOld(feature='exact under FSDP2'", "exact under FSDP2 is refused (torch-too-old)"),
    ((2, 8), "TorchTooOld(feature='the GPT trainer'", "the trainer is refused (torch-too-old)"),
    ((2, 7), "'Stream' object has no attribute 'record_event'", "FSDP2 on a CPU fails inside torch"),
)
# What a test file is about, by the beginning of its path; the first that fits counts.
PARTS: Final = (
    ("tests/unit/gpt/", "trainer"),
    ("tests/distributed/test_gpt", "trainer"),
    ("tests/exact/test_gpt", "trainer"),
    ("tests/exact/test_average", "trainer"),
    ("tests/exact/test_replay", "trainer"),
    ("tests/unit/exact/", "exact"),
    ("tests/exact/test_world_size", "exact"),
    ("tests/exact/test_small_world", "exact"),
    ("tests/exact/test_odd_models", "exact"),
    ("tests/exact/test_resize_chain", "exact"),
    ("tests/exact/test_lost_steps", "exact"),
    ("tests/distributed/", "ranks"),
    ("tests/", "run"),
)


def part_of(node: str) -> str:
    """What a test is about."""
    return next(part for begin, part in PARTS if node.startswith(begin))


def lacking(said: str) -> str | None:
    """Why a test fails that this version of torch cannot pass; None for any other failure."""
    return next((why for version, mark, why in LACKS if torch_is_older(*version) and mark in said), None)


class Results:
    """The counts of one run, and what failed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lacks: Counter[tuple[str, str]] = Counter()
        self._failed: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        why = lacking(str(report.longrepr)) if report.outcome == "failed" else None
        if why is not None:
            report.outcome = "skipped"
            report.longrepr = (report.location[0], report.location[1] or 0, f"lacking: {why}")
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        part, said = part_of(report.nodeid), str(report.longrepr)
        is_lacking = report.outcome == "skipped" and "lacking: " in said
        self._counts[part, "lacking" if is_lacking else report.outcome] += 1
        if is_lacking:
            self._lacks[part, said.split("lacking: ")[1].rstrip("')")] += 1
        if report.outcome == "failed":
            self._failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome == "failed":
            self._counts[part_of(report.nodeid or "tests/"), "failed"] += 1
            self._failed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        parts: dict[str, dict[str, Any]] = {}
        for (part, outcome), count in sorted(self._counts.items()):
            parts.setdefault(part, {})[outcome] = count
        for (part, why), count in sorted(self._lacks.items()):
            parts[part].setdefault("lacks", {})[why] = count
        found = {
            "tests": os.environ.get("COMPAT_TESTS", "").split(),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "parts": parts,
            "failures": sorted(self._failed),
        }
        self._path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Count in the process that hears of all tests; sort in every one."""
    is_worker = hasattr(config, "workerinput")
    path = Path(os.devnull) if is_worker else Path(os.environ["COMPAT_RESULT"])
    config.pluginmanager.register(Results(path))
