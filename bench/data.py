"""Batches of packed sequences against the machine's own limits and against other loaders, in tokens per CPU second.

    python -m bench.data [--tokens 200000000] [--batches 2000] [--repeats 5] [--directory DIR]

One process, no workers, batches of 8 x 2048 as int64. A limit only copies rows out of a map: no packing, no labels, no
documents, nothing to resume. Ours has all of them. Peers that are not installed are left out.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bench.data_peers import PEERS, Corpus, Unavailable
from bench.measure import interleaved, write_results
from unbroken.data.corpus.catalogue import open_corpus
from unbroken.data.corpus.shards import Entries, write_shard
from unbroken.data.loader import Loader
from unbroken.data.stream import Stream
from unbroken.files import LOCAL
from unbroken.report.style import Style
from unbroken.report.table import Column, table

BATCH, LENGTH = 8, 2048
SHARDS = 8
RESTORE_AT = 1_000_000


def make_corpus(root: Path, tokens: int) -> None:
    """Shards of documents with web-like lengths."""
    drawn = np.random.default_rng(3)
    for number in range(SHARDS):
        documents = tokens // SHARDS // 910
        lengths = np.clip(drawn.lognormal(math.log(500), 1.1, documents), 16, 200_000).astype(np.int64) + 1
        content = drawn.integers(1, 50_000, int(lengths.sum()), dtype=np.uint16)
        content[np.cumsum(lengths) - 1] = 0
        entries = Entries(content, lengths, np.zeros(documents, np.uint16))
        write_shard(LOCAL, root / "train", f"{number:05}", [entries], token_bytes=2)


def _stream(root: Path, *, check_reads: bool = False) -> Stream:
    return Stream(open_corpus(root), max_length=LENGTH, seed=1, epochs=None, check_reads=check_reads)


def _ours(stream: Stream) -> Iterator[torch.Tensor]:
    return (batch.tokens for batch in Loader(stream, global_batch_size=BATCH))


def _sequential(maps: list[NDArray[np.uint16]]) -> Iterator[torch.Tensor]:
    while True:
        for tokens in maps:
            rows = tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)
            for first in range(0, len(rows) - BATCH, BATCH):
                yield torch.from_numpy(rows[first : first + BATCH].astype(np.int64))


def _random_rows(maps: list[NDArray[np.uint16]]) -> Iterator[torch.Tensor]:
    """Rows drawn at random, each copied by one slice; what is drawn is drawn for many batches at once."""
    drawn = np.random.default_rng(5)
    while True:
        shards = drawn.integers(0, len(maps), BATCH * 512).tolist()
        places = drawn.integers(0, min(map(len, maps)) - LENGTH, BATCH * 512).tolist()
        for first in range(0, len(shards), BATCH):
            batch = np.empty((BATCH, LENGTH), np.int64)
            for row in range(BATCH):
                start = places[first + row]
                batch[row] = maps[shards[first + row]][start : start + LENGTH]
            yield torch.from_numpy(batch)


def rate(batches: Callable[[], Iterator[torch.Tensor]], count: int) -> Callable[[], float]:
    """Measures M tokens per CPU second; making the iterator and its first batch stand outside the clock."""

    def measured() -> float:
        iterator = batches()
        next(iterator)
        start, tokens = time.process_time(), 0
        for _ in range(count):
            tokens += next(iterator).numel()
        return tokens / (time.process_time() - start) / 1e6

    return measured


def restore(root: Path) -> Callable[[], float]:
    """CPU seconds from a state to the first batch at a far position: data opened, plan found, batch made."""
    state = Loader(_stream(root), global_batch_size=BATCH).state_dict()
    results = json.dumps({**state, "position": RESTORE_AT})

    def measured() -> float:
        start = time.process_time()
        loader = Loader(_stream(root), global_batch_size=BATCH)
        loader.load_state_dict(json.loads(results))
        next(iter(loader))
        return time.process_time() - start

    return measured


def contestants(root: Path, count: int) -> dict[str, Callable[[], float]]:
    """Everything that can run here, by name."""
    shards = open_corpus(root).shards
    mapped = [np.memmap(shard.bin_path, np.uint16, mode="r") for shard in shards]
    plain = [tokens.view(np.ndarray) for tokens in mapped]
    stream, checked = _stream(root), _stream(root, check_reads=True)
    found: dict[str, Callable[[], float]] = {
        "limit: rows in order": rate(lambda: _sequential(plain), count),
        "limit: random rows of a memmap": rate(lambda: _random_rows(list(mapped)), count),
        "limit: random rows of a plain array": rate(lambda: _random_rows(plain), count),
        "unbroken: packed, labels, doc_ids": rate(lambda: _ours(stream), count),
        "unbroken: the same, every read checked": rate(lambda: _ours(checked), count),
    }
    offsets = [shard.index.offsets(0, shard.entries) for shard in shards]
    corpus = Corpus(plain, offsets, BATCH, LENGTH)
    for name, peer in PEERS.items():
        try:
            batches = peer(corpus)
            next(batches())
        except Unavailable as why:
            print(f"left out: {name}: {why}")
            continue
        found[name] = rate(batches, max(count // 8, 20))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        root = Path(directory) / "data"
        make_corpus(root, options.tokens)
        found = interleaved(contestants(root, options.batches), options.repeats)
        restored = interleaved({"restore": restore(root)}, options.repeats)["restore"]
    limit = found["limit: random rows of a memmap"].median
    rows = [(name, f"{s.median:.0f}", s.spread, f"{s.median / limit:.2f}") for name, s in found.items()]
    columns = [
        Column("loader"),
        Column("M tokens per CPU s", True),
        Column("spread"),
        Column("of the memmap limit", True),
    ]
    print(table(columns, rows, style=Style(False)))
    print(f"restore at sample {RESTORE_AT:,}: {restored.median:.3f} CPU s ({restored.spread})")
    figures = {name: {"m_tokens_per_cpu_s": s.values, "median": s.median} for name, s in found.items()}
    facts = {"figures": figures, "restore_cpu_s": restored.values, "tokens": options.tokens, "batch": [BATCH, LENGTH]}
    print(write_results("data", facts))


if __name__ == "__main__":
    main()
