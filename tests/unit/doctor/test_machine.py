"""Findings about torch, GPUs, gloo and exactness, from reports of machines that this one is not."""

import pytest

from unbroken.doctor.finding import Severity
from unbroken.doctor.machine import examine_python, torch_findings
from unbroken.doctor.self_test_process import Combination, SelfTestReport

GPU = {"name": "NVIDIA H200", "capability": "9.0", "memory_bytes": 150 * 10**9, "copy_bytes_per_s": 25e9}
TORCH = {"version": "2.13.0", "build": "abc", "cuda": "13.0", "hip": None, "gpus": [GPU]}
EXACT = Combination("replicated", "float32", "exact")


def found(
    *combinations: Combination, driver: str | None = "570.1", gloo: tuple[str, ...] = (), **torch: object
) -> list[tuple[str, str, str | None]]:
    machine = {"torch": {**TORCH, **torch}, "torch_error": None, "gloo_errors": list(gloo)}
    report = SelfTestReport({"device": "cuda", "gpu": "NVIDIA H200"}, combinations or (EXACT,), machine)
    return [(each.subject, each.level.value, each.kind) for each in torch_findings(report, driver)]


def test_a_machine_with_gpus_has_a_finding_for_each() -> None:
    subjects = ["torch", "gpu 0", "gpu 1", "gloo", "exact"]
    assert found(gpus=[GPU, GPU]) == [(subject, "ok", None) for subject in subjects]


def test_an_untested_torch_is_noted() -> None:
    assert found(version="2.99.0+cpu")[:2] == [("torch", "ok", None), ("torch", "note", "torch-untested")]


def test_an_untested_python_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [(each.level.value, each.kind) for each in examine_python()] == [("ok", None)]
    monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
    assert [(each.level.value, each.kind) for each in examine_python()] == [("ok", None), ("note", "python-untested")]


@pytest.mark.parametrize(
    ("cuda", "driver", "kind"),
    [
        ("13.0", "570.1", "gpu-missing"),
        ("13.0", None, "gpu-missing"),
        (None, "570.1", "gpu-missing"),
        (None, None, None),
    ],
)
def test_a_gpu_that_torch_does_not_find_is_noted(cuda: str | None, driver: str | None, kind: str | None) -> None:
    assert found(gpus=[], cuda=cuda, driver=driver)[1] == ("gpu", "note" if kind else "ok", kind)


def test_gloo_that_does_not_connect_is_a_problem_and_exactness_is_still_reported() -> None:
    assert found(gloo=("RuntimeError: Unable to resolve hostname",))[2:] == [
        ("gloo", "problem", "gloo-unreachable"),
        ("exact", "ok", None),
    ]


@pytest.mark.promise("X1")
def test_each_verdict_is_a_finding_of_its_own() -> None:
    several = [
        Combination("replicated", "float32", "exact"),
        Combination("sharded", "float32", "not-exact", ("on 2 ranks",)),
        Combination("sharded", "bfloat16", "not-tested", ("late",)),
        Combination("sharded", "float16", "not-available", ("on 1 rank: no: float16", "on 2 ranks: no: float16")),
    ]
    assert found(*several)[3:] == [
        ("exact", "problem", "not-exact-here"),
        ("exact", "problem", "self-test-unfinished"),
        ("exact", "note", "self-test-unfinished"),
    ]
    report = SelfTestReport({"device": "cpu"}, tuple(several), {"torch": TORCH})
    exact = [each for each in torch_findings(report, None) if each.subject == "exact"]
    assert exact[0].level is Severity.PROBLEM and exact[0].details == ("sharded float32: on 2 ranks",)
    assert [each.details for each in exact[1:]] == [("late",), ("no: float16",)]


def test_a_torch_that_crashes_is_a_problem() -> None:
    report = SelfTestReport({"device": "cpu"}, (EXACT,), {"torch": None, "torch_error": "it ended with SIGSEGV"})
    assert [(each.kind, each.text) for each in torch_findings(report, None)] == [
        ("torch-broken", "it ended with SIGSEGV")
    ]
