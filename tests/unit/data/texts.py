"""Folders of text for the tests of tokenization, the same documents in every format."""

import gzip
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import zstandard

from unbroken.data.corpus.shards import bin_beside, map_tokens, open_index
from unbroken.data.ingest.encoders import ByteEncoder

DOCUMENTS = tuple(f"document {number} says: {'naïve 東京 🙂 ' * (number % 5)}ok\n\n" for number in range(40))
EOD = ByteEncoder.identity.eod_id


def lines(documents: Sequence[str], field: str = "text") -> bytes:
    return "".join(json.dumps({"id": 7, field: document}) + "\n" for document in documents).encode()


def write_format(folder: Path, suffix: str, documents: Sequence[str]) -> None:
    """Write documents into a folder in one of the formats."""
    folder.mkdir(parents=True)
    if suffix == ".txt":
        for number, document in enumerate(documents):
            (folder / f"{number:04d}.txt").write_bytes(document.encode())
    elif suffix == ".parquet":
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": list(documents)}), folder / "all.parquet", row_group_size=7)
    else:
        data = lines(documents)
        packed = {".jsonl": data, ".jsonl.gz": gzip.compress(data), ".jsonl.zst": zstandard.compress(data)}
        (folder / f"all{suffix}").write_bytes(packed[suffix])


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def shards(folder: Path) -> dict[str, bytes]:
    """The files of shards below a folder, without what names their sources."""
    return {name: data for name, data in tree(folder).items() if name.endswith((".bin", ".idx"))}


def entries(folder: Path) -> Iterator[list[int]]:
    """Every entry of the shards right in a folder, as ids."""
    for idx in sorted(folder.glob("*.idx")):
        index = open_index(idx)
        tokens, offsets = map_tokens(bin_beside(idx), index), index.offsets(0, index.entries)
        for first, last in itertools.pairwise(offsets):
            yield np.asarray(tokens[first:last]).tolist()


def texts_of(folder: Path) -> list[str]:
    """The documents in shards of bytes."""
    found = list(entries(folder))
    assert all(entry[-1] == EOD and EOD not in entry[:-1] for entry in found)
    return [bytes(entry[:-1]).decode() for entry in found]
