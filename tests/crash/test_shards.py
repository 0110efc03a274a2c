"""Writing shards and their list, under every crash: an index stands beside its own tokens or not at all."""

from pathlib import Path

import pytest

from tests.unit.data.making import BYTES, entries_of, make_shard
from unbroken.data.corpus.listing import LISTING, Listing, encode_listing, write_listing
from unbroken.data.corpus.seal_shards import seal_shards
from unbroken.data.corpus.shards import ShardRecord, write_shard
from unbroken.disk import Disk, LocalDisk
from unbroken.files import Files
from unbroken.store.digest import digest_of
from unbroken.testing import ERRORS, KILLS, FaultyDisk, MemoryDisk, Operation, crash_points, crash_states

HOME = Path("/data/train/web")
STEM = "2020/00000-000"
# Both make a .bin of the same size, so that no size tells them apart.
OLD, NEW = [[1, 2, 256], [3, 256]], [[4, 256], [5, 6, 256]]


def write(disk: Disk, documents: list[list[int]]) -> ShardRecord:
    """One shard and a list that names it."""
    record = write_shard(Files(disk), HOME, STEM, [entries_of(documents)], token_bytes=2)
    write_listing(Files(disk), HOME, Listing((record,), BYTES))
    return record


def an_empty_disk() -> MemoryDisk:
    return MemoryDisk(["/data"])


def with_the_old_one() -> MemoryDisk:
    disk = MemoryDisk(["/data"])
    write(disk, OLD)
    disk.sync_all()
    return disk


def writes_the_new_one(disk: Disk) -> ShardRecord:
    return write(disk, NEW)


RECORDS = {name: write(an_empty_disk(), documents) for name, documents in (("old", OLD), ("new", NEW))}
LISTS = {encode_listing(Listing((record,), BYTES)): name for name, record in RECORDS.items()}


def content(disk: Disk, name: str) -> bytes | None:
    files = Files(disk)
    return files.read_bytes(HOME / name, limit_bytes=1 << 20) if files.find(HOME / name) else None


def shard_found(disk: Disk) -> str | None:
    """Which shard stands there; a pair that does not belong together is the failure this test is about."""
    index, tokens = content(disk, f"{STEM}.idx"), content(disk, f"{STEM}.bin")
    if index is None:
        return None
    digests = (digest_of([tokens or b""]).whole, digest_of([index]).whole)
    return next(name for name, each in RECORDS.items() if (each.bin_digest, each.index_digest) == digests)


def listed(disk: Disk) -> str | None:
    found = content(disk, LISTING)
    return None if found is None else LISTS[found]


@pytest.mark.promise("X7")
@pytest.mark.parametrize("fresh", [an_empty_disk, with_the_old_one])
def test_an_index_never_stands_beside_other_tokens_and_a_list_is_whole(fresh: type[MemoryDisk]) -> None:
    seen = set()
    for trial in crash_points(fresh, writes_the_new_one, (*KILLS, *ERRORS)):
        for disk in (trial.disk, *(found for _, found in crash_states(trial.disk))):
            found = (shard_found(disk), listed(disk))
            # A list is published after what it lists.
            assert found[1] != "new" or found[0] == "new", str(trial)
            if trial.is_finished:
                assert found == ("new", "new"), str(trial)
            seen.add(found)
    assert {(None, None), ("new", "new")} <= seen or {("old", "old"), (None, "old"), ("new", "new")} <= seen


def test_after_every_crash_the_same_writer_gets_the_same_shard_and_leaves_no_scrap() -> None:
    for trial in crash_points(with_the_old_one, writes_the_new_one, KILLS):
        writes_the_new_one(trial.disk)
        assert (shard_found(trial.disk), listed(trial.disk)) == ("new", "new"), str(trial)
        nodes = Files(trial.disk).list_directory((HOME / STEM).parent)
        assert [node.name for node in nodes] == ["00000-000.bin", "00000-000.idx"], str(trial)


def test_a_seal_is_durable_before_it_is_reported(tmp_path: Path) -> None:
    make_shard(tmp_path, STEM, OLD)
    asked: list[tuple[str, str]] = []

    def note(operation: Operation) -> None:
        if operation.is_mutating:
            asked.append((operation.name, operation.path.name))

    seal_shards(tmp_path, BYTES, Files(FaultyDisk(LocalDisk(), note)))
    published = asked.index(("rename", LISTING))
    before = asked[:published]
    assert {("sync_file", "00000-000.bin"), ("sync_file", "00000-000.idx"), ("sync_directory", "2020")} <= set(before)
