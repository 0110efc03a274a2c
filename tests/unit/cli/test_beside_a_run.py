"""The store's commands while a run is at work, which removes checkpoints that were listed a moment ago."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.store.saving import store_with
from unbroken.cli import verify as verify_command
from unbroken.cli.main import main
from unbroken.mirror import bring_back
from unbroken.mirror.fetch import fetch_checkpoint
from unbroken.store.check import verify
from unbroken.store.sweep import plan_sweep


def first_remove(directory: Path, then: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:  # noqa: ANN401 -- whatever the wrapped function takes and gives
        shutil.rmtree(directory, ignore_errors=True)
        return then(*args, **options)

    return call


@pytest.mark.promise("X6")
def test_verify_tells_removed_from_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = store_with(tmp_path / "run", 1, 2)
    old = first_remove(store.path("checkpoint-1"), verify)
    monkeypatch.setattr(verify_command, "verify", old)
    assert main(["verify", str(tmp_path / "run"), "--full"]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["ok", "checkpoint-2"],
        ["removed", "checkpoint-1"],
    ]
    monkeypatch.setattr(verify_command, "verify", first_remove(store.path("checkpoint-2"), old))
    assert main(["verify", str(tmp_path / "run"), "--full"]) == 5


@pytest.mark.promise("M9")
def test_fetch_takes_a_newer_checkpoint_where_its_own_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = store_with(tmp_path / "mirror", 1, 2)
    gone = first_remove(mirror.path("checkpoint-2"), fetch_checkpoint)
    monkeypatch.setattr(bring_back, "fetch_checkpoint", gone)
    assert main(["fetch", (tmp_path / "mirror").as_uri(), str(tmp_path / "run")]) == 0
    assert {path.name for path in (tmp_path / "run").rglob("checkpoint-*")} == {"checkpoint-1"}


@pytest.mark.promise("X6")
def test_a_sweep_leaves_what_another_has_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_with(tmp_path / "run", 1, 2)
    monkeypatch.setattr(type(store), "read_outline", first_remove(store.path("checkpoint-1"), type(store).read_outline))
    plan = plan_sweep(store, ["checkpoint-1"], is_live=lambda _: False)
    assert not plan.checkpoints and [name for name, _ in plan.left] == ["checkpoint-1"]
