"""A sample can be told from: bucket, epoch, and the document of each of its windows."""

from pathlib import Path

import pytest

from tests.unit.data.corpora import EOD, texts_of, write_corpus
from unbroken.cli.data_show import describe
from unbroken.data.corpus.catalogue import open_corpus
from unbroken.data.stream import Stream


def test_the_windows_of_all_samples_tell_every_document_whole(tmp_path: Path) -> None:
    shards = {"a": [texts_of(range(1, 90, 4), 1), texts_of([200, 7], 2)], "b": [texts_of([15] * 9, 3)]}
    corpus = open_corpus(write_corpus(tmp_path, shards))
    stream = Stream(corpus, max_length=32, overlap_size=4, seed=3)
    results: dict[tuple[str, str, int], dict[int, int]] = {}
    for sample in range(len(stream)):
        found = describe(stream, sample)
        assert (found.sample, found.epoch, found.phase) == (sample, 0, 0)
        at = 0
        for window in found.windows:
            length = window.last - window.first
            fresh = enumerate(found.tokens[at : at + length][window.masked :], start=window.first + window.masked)
            document = results.setdefault((found.bucket, window.shard, window.document), {})
            entries = dict(fresh)
            assert not document.keys() & entries.keys()
            document.update(entries)
            at += length
        assert at == len(found.tokens)
    expected = {
        (bucket, f"{shard:05d}-000", number): [*text.encode(), EOD]
        for bucket, lists in shards.items()
        for shard, texts in enumerate(lists)
        for number, text in enumerate(texts)
    }
    assert {key: [found[place] for place in sorted(found)] for key, found in results.items()} == expected


def test_a_sample_beyond_the_end_is_refused(tmp_path: Path) -> None:
    stream = Stream(open_corpus(write_corpus(tmp_path, {"a": [texts_of([9] * 4)]})), max_length=16)
    with pytest.raises(IndexError):
        describe(stream, len(stream))
