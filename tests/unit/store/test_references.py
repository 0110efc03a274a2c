"""What a person means by a path or a step."""

import shutil
from pathlib import Path

import pytest

from tests.unit.store.saving import save, store_with
from unbroken.errors import (
    CheckpointUnknown,
    ManifestDamaged,
    NotAStore,
    NoUsableCheckpoint,
    PathMissing,
    TornCheckpoint,
)
from unbroken.store.directory import Store
from unbroken.store.names import FINAL
from unbroken.store.references import find_store, resolve_checkpoint, resolve_in_store
from unbroken.store.seal import seal

pytestmark = pytest.mark.promise("M5")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with steps 5, 10 and 10 again, a sealed folder of step 7, and ``latest``; we stand beside it."""
    store = store_with(tmp_path / "run" / "checkpoints", 5, 10)
    save(store, 10, at_ns=77_000)
    (store.root / "global_step7").mkdir()
    (store.root / "global_step7" / "model_000007.pt").write_bytes(b"1")
    seal(store, "global_step7", at_ns=1)
    (store.root / "latest").symlink_to("checkpoint-5")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


NAMED = {
    "run@5": "checkpoint-5",
    "run@0005": "checkpoint-5",
    "run@10": "checkpoint-10.2",
    "run@checkpoint-10": "checkpoint-10",
    "run@checkpoint-10.2": "checkpoint-10.2",
    "run@7": "global_step7",
    "run@global_step7": "global_step7",
    "run@latest": "checkpoint-5",
    "run/checkpoints@5": "checkpoint-5",
    "run/checkpoints/checkpoint-5": "checkpoint-5",
    "run/checkpoints/checkpoint-5/": "checkpoint-5",
    "run/checkpoints/checkpoint-5/state": "checkpoint-5",
    "run/checkpoints/checkpoint-5/state/__0_0.distcp": "checkpoint-5",
    "run/checkpoints/checkpoint-5/manifest.json": "checkpoint-5",
    "run/checkpoints/checkpoint-5/state/..": "checkpoint-5",
    "run/checkpoints/checkpoint-5/../checkpoint-10": "checkpoint-10",
    "run/checkpoints/global_step7": "global_step7",
    "run/checkpoints/global_step7/model_000007.pt": "global_step7",
    "run/checkpoints/latest": "checkpoint-5",
    "./run/checkpoints/latest": "checkpoint-5",
}


@pytest.mark.parametrize(("reference", "name"), NAMED.items(), ids=NAMED)
@pytest.mark.parametrize("absolute", [False, True], ids=["relative", "absolute"])
def test_one_checkpoint_can_be_named_in_every_accepted_form(
    run: Path, reference: str, name: str, absolute: bool
) -> None:
    found = resolve_in_store(f"{run.parent}/{reference}" if absolute else reference)
    assert found.name == name
    assert found.path.samefile(run / "checkpoints" / name)
    assert found.store.root.is_absolute() == absolute or ".." in reference


@pytest.mark.parametrize("reference", ["run", "run/", "run/checkpoints", "./run", "run/../run"])
def test_a_run_or_its_store_names_no_checkpoint_and_stands_for_the_newest(run: Path, reference: str) -> None:
    found = resolve_in_store(reference)
    assert found.name is None and found.store.root.samefile(run / "checkpoints")
    assert resolve_checkpoint(reference)[1] == "checkpoint-10.2"


@pytest.mark.parametrize(
    ("inside", "reference", "name"),
    [
        (".", ".", None),
        ("checkpoints", ".", None),
        ("checkpoints", "..", None),
        ("checkpoints/checkpoint-5", ".", "checkpoint-5"),
        ("checkpoints/checkpoint-5/state", "..", "checkpoint-5"),
        ("checkpoints/checkpoint-5/state", ".", "checkpoint-5"),
        ("checkpoints/checkpoint-5", "..", None),
        ("checkpoints/checkpoint-5", "../checkpoint-10", "checkpoint-10"),
    ],
)
def test_dots_mean_where_one_stands(
    run: Path, monkeypatch: pytest.MonkeyPatch, inside: str, reference: str, name: str | None
) -> None:
    monkeypatch.chdir(run / inside)
    found = resolve_in_store(reference)
    assert found.name == name and found.store.root.samefile(run / "checkpoints")


def test_links_to_a_run_are_followed(run: Path) -> None:
    (run.parent / "current").symlink_to("run")
    assert resolve_in_store("current@5").path.samefile(run / "checkpoints" / "checkpoint-5")
    assert resolve_in_store("current/checkpoints/latest").name == "checkpoint-5"
    assert resolve_checkpoint("current")[1] == "checkpoint-10.2"


def test_an_at_sign_in_a_path_is_a_letter(run: Path) -> None:
    run.rename(run.parent / "me@host")
    assert resolve_in_store("me@host@5").name == "checkpoint-5"
    assert resolve_in_store("me@host").name is None
    assert resolve_in_store("me@host/checkpoints/checkpoint-5").name == "checkpoint-5"
    with pytest.raises(PathMissing) as missing:
        resolve_in_store("me@elsewhere/run")
    assert str(missing.value.path) == "me@elsewhere/run"


def test_a_path_that_looks_like_a_reference_is_the_path_if_it_exists(run: Path) -> None:
    store_with(run.parent / "run@5" / "checkpoints", 99)
    assert resolve_checkpoint("run@5")[1] == "checkpoint-99"


@pytest.mark.parametrize("hint", ["missing", "dangling", "outside"])
@pytest.mark.promise("K2")
def test_a_hint_that_is_no_use_falls_back_to_the_newest(run: Path, hint: str) -> None:
    link = run / "checkpoints" / "latest"
    link.unlink()
    if hint != "missing":
        link.symlink_to("checkpoint-99" if hint == "dangling" else "/etc")
    (run / "checkpoints" / "checkpoint-10.2" / "manifest.json").write_bytes(b"ruined")
    assert resolve_in_store("run@latest").name == "checkpoint-10"


MISSING = ["6", "checkpoint-6", "", "-5", "5.0", "²", "1__0", "_5", "9" * 200, "9" * 5000, "../x", "..", "5 "]


@pytest.mark.parametrize("wanted", MISSING, ids=lambda wanted: repr(wanted[:20]))
def test_a_missing_checkpoint_is_never_replaced_by_another(run: Path, wanted: str) -> None:
    with pytest.raises((CheckpointUnknown, PathMissing)):
        resolve_in_store(f"run@{wanted}")


@pytest.mark.promise("M6")
def test_a_named_checkpoint_is_honoured_even_when_it_is_damaged(run: Path) -> None:
    (run / "checkpoints" / "checkpoint-5" / "manifest.json").write_bytes(b"ruined")
    for reference in ("run@5", "run@latest", "run/checkpoints/checkpoint-5"):
        assert resolve_in_store(reference).name == "checkpoint-5"
        with pytest.raises(ManifestDamaged):
            resolve_checkpoint(reference)


@pytest.mark.parametrize("reference", ["nothing", "run/nothing", "nothing@5", "run/checkpoints/checkpoint-6"])
def test_a_path_that_does_not_exist_is_reported(run: Path, reference: str) -> None:
    with pytest.raises(PathMissing):
        resolve_in_store(reference)


def test_an_unsealed_folder_is_reported_with_the_command_that_seals_it(run: Path) -> None:
    (run / "checkpoints" / "checkpoint-77").mkdir()
    (run / "checkpoints" / "checkpoint-77" / "m.pt").write_bytes(b"1")
    for reference in ("run@77", "run@checkpoint-77"):
        with pytest.raises(CheckpointUnknown, check=lambda unknown: unknown.unsealed == "checkpoint-77") as refused:
            resolve_in_store(reference)
        assert refused.value.help()[0].command == "unbroken seal run/checkpoints/checkpoint-77"
    # One of ours whose manifest is lost is damaged: a new seal would hide that.
    (run / "checkpoints" / "checkpoint-77" / "state").mkdir()
    (run / "checkpoints" / "checkpoint-77" / "state" / "index.json").write_text("{}")
    with pytest.raises(CheckpointUnknown, check=lambda unknown: unknown.sealing is None):
        resolve_in_store("run@77")


def test_a_directory_without_any_checkpoint_is_no_store(run: Path) -> None:
    (run.parent / "empty").mkdir()
    (run.parent / "file.txt").write_text("")
    for reference in ("empty", "file.txt"):
        with pytest.raises(NotAStore):
            resolve_in_store(reference)


def test_an_empty_store_is_a_store_and_has_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert find_store(tmp_path / "run").root == tmp_path / "run" / "checkpoints"
    assert find_store(tmp_path / "run" / "checkpoints").root == tmp_path / "run" / "checkpoints"
    with pytest.raises(NoUsableCheckpoint):
        resolve_checkpoint(str(tmp_path / "run"))


def test_checkpoints_that_stand_alone_are_a_store(tmp_path: Path) -> None:
    save(Store(tmp_path / "outputs"), 3, kind=FINAL)
    assert resolve_checkpoint(str(tmp_path / "outputs"))[1] == "final"
    assert resolve_in_store(f"{tmp_path}/outputs@3").name == "final"


@pytest.mark.parametrize("inside", ["", "/manifest.json"])
def test_what_was_never_committed_is_torn_even_with_its_manifest(run: Path, inside: str) -> None:
    draft = run / "checkpoints/.tmp-j0009_x-90-1"
    shutil.copytree(next((run / "checkpoints").glob("checkpoint-*")), draft)
    with pytest.raises(TornCheckpoint):
        resolve_checkpoint(f"{draft}{inside}")


def test_a_run_may_stand_in_a_directory_with_the_name_of_a_draft(run: Path) -> None:
    moved = run.rename(run.with_name(".tmp-a-1-1"))
    assert resolve_in_store(str(moved)).store.root == moved / "checkpoints"
