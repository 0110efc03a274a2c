"""The store against the machine's own limits, taken in the same run.

    python -m bench.store [DIR] [--repeats 5] [--gigabytes 1]

DIR must be on the disk to be measured. Every figure is a ratio to a plain loop that does the same I/O without us: write
and sync for a save, sequential read for verify and seal. Reads are cold: the page cache is dropped for each file.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from bench.measure import Samples, interleaved, write_results
from unbroken.report.style import Style
from unbroken.report.table import Column, table
from unbroken.store.check import Level, verify
from unbroken.store.choose import choose
from unbroken.store.commit import Record, begin, commit
from unbroken.store.digest import BLOCK_BYTES, BlockDigester, PartDigest, digest_bytes
from unbroken.store.directory import Store
from unbroken.store.manifest import Manifest, Part, decode, encode
from unbroken.store.names import MANIFEST
from unbroken.store.scan import newest_first, scan
from unbroken.store.seal import seal

PARTS = 8


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def chunks(buffer: memoryview, part_bytes: int) -> Iterator[memoryview]:
    for start in range(0, part_bytes, len(buffer)):
        yield buffer[: min(len(buffer), part_bytes - start)]


def plain_save(root: Path, buffer: memoryview, part_bytes: int) -> None:
    shutil.rmtree(root / "plain", ignore_errors=True)
    (root / "plain").mkdir()
    for i in range(PARTS):
        handle = os.open(root / "plain" / f"{i}.bin", os.O_WRONLY | os.O_CREAT)
        for chunk in chunks(buffer, part_bytes):
            os.write(handle, chunk)
        os.fsync(handle)
        os.close(handle)


def store_save(root: Path, buffer: memoryview, part_bytes: int) -> None:
    shutil.rmtree(root / "store", ignore_errors=True)
    draft = begin(Store(root / "store"), step=1, job="bench")
    parts = [draft.write_part(f"{i}.bin", chunks(buffer, part_bytes)) for i in range(PARTS)]
    commit(draft, plan=[p.name for p in parts], parts=parts, record=Record(kind="periodic", saved_at_ns=1))


class NoDigester(BlockDigester):
    """Takes the bytes and does nothing, to show what digesting costs."""

    def update(self, data: memoryview) -> None:
        pass


def store_save_without_digests(root: Path, buffer: memoryview, part_bytes: int) -> None:
    shutil.rmtree(root / "bare", ignore_errors=True)
    draft = begin(Store(root / "bare"), step=1, job="bench")
    with mock.patch("unbroken.store.parts.BlockDigester", NoDigester):
        for i in range(PARTS):
            draft.write_part(f"{i}.bin", chunks(buffer, part_bytes))


def drop_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def plain_read(folder: Path, buffer: memoryview) -> None:
    for path in sorted(folder.glob("*.bin")):
        handle = os.open(path, os.O_RDONLY)
        offset = 0
        while taken := os.preadv(handle, [buffer], offset):
            offset += taken
        os.close(handle)


def cold(folder: Path, action: Callable[[], object]) -> float:
    drop_cache(folder)
    return timed(action)


def saving(root: Path, buffer: memoryview, part_bytes: int, repeats: int) -> dict[str, Samples]:
    return interleaved(
        {
            "plain write and sync": lambda: timed(lambda: plain_save(root, buffer, part_bytes)),
            "save without digests": lambda: timed(lambda: store_save_without_digests(root, buffer, part_bytes)),
            "save with digests": lambda: timed(lambda: store_save(root, buffer, part_bytes)),
        },
        repeats,
    )


def reading(root: Path, buffer: memoryview, repeats: int) -> dict[str, Samples]:
    store, folder = Store(root / "store"), root / "store" / "checkpoint-1"
    workers = max(2, os.cpu_count() or 2)

    def seal_again() -> None:
        (folder / MANIFEST).unlink()
        seal(store, folder.name, at_ns=1, step=1, workers=workers)

    def verify_full() -> None:
        verdict = verify(store, folder.name, Level.FULL, workers=workers)
        assert verdict.is_sound, verdict

    return interleaved(
        {
            "sequential read": lambda: cold(folder, lambda: plain_read(folder, buffer)),
            "verify --full": lambda: cold(folder, verify_full),
            "seal": lambda: cold(folder, seal_again),
        },
        repeats,
    )


def many_checkpoints(root: Path, count: int, parts: int) -> Callable[[], None]:
    """A store of many checkpoints with real files; returns what scans it and chooses."""
    store = Store(root / "many")
    empty = PartDigest(0, (digest_bytes(b""),))
    names = [f"state/__{i}_0.distcp" for i in range(parts)]
    template = root / "template"
    (template / "state").mkdir(parents=True)
    for name in names:
        (template / name).touch()
    for step in range(count):
        folder = store.path(f"checkpoint-{step}")
        (folder / "state").mkdir(parents=True)
        for name in names:
            os.link(template / name, folder / name)
        manifest = Manifest(f"b-{step}", step, "periodic", step, "b", "unbroken", tuple(Part(n, empty) for n in names))
        (folder / MANIFEST).write_bytes(encode(manifest))

    def look() -> None:
        names = newest_first(store, scan(store).committed)
        choice = choose(names, lambda name: verify(store, name, Level.QUICK))
        assert choice.chosen is not None
        assert choice.chosen.name == f"checkpoint-{count - 1}"

    return look


def large_manifest(ranks: int) -> Callable[[], None]:
    """Ten thousand ranks with 1.5 GB each; returns what writes and reads back their manifest."""
    size = 1_500_000_000
    blocks = tuple(digest_bytes(i.to_bytes(4, "little")) for i in range(-(-size // BLOCK_BYTES)))
    parts = tuple(Part(f"state/__{rank}_0.distcp", PartDigest(size, blocks)) for rank in range(ranks))
    manifest = Manifest("b", 1, "periodic", 1, "b", "unbroken", parts)

    def round_trip() -> None:
        assert len(decode(encode(manifest), Path("manifest.json")).parts) == ranks

    return round_trip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("dir", nargs="?", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="unbroken-bench-", dir=options.dir))
    part_bytes = int(options.gigabytes * 1e9 / PARTS)
    buffer = memoryview(bytearray(os.urandom(BLOCK_BYTES)))
    try:
        save, read = saving(root, buffer, part_bytes, options.repeats), reading(root, buffer, options.repeats)
        look = many_checkpoints(root, 10_000, 64)
        counts = interleaved(
            {
                "scan and choose, 10,000 checkpoints x 64 parts": lambda: timed(look),
                "manifest of 10,000 ranks, there and back": lambda: timed(large_manifest(10_000)),
            },
            options.repeats,
        )
    finally:
        shutil.rmtree(root)
    limits = {**dict.fromkeys(save, "plain write and sync"), **dict.fromkeys(read, "sequential read")}
    rows, facts = [], {}
    for name, samples in {**save, **read, **counts}.items():
        limit = limits.get(name)
        ratio = None if limit is None else {**save, **read}[limit].median / samples.median
        rows.append((name, f"{samples.median:.3f}", samples.spread, "" if ratio is None else f"{ratio:.2f}"))
        facts[name] = {"seconds": samples.values, "median_s": samples.median, "of_limit": ratio}
    columns = [Column("what"), Column("median s", True), Column("spread s"), Column("of limit", True)]
    print(table(columns, rows, style=Style(False)))
    print(write_results("store", {"gigabytes": options.gigabytes, "parts": PARTS, "figures": facts}))


if __name__ == "__main__":
    main()
