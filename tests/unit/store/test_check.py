"""Verifying: how far each level looks, and that every bad place is named."""

import shutil
from pathlib import Path

import pytest

from tests.unit.store.saving import store_with, tree
from unbroken.store.check import Level, verify
from unbroken.store.choose import Choice, choose
from unbroken.store.digest import digest_of
from unbroken.store.directory import Store
from unbroken.store.manifest import Manifest, Part, encode

BLOCK = 1024


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """One checkpoint with parts of 0, 1, 3 and 40 blocks."""
    parts = {
        "empty": b"",
        "one": b"1" * 10,
        "deep/three": bytes(i % 251 for i in range(2 * BLOCK + 3)),
        "forty": b"4" * (40 * BLOCK),
    }
    directory = tmp_path / "checkpoint-1"
    (directory / "deep").mkdir(parents=True)
    for name, data in parts.items():
        (directory / name).write_bytes(data)
    found = tuple(Part(name, digest_of([data], BLOCK)) for name, data in parts.items())
    manifest = Manifest("i", 1, "periodic", 1, "j", "unbroken", found, block_bytes=BLOCK)
    (directory / "manifest.json").write_bytes(encode(manifest))
    return Store(tmp_path)


def damage(store: Store, part: str, offset: int) -> None:
    path = store.path("checkpoint-1") / part
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("workers", [1, 4])
def test_a_full_look_reads_every_byte_once(store: Store, workers: int) -> None:
    heard: list[int] = []
    verdict = verify(store, "checkpoint-1", Level.FULL, workers=workers, progress=heard.append)
    assert verdict.is_sound and not verdict.is_damaged
    assert sum(heard) == verdict.checked_bytes == 43 * BLOCK - BLOCK + 3 + 10


@pytest.mark.parametrize("workers", [1, 4])
def test_every_bad_block_is_named_with_its_range(store: Store, workers: int) -> None:
    for part, offset in (("deep/three", 2 * BLOCK + 2), ("forty", 0), ("forty", 39 * BLOCK), ("one", 9)):
        damage(store, part, offset)
    verdict = verify(store, "checkpoint-1", Level.FULL, workers=workers)
    assert [(found.part, found.start, found.end) for found in verdict.findings] == [
        ("deep/three", 2048, 2051),
        ("forty", 0, 1024),
        ("forty", 39 * BLOCK, 40 * BLOCK),
        ("one", 0, 10),
    ]
    assert verdict.is_damaged


def test_a_quick_look_reads_no_part_and_a_sample_reads_a_few_blocks_of_each(store: Store) -> None:
    assert verify(store, "checkpoint-1", Level.QUICK).checked_bytes == 0
    read = verify(store, "checkpoint-1", Level.SAMPLED).checked_bytes
    assert 2 * BLOCK + 10 < read <= 4 * BLOCK + 10


def test_samples_of_many_seeds_find_in_the_end_what_one_may_miss(store: Store) -> None:
    damage(store, "forty", 20 * BLOCK)
    assert verify(store, "checkpoint-1", Level.QUICK).is_sound
    found = [verify(store, "checkpoint-1", Level.SAMPLED, seed=seed).is_sound for seed in range(200)]
    assert True in found and False in found
    again = [verify(store, "checkpoint-1", Level.SAMPLED, seed=seed).is_sound for seed in range(200)]
    assert again == found


def test_what_the_manifest_does_not_name_is_mentioned_and_is_no_damage(store: Store) -> None:
    (store.path("checkpoint-1") / "deep" / "notes").write_text("mine")
    verdict = verify(store, "checkpoint-1", Level.FULL)
    assert verdict.is_sound and verdict.foreign == ("deep/notes",)


def test_verifying_changes_nothing(store: Store) -> None:
    damage(store, "one", 0)
    before = tree(store.root)
    verify(store, "checkpoint-1", Level.FULL)
    assert tree(store.root) == before


def test_a_checkpoint_that_is_not_there_is_a_finding(tmp_path: Path) -> None:
    verdict = verify(store_with(tmp_path, 1), "checkpoint-2", Level.QUICK)
    assert not verdict.is_sound and verdict.findings[0].part == "manifest.json"


@pytest.mark.promise("X6")
def test_a_checkpoint_that_its_run_removes_meanwhile_is_not_damaged(store: Store) -> None:
    directory = store.path("checkpoint-1")
    verdict = verify(
        store, "checkpoint-1", Level.FULL, workers=1, progress=lambda _: shutil.rmtree(directory, ignore_errors=True)
    )
    assert verdict.is_removed and not verdict.is_sound and not verdict.is_damaged
    # It is not there to be chosen, and nobody is told of damage.
    assert choose(["checkpoint-1"], lambda name: verify(store, name, Level.QUICK)) == Choice(None)


@pytest.mark.promise("X6")
def test_a_part_that_is_lost_meanwhile_is_damage(store: Store) -> None:
    directory = store.path("checkpoint-1") / "deep"
    verdict = verify(
        store, "checkpoint-1", Level.FULL, workers=1, progress=lambda _: shutil.rmtree(directory, ignore_errors=True)
    )
    assert verdict.is_damaged and not verdict.is_removed
