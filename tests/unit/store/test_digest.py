"""Digests block by block: where blocks end, and that the chunks they come in do not matter."""

from itertools import pairwise

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from unbroken.store.digest import BLOCK_BYTES, BlockDigester, block_ranges, digest_bytes, digest_of

BLOCK = 1024
BORDERS = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 3)


def content(size: int) -> bytes:
    return bytes(i * 7 % 251 for i in range(size))


def by_hand(data: bytes) -> tuple[bytes, ...]:
    blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)] or [b""]
    return tuple(xxhash.xxh3_128(block).digest() for block in blocks)


def test_at_every_border_the_blocks_are_those_cut_by_hand() -> None:
    for size in BORDERS:
        found = digest_of([content(size)], BLOCK)
        assert (found.size_bytes, found.blocks) == (size, by_hand(content(size)))


def test_one_block_has_the_digest_that_xxh128sum_prints() -> None:
    for size in (0, 1, BLOCK - 1, BLOCK):
        assert digest_of([content(size)], BLOCK).whole == xxhash.xxh3_128_hexdigest(content(size))


def test_more_blocks_have_the_digest_of_their_digests_end_to_end() -> None:
    for size in (BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 3):
        blocks = by_hand(content(size))
        assert digest_of([content(size)], BLOCK).whole == xxhash.xxh3_128_hexdigest(b"".join(blocks))


def test_the_value_of_the_empty_part_never_changes() -> None:
    assert digest_of([]).whole == digest_bytes(b"").hex() == "99aa06d3014798d86001c324468d497f"


def test_a_real_block_border_is_at_16_mib() -> None:
    data = bytes(BLOCK_BYTES) + b"x"
    assert BLOCK_BYTES == 16_777_216
    found = digest_of([memoryview(data)[:5], memoryview(data)[5:]])
    assert found.blocks == (xxhash.xxh3_128_digest(bytes(BLOCK_BYTES)), xxhash.xxh3_128_digest(b"x"))


@given(st.sampled_from(BORDERS), st.lists(st.integers(1, 700), max_size=20))
def test_how_the_bytes_are_cut_into_chunks_does_not_matter(size: int, cuts: list[int]) -> None:
    data = memoryview(content(size))
    digester = BlockDigester(BLOCK)
    for cut in cuts:
        digester.update(data[:cut])
        data = data[cut:]
    digester.update(data)
    assert digester.finish() == digest_of([content(size)], BLOCK)


@given(st.integers(0, 5000), st.integers(1, 700))
def test_the_ranges_of_blocks_cover_every_byte_once(size: int, block: int) -> None:
    ranges = list(block_ranges(size, block))
    assert ranges[0][0] == 0 and ranges[-1][1] == size
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    assert len(ranges) == len(digest_of([bytes(size)], block).blocks)
