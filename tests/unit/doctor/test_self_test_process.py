"""The self-test's process answers or says why not; its results are kept, and only true ones are used."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from unbroken.doctor.self_test_process import (
    Combination,
    NoReport,
    SelfTestReport,
    cache_folder,
    find_kept,
    is_switched_off,
    keep,
    listed,
    run_self_test,
)

KEY = {"torch": "2.13.0", "device": "cpu"}
REPORT = SelfTestReport(
    KEY, (Combination("replicated", "float32", "exact"), Combination("sharded", "bfloat16", "not-exact", ("x",)))
)


def test_a_result_is_found_for_its_own_key_and_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert find_kept(KEY, folder) is None
    assert keep(REPORT, folder)
    assert find_kept(KEY, folder) == REPORT
    for other in ({**KEY, "torch": "2.14.0"}, {**KEY, "gpu": "H200"}, {"torch": "2.13.0"}):
        assert find_kept(other, folder) is None
    assert [path.suffix for path in folder.iterdir()] == [".json"]


def test_a_result_under_the_name_of_another_is_not_used(tmp_path: Path) -> None:
    other = {**KEY, "torch": "2.14.0"}
    assert keep(REPORT, tmp_path)
    [path] = tmp_path.iterdir()
    assert keep(replace(REPORT, key=other), tmp_path)
    [renamed] = set(tmp_path.iterdir()) - {path}
    path.replace(renamed)
    assert find_kept(other, tmp_path) is None


def test_a_damaged_result_counts_as_none_and_is_replaced(tmp_path: Path) -> None:
    assert keep(REPORT, tmp_path)
    [path] = tmp_path.iterdir()
    whole = path.read_bytes()
    damaged = [b"", b"\n", b"{}", whole[:-10], whole[1:], whole.replace(b"not-exact", b"exact"), b"\xff" * 100]
    damaged += [whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :] for place in range(0, len(whole) - 1, 7)]
    for data in damaged:
        path.write_bytes(data)
        assert find_kept(KEY, tmp_path) is None, data
    path.unlink()
    path.mkdir()
    assert find_kept(KEY, tmp_path) is None
    assert not keep(REPORT, tmp_path)
    path.rmdir()
    assert keep(REPORT, tmp_path) and find_kept(KEY, tmp_path) == REPORT


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert not keep(REPORT, tmp_path / "file" / "folder")
    assert find_kept(KEY, tmp_path / "file" / "folder") is None
    assert not keep(REPORT, None) and find_kept(KEY, None) is None


def test_what_was_not_tested_is_not_kept(tmp_path: Path) -> None:
    assert not keep(replace(REPORT, combinations=(Combination("sharded", "float16", "not-tested", ("x",)),)), tmp_path)
    assert keep(replace(REPORT, combinations=(Combination("sharded", "float16", "not-available", ("x",)),)), tmp_path)


def test_the_folder_is_that_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/unbroken/self-test")
    monkeypatch.setenv("HOME", "/home/a")
    for given in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert cache_folder(given) == Path("/home/a/.cache/unbroken/self-test")


def test_the_switch() -> None:
    assert [is_switched_off({"UNBROKEN_SELF_TEST": word}) for word in ("off", "0", "OFF")] == [True] * 3
    assert [is_switched_off(given) for given in ({}, {"UNBROKEN_SELF_TEST": "on"})] == [False] * 2


def test_combinations_are_listed_by_layout() -> None:
    both = [
        Combination(layout, dtype, "exact") for dtype in ("float32", "float16") for layout in ("replicated", "sharded")
    ]
    assert listed(both) == "replicated and sharded (float32, float16)"
    assert listed(both[:3]) == "replicated (float32, float16); sharded (float32)"


def test_a_missing_report_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoReport, match="did not end within 0 s"):
        run_self_test("cpu", limit_s=0.01)
    fake = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(NoReport, match="could not be started: No such file"):
        run_self_test("cpu")
    for script, reason in {
        "kill -SEGV $$": "ended by SIGSEGV",
        "echo first >&2; echo 'ImportError: no libcudart' >&2; exit 1": "^ImportError: no libcudart$",
        "exit 7": "exit code 7",
        "echo hello": "not understood",
        'echo \'{"key": {}, "combinations": []}\'': "not understood",
    }.items():
        fake.write_text(f"#!/bin/sh\n{script}\n")
        fake.chmod(0o755)
        with pytest.raises(NoReport, match=reason):
            run_self_test("cpu")
