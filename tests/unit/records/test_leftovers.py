"""Scratch files that crashes leave in a run: those of dead jobs go, all else stays."""

import os
from pathlib import Path

import pytest

from unbroken.records.layout import Layout
from unbroken.records.lease import Holder, acquire, release
from unbroken.records.leftovers import left_scratch, sweep_scratch
from unbroken.store.names import scratch

pytestmark = pytest.mark.promise("U17")

NOW_S = 1_700_000_000.0
DAY_S = 86_400.0


def _file(path: Path, *, age_s: float = 0.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("half")
    os.utime(path, (NOW_S - age_s, NOW_S - age_s))
    return path


def test_scratch_of_dead_jobs_goes_and_that_of_the_living_and_of_users_stays(tmp_path: Path) -> None:
    folders = (tmp_path, tmp_path / ".lease", tmp_path / "emergency", tmp_path / "tokenizer")
    dead = [_file(folder / scratch("j0002_ab", "state")) for folder in folders]
    dead += [
        _file(tmp_path / ".scratch-j0001_ab-state"),
        _file(tmp_path / scratch("stop_7", "request"), age_s=2 * DAY_S),
    ]
    kept = [
        _file(tmp_path / scratch("j0003_ab", "state")),
        _file(tmp_path / scratch("j0004_ab", "state"), age_s=2 * DAY_S),
        _file(tmp_path / scratch("stop_8", "request"), age_s=60),
        _file(tmp_path / ".scratch-mine", age_s=9 * DAY_S),
        _file(tmp_path / ".scratch-stop-7", age_s=9 * DAY_S),
        _file(tmp_path / "mine" / scratch("j0001_ab", "state")),
    ]
    (tmp_path / scratch("j0001_ab", "folder")).mkdir()
    left = left_scratch(Layout(tmp_path), is_live=lambda job: job[:5] >= "j0003", now_s=NOW_S)
    assert sorted(left) == sorted(dead)
    sweep_scratch(Layout(tmp_path), holder=3, now_s=NOW_S)
    assert not [path for path in dead if path.exists()]
    assert all(path.exists() for path in kept) and (tmp_path / scratch("j0001_ab", "folder")).is_dir()


def test_a_directory_that_cannot_be_listed_keeps_no_job_from_starting(tmp_path: Path) -> None:
    (tmp_path / "emergency").write_text("a file")
    sweep_scratch(Layout(tmp_path), holder=1, now_s=NOW_S, further=[tmp_path / "nowhere"])
    sweep_scratch(Layout(tmp_path / "gone"), holder=1, now_s=NOW_S)


def test_a_new_holder_removes_what_dead_contenders_left_beside_its_lease(tmp_path: Path) -> None:
    holder = Holder("h", 1, "x")
    first = acquire(tmp_path, holder, token="a", now_s=NOW_S)
    release(tmp_path, first, now_s=NOW_S)
    left = _file(tmp_path / ".lease" / scratch("j0001_b", "lease"))
    rival = _file(tmp_path / ".lease" / scratch("j0002_c", "lease"))
    mine = _file(tmp_path / ".lease" / ".scratch-notes")
    acquire(tmp_path, holder, token="d", now_s=NOW_S)
    assert (left.exists(), rival.exists(), mine.exists()) == (False, True, True)
