"""Writing and reading one part: digested on the way in, proven on the way out."""

import errno
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.store.saving import save
from unbroken.disk import LocalDisk
from unbroken.errors import DamagedCheckpoint, NoMemory, StorageFailed
from unbroken.files import LOCAL, Files
from unbroken.store.digest import BLOCK_BYTES, BlockDigester, block_ranges, digest_of
from unbroken.store.directory import Store
from unbroken.store.manifest import Manifest, Part
from unbroken.store.parts import BlockReader, read_part, read_whole, write_part


def test_the_evidence_is_the_digest_of_the_bytes_on_disk(tmp_path: Path) -> None:
    part = write_part(LOCAL, tmp_path, "w.bin", [b"ab", b"", memoryview(b"cdef")[1:]])
    assert (tmp_path / "w.bin").read_bytes() == b"abdef"
    assert part == Part("w.bin", digest_of([b"abdef"]))


class Slow(BlockDigester):
    """A digest that begins only when a hasty writer would have gone on to its next chunk."""

    def update(self, data: memoryview) -> None:
        time.sleep(0.05)
        super().update(data)


@pytest.mark.parametrize("digester", [BlockDigester, Slow])
def test_a_generator_may_reuse_its_buffer_for_every_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digester: type[BlockDigester]
) -> None:
    monkeypatch.setattr("unbroken.store.parts.BlockDigester", digester)
    buffer = bytearray(2 << 20)

    def chunks() -> Iterator[memoryview]:
        for letter in b"abc":
            buffer[:] = bytes([letter]) * len(buffer)
            yield memoryview(buffer)

    part = write_part(LOCAL, tmp_path, "w.bin", chunks())
    assert part.digest == digest_of([(tmp_path / "w.bin").read_bytes()])
    assert part.size_bytes == 3 * len(buffer)


def test_chunks_larger_than_a_block_are_digested_as_they_lie_on_disk(tmp_path: Path) -> None:
    data = bytes(range(256)) * (BLOCK_BYTES // 256) + b"tail"
    part = write_part(LOCAL, tmp_path, "w.bin", [b"head", data])
    assert len(part.digest.blocks) == 2
    assert part.digest == digest_of([(tmp_path / "w.bin").read_bytes()])


class SlowDisk(LocalDisk):
    """A disk that has not looked at a block when the next one could already be made."""

    def write(self, handle: int, data: memoryview) -> int:
        time.sleep(0.05)
        return super().write(handle, data)


def test_a_large_part_is_what_a_small_one_would_be(tmp_path: Path) -> None:
    """Put together in blocks, written past the page cache, and read back so."""
    block = bytearray(range(256)) * (BLOCK_BYTES // 256)
    chunks: list[bytes | memoryview] = [b"head", memoryview(block)]
    chunks += [b"middle", memoryview(block)[: 3 << 20], memoryview(block)[7:], b"tail"]
    part = write_part(Files(SlowDisk()), tmp_path, "large", chunks, is_large=True)
    assert part == Part("large", write_part(LOCAL, tmp_path, "small", chunks).digest)
    # Not the bytes themselves: pytest would take minutes to show how megabytes differ.
    is_equal = (tmp_path / "large").read_bytes() == b"".join(chunks)
    assert is_equal
    alone, shared = BlockReader(LOCAL, BLOCK_BYTES), BlockReader(LOCAL, BLOCK_BYTES, is_shared=True)
    for start, end in block_ranges(part.size_bytes, BLOCK_BYTES):
        found = alone.read(tmp_path / "large", start, end)
        is_equal = found == shared.read(tmp_path / "large", start, end) == b"".join(chunks)[start:end]
        assert is_equal


def test_a_name_that_is_taken_is_refused_and_what_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"old")
    with pytest.raises(StorageFailed):
        write_part(LOCAL, tmp_path, "w.bin", [b"new"])
    assert (tmp_path / "w.bin").read_bytes() == b"old"


def _three_blocks(tmp_path: Path) -> tuple[Manifest, Part, bytes]:
    data = bytes(i % 251 for i in range(2 * 1024 + 3))
    (tmp_path / "w.bin").write_bytes(data)
    part = Part("w.bin", digest_of([data], 1024))
    return Manifest("i", 1, "final", 1, "j", "unbroken", (part,), block_bytes=1024), part, data


def test_a_part_is_read_back_block_by_block(tmp_path: Path) -> None:
    manifest, part, data = _three_blocks(tmp_path)
    assert [bytes(block) for block in read_part(LOCAL, tmp_path, manifest, part)] == [
        data[:1024],
        data[1024:2048],
        data[2048:],
    ]


def test_a_part_is_read_by_its_name_after_every_block_is_verified(tmp_path: Path) -> None:
    manifest, _, data = _three_blocks(tmp_path)
    assert read_whole(LOCAL, tmp_path, manifest, "w.bin") == data
    assert read_whole(LOCAL, tmp_path, manifest, "other.bin") is None
    (tmp_path / "w.bin").write_bytes(data[:-1] + b"\xff")
    with pytest.raises(DamagedCheckpoint):
        read_whole(LOCAL, tmp_path, manifest, "w.bin")


@pytest.mark.promise("M16")
def test_a_bad_block_is_never_returned_and_its_range_is_named(tmp_path: Path) -> None:
    manifest, part, data = _three_blocks(tmp_path)
    (tmp_path / "w.bin").write_bytes(data[:1030] + b"\xff" + data[1031:])
    reading = read_part(LOCAL, tmp_path, manifest, part)
    assert bytes(next(reading)) == data[:1024]
    with pytest.raises(DamagedCheckpoint) as damaged:
        next(reading)
    assert damaged.value.findings == ("w.bin: bytes 1,024 to 2,048 are not the bytes that were written",)


def test_a_part_that_became_shorter_is_damaged_not_short(tmp_path: Path) -> None:
    manifest, part, data = _three_blocks(tmp_path)
    (tmp_path / "w.bin").write_bytes(data[:-1])
    with pytest.raises(DamagedCheckpoint, check=lambda each: len(each.findings) == 1):
        list(read_part(LOCAL, tmp_path, manifest, part))


def test_an_empty_part_is_one_empty_block(tmp_path: Path) -> None:
    store = Store(tmp_path)
    name = save(store, 1, parts={"empty": b""})
    manifest = store.read_manifest(name)
    assert [bytes(block) for block in read_part(LOCAL, store.path(name), manifest, manifest.parts[0])] == [b""]


def test_a_reader_gives_fewer_bytes_only_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    reader = BlockReader(LOCAL, 8)
    assert bytes(reader.read(tmp_path / "f", 2, 6)) == b"2345"
    assert bytes(reader.read(tmp_path / "f", 8, 16)) == b"89"


def test_a_large_part_without_memory_for_its_blocks_is_no_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(size_bytes: int) -> memoryview:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("unbroken.store.parts.aligned_memory", refuse)
    with pytest.raises(NoMemory):
        write_part(LOCAL, tmp_path, "large", [b"x"], is_large=True)
    assert not list(tmp_path.iterdir())
