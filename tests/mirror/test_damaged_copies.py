"""A damaged copy in a mirror is skipped: by a resume, by a repair and by ``unbroken fetch``, and each says so."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tool
from tests.mirror.made import SMALL, opened, run_at, saved, uploaded
from tests.unit.state.tiny import bits, job, quietly, tiny
from unbroken import Run
from unbroken.errors import NoUsableCheckpoint
from unbroken.mirror.background import pending
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.store.check import Level, verify
from unbroken.store.mirrored import read_mirrors, write_mirrors
from unbroken.store.scan import scan


def flip(checkpoint: Path) -> None:
    """Change one byte of the largest part."""
    part = max((path for path in checkpoint.rglob("*") if path.name != "manifest.json"), key=lambda p: p.stat().st_size)
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)


def asked(unbroken: Tool, *arguments: str, code: int = 0) -> dict[str, Any]:
    ended = unbroken(*arguments, "--json")
    assert ended.returncode == code, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def skipped(run: Path) -> list[tuple[str, str]]:
    return [(event.text("name"), event.text("mirror")) for event in read_history(Layout(run)).of_kind("mirror-skipped")]


@pytest.fixture
def mirrors(tmp_path: Path) -> tuple[str, str]:
    for name in ("m", "n"):
        (tmp_path / name).mkdir()
    return f"file://{tmp_path}/m/a", f"file://{tmp_path}/n/a"


def resumes_at(run: Path, mirror: str, step: int) -> None:
    again = tiny(seed=7)
    with Run(run, settings=quietly(mirror=mirror), **again) as resumed:
        assert resumed.step == step
    whole = tiny()
    job(run.parent / "whole", step, **whole)
    assert bits(again["model"]) == bits(whole["model"])


@pytest.mark.promise("C4", "M26")
def test_with_the_newest_copy_damaged_a_wiped_run_resumes_from_the_one_before(
    mirrors: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, mirror = tmp_path / "a", mirrors[0]
    job(run, 6, quietly(mirror=mirror), **tiny())
    flip(tmp_path / "m/a/checkpoints/final")
    shutil.rmtree(run)
    with caplog.at_level(logging.WARNING, logger="unbroken"):
        resumes_at(run, mirror, 4)
    assert skipped(run) == [("final", mirror)]
    assert "final" in caplog.text and mirror in caplog.text
    assert not scan(run_at(run)).torn


@pytest.mark.promise("M26")
def test_the_same_checkpoint_is_taken_from_a_second_mirror_before_an_older_one(
    mirrors: tuple[str, str], tmp_path: Path
) -> None:
    run, both = tmp_path / "a", ", ".join(mirrors)
    job(run, 6, quietly(mirror=both), **tiny())
    flip(tmp_path / "m/a/checkpoints/final")
    shutil.rmtree(run)
    resumes_at(run, both, 6)
    assert skipped(run) == [("final", mirrors[0])]
    # The damaged copy is none: it was uploaded again.
    assert not pending(run_at(run), mirrors[0])
    assert all(verify(run_at(tmp_path / name / "a"), "final", Level.FULL).is_sound for name in ("m", "n"))


def test_a_good_local_checkpoint_is_resumed_from_where_the_newer_copy_is_damaged(
    mirrors: tuple[str, str], tmp_path: Path
) -> None:
    run, mirror = tmp_path / "a", mirrors[0]
    job(run, 6, quietly(mirror=mirror), **tiny())
    flip(tmp_path / "m/a/checkpoints/final")
    shutil.rmtree(run / "checkpoints" / "final")
    resumes_at(run, mirror, 4)
    assert skipped(run) == [("final", mirror)]


def test_a_damaged_local_checkpoint_is_repaired_from_the_second_mirror_if_the_first_is_damaged_too(
    mirrors: tuple[str, str], tmp_path: Path
) -> None:
    run, both = tmp_path / "a", ", ".join(mirrors)
    job(run, 6, quietly(mirror=both), **tiny())
    for place in (run, tmp_path / "m/a"):
        flip(place / "checkpoints" / "final")
    resumes_at(run, both, 6)
    assert skipped(run) == [("final", mirrors[0])]
    assert not scan(run_at(run)).quarantined
    # The first mirror has it again.
    assert not pending(run_at(run), mirrors[0])
    assert verify(run_at(tmp_path / "m/a"), "final", Level.FULL).is_sound


@pytest.mark.promise("M26")
def test_where_no_copy_can_be_repaired_a_resume_takes_the_newest_that_a_mirror_has(
    mirrors: tuple[str, str], tmp_path: Path
) -> None:
    run, mirror = tmp_path / "a", mirrors[0]
    job(run, 6, quietly(mirror=mirror, keep_last_k=1), **tiny())
    assert scan(run_at(run)).committed == ("final",)
    for place in (run, tmp_path / "m/a"):
        flip(place / "checkpoints" / "final")
    resumes_at(run, mirror, 4)


@pytest.mark.promise("C4")
def test_a_run_never_starts_over_because_all_copies_are_damaged(mirrors: tuple[str, str], tmp_path: Path) -> None:
    run, mirror = tmp_path / "a", mirrors[0]
    job(run, 4, quietly(mirror=mirror), **tiny())
    for name in ("checkpoint-2", "final"):
        flip(tmp_path / "m/a/checkpoints" / name)
    shutil.rmtree(run)
    with pytest.raises(NoUsableCheckpoint) as refused:
        job(run, 4, quietly(mirror=mirror), **tiny())
    assert [name for name, _ in refused.value.skipped] == [f"final in {mirror}", f"checkpoint-2 in {mirror}"]


def test_fetch_takes_the_next_older_copy_and_names_what_is_damaged(
    unbroken: Tool, mirrors: tuple[str, str], tmp_path: Path
) -> None:
    store, mirror = run_at(tmp_path / "a"), mirrors[0]
    for step in (10, 20, 30):
        saved(store, step)
    asked(unbroken, "mirror", "a", "--to", mirror)
    flip(tmp_path / "m/a/checkpoints/checkpoint-30")
    fetched = unbroken("fetch", mirror, "b")
    assert fetched.returncode == 0 and "checkpoint-30" in fetched.stderr and "checkpoint-20" in fetched.stdout
    assert scan(run_at(tmp_path / "b")).committed == ("checkpoint-20",)
    incomplete = asked(unbroken, "fetch", mirror, "c", "--all", code=3)
    assert incomplete["kind"] == "fetch-incomplete" and "checkpoint-30" in json.dumps(incomplete)
    assert scan(run_at(tmp_path / "c")).committed == ("checkpoint-10", "checkpoint-20")
    # What was named is fetched or is an error.
    assert asked(unbroken, "fetch", f"{mirror}@30", "d", code=3)["kind"] == "damaged-checkpoint"


def test_fetch_repairs_a_run_from_whichever_mirror_is_whole(
    unbroken: Tool, mirrors: tuple[str, str], tmp_path: Path
) -> None:
    store = run_at(tmp_path / "a")
    name = saved(store, 10)
    asked(unbroken, "mirror", "a", "--to", ",".join(mirrors))
    for place in ("a", "m/a"):
        flip(tmp_path / place / "checkpoints" / name)
    [planned] = asked(unbroken, "fetch", "a", "--dry-run")["checkpoints"]
    [row] = asked(unbroken, "fetch", "a")["checkpoints"]
    assert (row["mirror"], row["parts"], row["is_new"]) == (mirrors[1], 1, False)
    assert (planned["name"], planned["parts"], planned["bytes"]) == (row["name"], row["parts"], row["bytes"])
    assert verify(store, name, Level.FULL).is_sound


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["real", "dry"])
def test_fetch_names_damage_that_no_mirror_can_repair(
    unbroken: Tool, mirrors: tuple[str, str], tmp_path: Path, dry: tuple[str, ...]
) -> None:
    store, mirror = run_at(tmp_path / "a"), mirrors[0]
    saved(store, 10)
    asked(unbroken, "mirror", "a", "--to", mirror)
    saved(store, 20)
    flip(store.path("checkpoint-20"))
    left = asked(unbroken, "fetch", "a", *dry, code=3)
    assert left["kind"] == "fetch-incomplete" and "checkpoint-20" in json.dumps(left)
    assert asked(unbroken, "fetch", "a@20", *dry, code=3)["kind"] == "fetch-incomplete"
    assert asked(unbroken, "fetch", "a@10", *dry)["checkpoints"][0]["parts"] == 0


@pytest.mark.parametrize("how", ["damaged", "lost"])
def test_an_older_checkpoint_whose_manifest_is_damaged_is_fetched_anew(
    unbroken: Tool, mirrors: tuple[str, str], tmp_path: Path, how: str
) -> None:
    store, mirror = run_at(tmp_path / "a"), mirrors[0]
    job(tmp_path / "a", 6, **tiny())
    asked(unbroken, "mirror", "a", "--to", mirror)
    manifest = store.path("checkpoint-2") / "manifest.json"
    manifest.write_bytes(b"{}" + manifest.read_bytes()[2:]) if how == "damaged" else manifest.unlink()
    for dry in (["--dry-run"], []):
        [row] = asked(unbroken, "fetch", "a", *dry)["checkpoints"]
        assert (row["name"], row["is_new"]) == ("checkpoint-2", True)
    assert verify(store, "checkpoint-2", Level.FULL).is_sound
    # Set aside, never deleted.
    assert len(scan(store).quarantined) == 1
    # And where no mirror has it, it is named.
    manifest.write_bytes(b"{}")
    shutil.rmtree(tmp_path / "m/a/checkpoints/checkpoint-2")
    assert "checkpoint-2" in json.dumps(asked(unbroken, "fetch", "a", code=3))


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["real", "dry"])
def test_fetch_of_an_unknown_step_or_from_a_mirror_that_is_away_is_an_error(
    unbroken: Tool, mirrors: tuple[str, str], tmp_path: Path, dry: tuple[str, ...]
) -> None:
    saved(run_at(tmp_path / "a"), 10)
    asked(unbroken, "mirror", "a", "--to", mirrors[0])
    assert asked(unbroken, "fetch", "a@999", *dry, code=2)["kind"] == "checkpoint-unknown"
    (tmp_path / "m/a").rename(tmp_path / "m/moved")
    for reference in ("a", "a@999"):
        assert asked(unbroken, "fetch", reference, *dry, code=74)["kind"] == "mirror-missing"
    assert not (tmp_path / "m/a").exists()


def test_a_dry_fetch_predicts_what_a_fetch_does_and_writes_nothing(
    unbroken: Tool, mirrors: tuple[str, str], tmp_path: Path
) -> None:
    store, mirror = run_at(tmp_path / "a"), mirrors[0]
    for step in (10, 20):
        saved(store, step)
    asked(unbroken, "mirror", "a", "--to", mirror)
    store.files.remove_tree(store.path("checkpoint-20"))

    def files() -> list[Path]:
        return sorted(path for path in tmp_path.rglob("*") if path.is_file())

    for arguments in (("a",), ("a@20",), (mirror, "a"), (mirror, "b"), (mirror, "b", "--all"), (f"{mirror}@10", "a")):
        before = files()
        planned = asked(unbroken, "fetch", *arguments, "--dry-run")["checkpoints"]
        assert files() == before
        assert asked(unbroken, "fetch", *arguments)["checkpoints"] == planned
        store.files.remove_tree(store.path("checkpoint-20")) if arguments[-1] in ("a", "a@20") else None


def test_a_dry_run_refuses_the_mirror_of_another_run_as_the_command_does(
    unbroken: Tool, mirrors: tuple[str, str], tmp_path: Path
) -> None:
    for name in ("a", "b"):
        saved(run_at(tmp_path / name), 10, SMALL, job=name)
    asked(unbroken, "mirror", "a", "--to", mirrors[0])
    for dry in (["--dry-run"], []):
        assert asked(unbroken, "mirror", "b", "--to", mirrors[0], *dry, code=2)["kind"] == "mirror-taken"
        assert asked(unbroken, "fetch", mirrors[0], "b", *dry, code=2)["kind"] == "mirror-taken"
    # Nothing is made by looking.
    asked(unbroken, "mirror", "b", "--to", mirrors[1], "--dry-run")
    assert not (tmp_path / "n/a").exists() and not read_mirrors(run_at(tmp_path / "b"))


def test_a_dry_run_counts_what_was_removed_from_the_mirror_as_pending(
    unbroken: Tool, mirrors: tuple[str, str], tmp_path: Path
) -> None:
    store = run_at(tmp_path / "a")
    mirror = opened(store, mirrors[0])
    write_mirrors(store, [mirrors[0]], job="m")
    for step in (10, 20):
        uploaded(store, saved(store, step), mirror)
    asked(unbroken, "prune", mirrors[0], "--keep-last-k", "1")
    for word, dry in (("pending", ["--dry-run"]), ("mirrored", [])):
        [found] = asked(unbroken, "mirror", "a", *dry)["mirrors"]
        assert (found[word], found["already_mirrored"]) == (["checkpoint-10"], 1)
