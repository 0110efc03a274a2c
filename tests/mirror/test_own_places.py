"""Commands about the place of a run's own checkpoints: one that cannot be read, and mirrors of mirrors."""

import time
from pathlib import Path

import pytest

from tests.conftest import Tool
from tests.mirror.made import opened, run_at, saved, uploaded
from unbroken.cli.status import summary_text
from unbroken.errors import BadMirror, PathMissing
from unbroken.gpt.checkpoint import find_model
from unbroken.records.summary import summarize
from unbroken.report.style import Style
from unbroken.store.mirrored import read_run_id, write_direct


def test_status_does_not_say_that_a_run_starts_over_whose_store_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    store = run_at(tmp_path / "run")
    # From before the run was moved: no job resumes from it.
    saved(store, 10)
    write_direct(store, "s3://bucket/run", job="m")
    summary = summarize(store, now_s=time.time())
    assert summary.newest_usable is None and not summary.is_readable
    text = summary_text(summary, Style(color=False))
    assert "step 0" not in text and "0 checkpoints" not in text
    assert "s3://bucket/run" in text


@pytest.mark.parametrize("below", ["", "/checkpoints", "/mirror", "-link/mirror/a"])
def test_a_run_is_not_its_own_mirror(tmp_path: Path, below: str) -> None:
    store = run_at(tmp_path / "run")
    saved(store, 10)
    (tmp_path / "run-link").symlink_to(tmp_path / "run")
    with pytest.raises(BadMirror):
        opened(store, f"file://{tmp_path}/run{below}")
    assert read_run_id(store) is None


def test_a_mirror_is_not_mirrored_and_its_record_is_not_called_damaged(unbroken: Tool, tmp_path: Path) -> None:
    store = run_at(tmp_path / "run")
    name, mirror = saved(store, 10), opened(store, f"file://{tmp_path}/mirror")
    uploaded(store, name, mirror)
    ended = unbroken("mirror", str(tmp_path / "mirror"), "--to", f"file://{tmp_path}/other")
    assert ended.returncode == 2 and ended.stderr.startswith("error[")
    assert "damaged" not in ended.stderr


def test_fetch_says_where_a_run_without_local_checkpoints_has_them(
    unbroken: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    store = run_at(tmp_path / "run")
    write_direct(store, "s3://bucket/run", job="m")
    ended = unbroken("fetch", str(tmp_path / "run"))
    assert ended.returncode == 2 and "s3://bucket/run" in ended.stderr


@pytest.mark.parametrize("step", ["", "@10"])
def test_the_config_of_a_model_is_read_beside_the_records_of_its_run(tmp_path: Path, step: str) -> None:
    saved(run_at(tmp_path / "elsewhere" / "run"), 10)
    run = tmp_path / "run"
    write_direct(run_at(run), f"file://{tmp_path}/elsewhere/run", job="m")
    with pytest.raises(PathMissing) as missing:
        find_model(f"{run}{step}")
    assert missing.value.path == run / "config.json"
