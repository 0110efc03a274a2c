"""Which digest: speed per CPU second of the candidates, and what threads add.

    python -m bench.digest [--repeats 7]

Needs the `bench` extra (blake3, google-crc32c) beside xxhash.
"""

import argparse
import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import blake3
import google_crc32c
import xxhash

from bench.measure import interleaved, write_results
from unbroken.report.style import Style
from unbroken.report.table import Column, table

BLOCK = memoryview(bytearray(os.urandom(16 << 20)))
# Larger than any cache, so that the figure is memory's and not the cache's.
BLOCKS = [memoryview(bytearray(BLOCK)) for _ in range(32)]


def crc32c(block: memoryview) -> object:
    return google_crc32c.value(bytes(block))


CANDIDATES: dict[str, Callable[[memoryview], object]] = {
    "xxh3-128": xxhash.xxh3_128_digest,
    "xxh3-64": xxhash.xxh3_64_digest,
    "blake3": lambda block: blake3.blake3(block).digest(),
    "crc32c": crc32c,
    "sha256": lambda block: hashlib.sha256(block).digest(),
}


def rate(digest: Callable[[memoryview], object], threads: int) -> float:
    """Gigabytes a second of wall time."""
    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(digest, BLOCKS))
    return sum(map(len, BLOCKS)) / (time.perf_counter() - start) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    objects = {
        f"{name}, {threads} thread{'s' if threads > 1 else ''}": (lambda d=digest, t=threads: rate(d, t))
        for name, digest in CANDIDATES.items()
        for threads in (1, 2)
    }
    found = interleaved(objects, options.repeats)
    rows = [(name, f"{samples.median:.1f}", samples.spread) for name, samples in found.items()]
    print(table([Column("digest"), Column("GB/s", True), Column("spread")], rows, style=Style(False)))
    figures = {name: {"gb_per_s": samples.values, "median": samples.median} for name, samples in found.items()}
    print(write_results("digest", {"figures": figures}))


if __name__ == "__main__":
    main()
