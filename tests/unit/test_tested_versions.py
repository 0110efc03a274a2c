"""A torch that was not tested is named in one line, once."""

import logging
import platform
import tomllib
from pathlib import Path

import pytest
import torch

from tests.unit.state.tiny import job, tiny
from unbroken import tested_versions
from unbroken.tested_versions import (
    TESTED_PYTHON,
    TESTED_TORCH,
    minor_version,
    say_if_untested,
    untested_python,
    untested_torch,
)


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu", "2.6.1+cu124", "2.10.0a0+git12", "2.13.0.dev20260401"])
def test_a_tested_version_is_not_named_whatever_its_build(version: str) -> None:
    assert untested_torch(version) is None


@pytest.mark.parametrize("version", ["2.5.1", "2.16.0", "3.0.0", "2.1", "2.100.0"])
def test_an_older_or_newer_version_is_named_with_those_that_were_tested(version: str) -> None:
    said = untested_torch(version)
    assert said is not None
    assert f"torch {version} " in said and ", ".join(TESTED_TORCH) in said


@pytest.mark.parametrize(
    ("version", "is_tested"), [("3.11.0", True), ("3.14.2", True), ("3.10.9", False), ("3.15.0a1", False)]
)
def test_a_python_that_was_not_tested_is_named(version: str, is_tested: bool) -> None:
    said = untested_python(version)
    assert (said is None) == is_tested
    assert said is None or (f"Python {version} " in said and ", ".join(TESTED_PYTHON) in said)


def test_the_versions_are_in_order_and_this_one_was_tested() -> None:
    assert list(TESTED_TORCH) == sorted(TESTED_TORCH, key=lambda each: tuple(map(int, each.split("."))))
    assert minor_version(torch.__version__) in TESTED_TORCH
    assert list(TESTED_PYTHON) == sorted(TESTED_PYTHON, key=lambda each: tuple(map(int, each.split("."))))
    assert minor_version(platform.python_version()) in TESTED_PYTHON


def test_installing_replaces_no_torch_and_no_python_that_was_tested() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f"torch>={TESTED_TORCH[0]}" in project["optional-dependencies"]["train"]
    assert project["requires-python"] == f">={TESTED_PYTHON[0]}"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_run_names_an_untested_torch_and_python_once_on_the_first_rank(
    rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tested_versions, "TESTED_TORCH", ("1.0",))
    monkeypatch.setattr(tested_versions, "TESTED_PYTHON", ("2.7",))
    monkeypatch.setenv("RANK", rank)
    say_if_untested.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            for steps in (1, 2):
                job(tmp_path, steps, **tiny())
        for tested in ("1.0", "2.7"):
            said = f"was not tested with unbroken (tested: {tested})"
            assert caplog.text.count(said) == (1 if rank == "0" else 0)
    finally:
        say_if_untested.cache_clear()
