"""``mirror`` and ``fetch``, and the commands that take an address, as processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tool
from tests.mirror.made import SMALL, client_of, run_at, saved
from tests.unit.state.tiny import job, quietly, tiny
from unbroken.mirror.remote import store_at
from unbroken.store.directory import Store
from unbroken.store.mirrored import mirrored_ids
from unbroken.store.scan import scan
from unbroken.store.seal import seal


def asked(unbroken: Tool, *arguments: str, code: int = 0) -> dict[str, Any]:
    ended = unbroken(*arguments, "--json")
    assert ended.returncode == code, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.mark.promise("M8", "M26")
def test_a_run_is_mirrored_listed_verified_compared_fetched_repaired_and_pruned(
    unbroken: Tool, anywhere: str, tmp_path: Path
) -> None:
    store, mirror = run_at(tmp_path / "run"), anywhere
    for step in (10, 20):
        saved(store, step)
    assert asked(unbroken, "mirror", "run", code=2)["kind"] == "not-mirrored"
    assert asked(unbroken, "mirror", "run", "--to", mirror, "--dry-run")["dry_run"]
    [done] = asked(unbroken, "mirror", "run", "--to", mirror)["mirrors"]
    assert sorted(done["mirrored"]) == ["checkpoint-10", "checkpoint-20"]
    [again] = asked(unbroken, "mirror", "run")["mirrors"]
    assert again["already_mirrored"] == 2 and again["pending"] == []
    [lag] = asked(unbroken, "status", "run")["mirrors"]
    assert lag["pending"] == [] and lag["newest_step"] == 20
    listed = asked(unbroken, "ls", mirror)["entries"]
    assert [entry["state"] for entry in listed] == ["committed", "committed"]
    assert asked(unbroken, "verify", mirror, "--full")["is_sound"]
    assert asked(unbroken, "show", f"{mirror}@10")["step"] == 10
    assert asked(unbroken, "diff", "run@20", f"{mirror}@20")["is_same"]
    [part] = asked(unbroken, "fetch", f"{mirror}@10", "other")["checkpoints"]
    assert part["is_new"] and asked(unbroken, "verify", "other", "--full")["is_sound"]
    (store.path("checkpoint-20") / "state/a").write_bytes(b"rot")
    assert asked(unbroken, "verify", "run", code=3)
    [repaired] = asked(unbroken, "fetch", "run")["checkpoints"]
    assert (repaired["name"], repaired["parts"], repaired["is_new"]) == ("checkpoint-20", 1, False)
    assert asked(unbroken, "verify", "run", "--full")["is_sound"]
    # An unfinished upload may be that of a running job.
    assert asked(unbroken, "prune", mirror, "--include-torn", code=2)["kind"] == "bad-usage"
    kept = asked(unbroken, "prune", mirror, "--keep-last-k", "1")
    assert kept["removed"] == ["checkpoint-10"]
    assert len(asked(unbroken, "ls", mirror)["entries"]) == 1


@pytest.mark.promise("X6")
def test_sealed_checkpoints_of_another_tool_are_mirrored_and_fetched(
    unbroken: Tool, mirror: str, tmp_path: Path
) -> None:
    for step in (100, 200):
        folder = tmp_path / "out" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "model.bin").write_bytes(b"weights" * step)
        seal(Store(tmp_path / "out"), folder.name, at_ns=step)
    assert asked(unbroken, "mirror", "out", "--to", mirror)
    fetched = asked(unbroken, "fetch", mirror, "back", "--all")["checkpoints"]
    assert len(fetched) == 2
    for step in (100, 200):
        assert (tmp_path / f"back/checkpoint-{step}/model.bin").read_bytes() == b"weights" * step
    assert asked(unbroken, "verify", "back", "--full")["is_sound"]


@pytest.mark.promise("M9", "C17")
def test_prune_keeps_what_a_mirror_lacks_and_says_so(unbroken: Tool, mirror: str, tmp_path: Path) -> None:
    store = run_at(tmp_path / "run")
    saved(store, 10)
    asked(unbroken, "mirror", "run", "--to", mirror)
    for step in (20, 30):
        saved(store, step)
    pruned = asked(unbroken, "prune", "run", "--keep-last-k", "1")
    assert pruned["removed"] == ["checkpoint-10"]
    assert pruned["kept"]["checkpoint-20"] == ["not yet mirrored"]
    asked(unbroken, "mirror", "run", "--forget", mirror)
    assert asked(unbroken, "prune", "run", "--keep-last-k", "1")["removed"] == ["checkpoint-20"]


@pytest.mark.promise("C4", "M9", "C17")
@pytest.mark.parametrize("lost", ["a checkpoint", "the record", "all"])
def test_prune_keeps_what_a_mirror_is_recorded_to_hold_and_lacks(
    unbroken: Tool, mirror: str, tmp_path: Path, lost: str
) -> None:
    store = run_at(tmp_path / "run")
    for step in (10, 20, 30):
        saved(store, step)
    asked(unbroken, "mirror", "run", "--to", mirror)
    client = client_of(store, mirror)
    keys = [found.key for found in client.listing("")]
    gone = {"a checkpoint": "checkpoint-10/", "the record": ".mirror/run.json", "all": ""}[lost]
    client.delete([key for key in keys if key.startswith(gone)])
    kept = {"checkpoint-10"} if lost == "a checkpoint" else {"checkpoint-10", "checkpoint-20"}
    for dry in (("--dry-run",), ()):
        pruned = asked(unbroken, "prune", "run", "--keep-last-k", "1", *dry)
        assert {each["name"] for each in pruned["not_removed"]} == kept
        assert all(mirror in each["reason"] for each in pruned["not_removed"])
        assert set(pruned["removed"]) == {"checkpoint-10", "checkpoint-20"} - kept
    assert set(scan(store).committed) == kept | {"checkpoint-30"}


def test_a_local_checkpoint_with_a_missing_file_does_not_keep_older_ones_from_being_mirrored(
    unbroken: Tool, mirror: str, tmp_path: Path
) -> None:
    store = run_at(tmp_path / "run")
    for step in (10, 20, 30):
        saved(store, step)
    (store.path("checkpoint-20") / "state/a").unlink()
    ended = asked(unbroken, "mirror", "run", "--to", mirror, code=74)
    said = json.dumps(ended)
    assert f"checkpoint-20 to {mirror}: state/a: it is missing" in said and f"unbroken fetch {tmp_path}/run" in said
    assert {"checkpoint-10", "checkpoint-30"} == set(scan(store_at(client_of(store, mirror))).committed)


@pytest.mark.promise("M4")
def test_a_fetch_replaces_another_checkpoint_of_the_same_name_only_on_request(
    unbroken: Tool, mirror: str, tmp_path: Path
) -> None:
    store = run_at(tmp_path / "run")
    saved(store, 10)
    asked(unbroken, "mirror", "run", "--to", mirror)
    asked(unbroken, "fetch", mirror, "other")
    stale = run_at(tmp_path / "other")
    stale.files.remove_tree(stale.path("checkpoint-10"))
    saved(stale, 10, job="b")
    assert asked(unbroken, "fetch", mirror, "other", code=2)["kind"] == "would-overwrite"
    assert stale.read_manifest("checkpoint-10").job == "b"
    asked(unbroken, "fetch", mirror, "other", "--refresh")
    assert stale.read_manifest("checkpoint-10").job == "a"
    assert asked(unbroken, "verify", "other@10", "--full")["is_sound"]


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("ls", "ftp://host/a"), "bad-mirror"),
        (("ls", "s3://key:secret@bucket/a"), "bad-mirror"),
        (("mirror", "run", "--to", "shared/mirror"), "bad-mirror"),
        (("fetch", "s3://bucket/a"), "bad-usage"),
        (("fetch", "run", "other"), "bad-usage"),
        (("fetch", "file:///nowhere/a", "s3://bucket/b"), "bad-run-path"),
        (("fetch", "file:///nowhere/a", ""), "bad-run-path"),
        (("import", "s3://bucket/a", "new"), "bad-usage"),
        (("import", "ckpt.pt", "s3://bucket/b"), "bad-run-path"),
        (("mirror", "run", "--forget", "s3://bucket/a"), "bad-usage"),
    ],
)
def test_bad_input_is_one_clear_error(unbroken: Tool, tmp_path: Path, arguments: tuple[str, ...], kind: str) -> None:
    saved(run_at(tmp_path / "run"), 10)
    results = asked(unbroken, *arguments, code=2)
    assert results["kind"] == kind
    assert "secret" not in json.dumps(results)


@pytest.mark.promise("M8", "M9")
def test_a_mirror_that_was_removed_and_added_again_is_verified_again(
    unbroken: Tool, mirror: str, tmp_path: Path
) -> None:
    store = run_at(tmp_path / "run")
    name = saved(store, 10)
    asked(unbroken, "mirror", "run", "--to", mirror)
    client = client_of(store, mirror)
    client.put(f"{name}/state/a", iter([b"x" * SMALL["state/a"]]), SMALL["state/a"], in_flight=1)
    client.delete([f"{name}/state/deep/b"])
    assert asked(unbroken, "verify", mirror, "--full", code=3)
    asked(unbroken, "mirror", "run", "--forget", mirror)
    assert not mirrored_ids(store, mirror)
    [done] = asked(unbroken, "mirror", "run", "--to", mirror)["mirrors"]
    assert done["mirrored"] == [name]
    assert asked(unbroken, "verify", mirror, "--full")["is_sound"]


@pytest.mark.parametrize("command", ["status", "outcome", "stop", "release"])
def test_a_command_that_needs_a_run_directory_says_so_of_an_address(unbroken: Tool, command: str) -> None:
    found = asked(unbroken, command, "s3://bucket/runs/a", code=2)
    assert found["kind"] == "bad-usage"
    assert "s3://bucket/runs/a" in found["message"]


def test_replay_names_the_store_that_it_does_not_read(unbroken: Tool, tmp_path: Path) -> None:
    address = f"file://{tmp_path}/store"
    job(tmp_path / "run", 2, quietly(checkpoints=address), **tiny())
    found = asked(unbroken, "replay", "run", "1", "2", code=2)
    assert found["kind"] == "bad-usage"
    assert address in found["message"]


@pytest.mark.parametrize("empty", ["", " , "])
def test_an_empty_address_is_no_mirror(unbroken: Tool, tmp_path: Path, empty: str) -> None:
    saved(run_at(tmp_path / "run"), 10)
    assert asked(unbroken, "mirror", "run", "--to", f"file://{tmp_path}/m")["mirrors"]
    assert asked(unbroken, "mirror", "run", "--to", empty, code=2)["kind"] == "bad-usage"


def test_a_fetch_names_the_step(unbroken: Tool, tmp_path: Path) -> None:
    saved(run_at(tmp_path / "run"), 10)
    mirror = f"file://{tmp_path}/m"
    asked(unbroken, "mirror", "run", "--to", mirror)
    for dry in (["--dry-run"], []):
        [row] = asked(unbroken, "fetch", mirror, "other", *dry)["checkpoints"]
        assert (row["name"], row["step"]) == ("checkpoint-10", 10)
    (tmp_path / "run" / "checkpoints" / "checkpoint-10" / "state" / "a").write_bytes(b"rot")
    [row] = asked(unbroken, "fetch", "run", "--dry-run")["checkpoints"]
    assert (row["name"], row["step"], row["is_new"]) == ("checkpoint-10", 10, False)
