"""A plan holds every fresh token once, has the same bytes whoever builds it, and heals when its cache is damaged."""

import json
import logging
import pickle
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tests.unit.data.counted import CountedShard, index_of, web_like
from unbroken.data.corpus.shards import Entries, write_shard
from unbroken.data.packing import groups
from unbroken.data.packing.bucket_plan import MAPPED_GROUPS, BucketPlan, open_plan
from unbroken.data.packing.group_plan import Recipe, build_group, encode_plan, longest_first
from unbroken.data.packing.groups import Offsets, Span
from unbroken.errors import StorageFailed
from unbroken.files import LOCAL
from unbroken.store.digest import digest_bytes

SHARDS = [
    CountedShard("a", web_like(3_000, seed=1, median=60)),
    CountedShard("b", web_like(500, seed=2, median=60), np.arange(500, dtype=np.uint16) % 17),
    CountedShard("c", np.array([5, 0, 3, 700], np.int64), np.array([5, 0, 1, 0], np.uint16)),
]


def _open(cache: Path, shards: list[CountedShard] = SHARDS, *, packing: bool = True, threads: int = 1) -> BucketPlan:
    opening = index_of(shards)
    return open_plan(
        shards, max_length=256, overlap=32, packing=packing, cache=cache, threads=threads, index_of=opening
    )


def _never(path: Path) -> Offsets:
    raise AssertionError(f"{path} was read again")


def _files(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((cache / "plans").iterdir())}


def _fresh(plan: BucketPlan) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for group in range(plan.groups):
        slots = plan.windows_of(group, np.arange(plan.sequences[group]))
        for shard, offset, length, masked in zip(slots.shard, slots.offset, slots.length, slots.masked, strict=True):
            found += [(int(shard), int(token)) for token in range(offset + masked, offset + length)]
    return sorted(found)


def _expected(shards: list[CountedShard]) -> list[tuple[int, int]]:
    found = []
    for number, shard in enumerate(shards):
        offsets, prefixes = shard.offsets(0, shard.entries), shard.prefixes_of(0, shard.entries)
        for begin, end, prefix in zip(offsets[:-1], offsets[1:], prefixes, strict=True):
            found += [(number, token) for token in range(begin + prefix, end)]
    return found


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "GROUP_ENTRIES", 64)


@pytest.mark.promise("G15")
@pytest.mark.parametrize("packing", [True, False])
def test_the_fresh_tokens_of_all_sequences_are_the_corpus(tmp_path: Path, packing: bool, small_groups: None) -> None:
    plan = _open(tmp_path, packing=packing)
    expected = _expected(SHARDS)
    assert plan.groups > 40
    assert _fresh(plan) == expected
    assert plan.fresh_tokens == len(expected)
    assert plan.dropped_entries == 2


def test_shards_on_disk_are_planned_as_they_are(tmp_path: Path) -> None:
    lengths = web_like(200, seed=4, median=60)
    entries = Entries(np.arange(lengths.sum(), dtype=np.uint32) % 50, lengths, np.zeros(200, np.uint16))
    write_shard(LOCAL, tmp_path, "one", [entries], token_bytes=2)
    shard = CountedShard(str(tmp_path / "one.idx"), lengths)
    plan = open_plan([shard], max_length=256, overlap=32, packing=True, cache=tmp_path)
    assert _fresh(plan) == _expected([shard])


def test_counts_and_histogram_are_those_of_the_windows(tmp_path: Path, small_groups: None) -> None:
    plan = _open(tmp_path)
    every = [plan.windows_of(group, np.arange(plan.sequences[group])) for group in range(plan.groups)]
    length = np.concatenate([slots.length for slots in every])
    masked = np.concatenate([slots.masked for slots in every])
    assert plan.histogram().tolist() == np.bincount(length, minlength=257).tolist()
    assert (plan.windows, plan.masked_tokens) == (length.size, int(masked.sum()))
    assert plan.total_sequences == sum(slots.counts.size for slots in every) == int(plan.sequences.sum())
    assert plan.fill == Fraction(int(length.sum()), 256 * plan.total_sequences)
    for slots in every:
        assert (np.add.reduceat(slots.length, np.cumsum(slots.counts) - slots.counts) <= 256).all()


def test_any_sequences_can_be_requested_in_any_order(tmp_path: Path) -> None:
    plan = _open(tmp_path)
    whole = plan.windows_of(0, np.arange(plan.sequences[0]))
    ends = np.cumsum(whole.counts)
    for asked in ([7, 3, 3, 0], [int(plan.sequences[0]) - 1], []):
        slots = plan.windows_of(0, np.array(asked, np.int64))
        pieces = [np.arange(ends[each] - whole.counts[each], ends[each]) for each in asked]
        expected = np.concatenate([np.empty(0, np.int64), *pieces])
        assert slots.counts.tolist() == whole.counts[asked].tolist()
        assert slots.offset.tolist() == whole.offset[expected].tolist()
        assert slots.length.tolist() == whole.length[expected].tolist()


def test_short_windows_do_not_always_stand_last(tmp_path: Path) -> None:
    plan = _open(tmp_path)
    slots = plan.windows_of(0, np.arange(plan.sequences[0]))
    first = np.cumsum(slots.counts) - slots.counts
    longest, shortest = np.maximum.reduceat(slots.length, first), np.minimum.reduceat(slots.length, first)
    mixed = (slots.counts > 2) & (longest > shortest)
    assert mixed.sum() > 200
    # Unturned, the first window is the longest and the last the shortest, always.
    assert (slots.length[first] == longest)[mixed].mean() < 0.8
    assert (slots.length[np.cumsum(slots.counts) - 1] == shortest)[mixed].mean() < 0.8


def test_a_second_opening_reads_no_index(tmp_path: Path) -> None:
    first = _open(tmp_path)
    again = open_plan(SHARDS, max_length=256, overlap=32, packing=True, cache=tmp_path, index_of=_never)
    assert _fresh(again) == _fresh(first)
    assert again.sequences.tolist() == first.sequences.tolist()
    assert (again.windows, again.fill, again.dropped_entries) == (first.windows, first.fill, first.dropped_entries)


@pytest.mark.promise("C13")
def test_every_builder_writes_the_same_bytes(tmp_path: Path, small_groups: None) -> None:
    elsewhere = [CountedShard(f"/other/{shard.name}", shard.lengths, shard.prefixes) for shard in SHARDS]
    _open(tmp_path / "one")
    _open(tmp_path / "two", elsewhere, threads=4)
    assert _files(tmp_path / "one") == _files(tmp_path / "two")


def test_the_bytes_of_a_plan_never_change() -> None:
    span = Span(0, 0, SHARDS[0].entries, 0, SHARDS[0].tokens)
    made = {
        packing: digest_bytes(encode_plan(build_group((span,), SHARDS, Recipe(256, 32, packing), index_of(SHARDS))))
        for packing in (True, False)
    }
    assert {packing: digest.hex() for packing, digest in made.items()} == GOLDEN


def test_another_recipe_is_another_plan(tmp_path: Path) -> None:
    for max_length, overlap, packing in ((256, 32, True), (256, 32, False), (256, 31, True), (255, 32, True)):
        open_plan(
            SHARDS, max_length=max_length, overlap=overlap, packing=packing, cache=tmp_path, index_of=index_of(SHARDS)
        )
    assert len(_files(tmp_path)) == 8


@pytest.mark.parametrize("max_length", [300, 70_000])
def test_windows_of_one_length_stand_in_one_keyed_order_whatever_sorts_them(max_length: int) -> None:
    lengths = np.random.default_rng(5).integers(1, 12, 5_000) * (max_length // 12)
    order = longest_first(lengths, max_length)
    # The tie order is the one that windows of a single length have; a sort by both keys knows no ties at all.
    ties = longest_first(np.ones(5_000, np.int64), max_length)
    rank = np.empty(5_000, np.int64)
    rank[ties] = np.arange(5_000)
    assert order.tolist() == np.lexsort((rank, -lengths)).tolist()
    assert (np.diff(ties) == 1).mean() < 0.01


def test_positions_beyond_32_bits_are_kept(tmp_path: Path) -> None:
    far = CountedShard("far", np.array([1 << 33, 5], np.int64))
    plan = open_plan([far], max_length=1 << 20, overlap=0, packing=True, cache=tmp_path, index_of=index_of([far]))
    slots = [plan.windows_of(group, np.arange(plan.sequences[group])) for group in range(plan.groups)]
    offsets = sorted(int(offset) for each in slots for offset in each.offset)
    assert offsets == [*range(0, 1 << 33, 1 << 20), 1 << 33]


# ---- the cache ----


def _damages(data: bytes) -> dict[str, bytes]:
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    header = bytearray(data)
    header[30] ^= 1
    return {"flipped": bytes(flipped), "header": bytes(header), "short": data[:-1], "empty": b"", "long": data + b"\0"}


@pytest.mark.parametrize("how", ["flipped", "header", "short", "empty", "long", "gone"])
@pytest.mark.parametrize("suffix", [".plan", ".json"])
def test_a_damaged_file_is_built_again_with_a_warning(
    tmp_path: Path, how: str, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = _fresh(_open(tmp_path))
    before = _files(tmp_path)
    victim = next(path for path in (tmp_path / "plans").iterdir() if path.suffix == suffix)
    if how == "gone":
        victim.unlink()
    else:
        victim.write_bytes(_damages(victim.read_bytes())[how])
    with caplog.at_level(logging.WARNING, logger="unbroken.data"):
        assert _fresh(_open(tmp_path)) == good
    assert _files(tmp_path) == before
    assert (victim.name in caplog.text) == (how != "gone")


def test_a_plan_that_is_damaged_while_the_bucket_is_open_is_built_again(tmp_path: Path) -> None:
    plan = _open(tmp_path)
    for path in (tmp_path / "plans").iterdir():
        path.unlink()
    (tmp_path / "plans").rmdir()
    assert _fresh(plan) == _expected(SHARDS)


def test_what_a_killed_builder_left_is_removed_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    _open(tmp_path)
    folder = tmp_path / "plans"
    plan, summary = (next(path for path in folder.iterdir() if path.suffix == suffix) for suffix in (".plan", ".json"))
    (folder / f".{plan.name}-0123.tmp").write_bytes(b"half")
    (folder / ".other.plan-0123.tmp").write_bytes(b"somebody is writing this")
    summary.unlink()
    _open(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == sorted([".other.plan-0123.tmp", plan.name, summary.name])


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("in the way")
    with pytest.raises(StorageFailed):
        _open(tmp_path)


@pytest.mark.parametrize(("max_length", "overlap"), [(1, 0), (256, 129)])
def test_windows_that_cannot_be_are_refused_before_anything_is_written(
    tmp_path: Path, max_length: int, overlap: int
) -> None:
    with pytest.raises(ValueError, match=r"max_length|overlap"):
        open_plan(SHARDS, max_length=max_length, overlap=overlap, packing=True, cache=tmp_path, index_of=_never)
    assert not list(tmp_path.iterdir())


def test_progress_is_reported_group_by_group(tmp_path: Path, small_groups: None) -> None:
    results: list[int] = []
    plan = open_plan(
        SHARDS,
        max_length=256,
        overlap=32,
        packing=True,
        cache=tmp_path,
        index_of=index_of(SHARDS),
        progress=results.append,
    )
    assert len(results) == plan.groups and sum(results) == sum(shard.entries for shard in SHARDS)


def test_no_shards_make_an_empty_plan(tmp_path: Path) -> None:
    plan = _open(tmp_path, [])
    assert (plan.groups, plan.total_sequences, plan.fill) == (0, 0, Fraction(1))
    assert plan.histogram().sum() == 0


# ---- memory ----


def _mapped_plans(cache: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(cache / "plans"))


@pytest.mark.promise("G14")
def test_only_so_many_groups_are_mapped_at_a_time(tmp_path: Path, small_groups: None) -> None:
    _open(tmp_path)
    plan = _open(tmp_path)
    assert plan.groups > MAPPED_GROUPS
    for group in range(plan.groups):
        plan.windows_of(group, np.arange(plan.sequences[group]))
    assert _mapped_plans(tmp_path) == MAPPED_GROUPS
    twin = pickle.loads(pickle.dumps(open_plan(SHARDS, max_length=256, overlap=32, packing=True, cache=tmp_path)))
    assert twin.windows_of(0, np.arange(3)).offset.tolist() == plan.windows_of(0, np.arange(3)).offset.tolist()
    assert _mapped_plans(tmp_path) == MAPPED_GROUPS + 1
    del plan, twin
    assert _mapped_plans(tmp_path) == 0


@pytest.mark.promise("G14")
def test_building_a_plan_takes_the_same_memory_for_twenty_times_the_documents(tmp_path: Path) -> None:
    peak = {}
    for documents in (1 << 20, 20 << 20):
        ran = subprocess.run(
            [sys.executable, "-m", "bench.plan", "build", str(documents), "--cache", str(tmp_path / str(documents))],
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            check=True,
        )
        peak[documents] = int(json.loads(ran.stdout)["peak_bytes"])
    assert peak[20 << 20] < 1.25 * peak[1 << 20], peak
    assert peak[20 << 20] < 1 << 30


GOLDEN = {True: "2679d65695ea1d05c1ec98318359369a", False: "3d8c7760c2f27163f0260984fadaa26e"}
