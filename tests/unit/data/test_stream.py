"""Sample k is a pure function: each token once an epoch, the same wherever and however it is read."""

import pickle
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.data.streams import EOD, TWO_BUCKETS, held, lengths, make_corpus, make_stream, open_stream
from unbroken.cli.data_show import describe
from unbroken.data.corpus.catalogue import open_corpus
from unbroken.data.order.schedule import Phase
from unbroken.data.packing.rows import IGNORED, MOST, PADDING, Rows, TokenMaps
from unbroken.data.stream import Era, Stream
from unbroken.errors import DataDamaged, SequenceDamaged

HALF = Fraction(1, 2)
TWO_PHASES = (Phase(20, (("code", HALF), ("web", HALF))), Phase(15, (("code", Fraction(1)), ("web", Fraction(3)))))


def _all(stream: Stream) -> Rows:
    return stream.read(range(len(stream)))


def _same(one: Rows, other: Rows) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("tokens", "labels", "doc_ids"))


# ---- every token ----


@pytest.mark.promise("G15", "C13")
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(("max_length", "overlap"), [(32, 4), (32, 0), (16, 8), (7, 3), (200, 50)])
def test_the_fresh_tokens_of_one_epoch_are_the_corpus(
    max_length: int, overlap: int, packing: bool, tmp_path: Path
) -> None:
    stream = make_stream(tmp_path, max_length=max_length, overlap_size=overlap, packing=packing)
    rows, seen = _all(stream), Counter[tuple[str, str, int, int]]()
    whole = held(tmp_path)
    for sample in range(len(stream)):
        at, described = 0, describe(stream, sample)
        for number, window in enumerate(described.windows):
            key = described.bucket, window.shard, window.document
            document, length = whole[key], window.last - window.first
            assert rows.tokens[sample, at : at + length].tolist() == document[window.first : window.last]
            assert set(rows.doc_ids[sample, at : at + length].tolist()) == {number}
            fresh = range(window.first + window.masked, window.last)
            seen.update((*key, token) for token in fresh)
            at += length
        assert set(rows.doc_ids[sample, at:].tolist()) <= {PADDING}
    assert seen == Counter((*key, token) for key, document in whole.items() for token in range(len(document)))


@pytest.mark.promise("G15")
@pytest.mark.parametrize("overlap", [4, 1, 0])
def test_every_token_that_follows_another_is_learned_once(overlap: int, tmp_path: Path) -> None:
    rows = _all(make_stream(tmp_path, overlap_size=overlap))
    documents = held(tmp_path).values()
    learned = rows.labels[rows.labels != IGNORED]
    assert learned.size == sum(len(document) - 1 for document in documents)
    assert np.count_nonzero(learned == EOD) == sum(len(document) > 1 for document in documents)


def test_without_packing_a_sequence_has_one_document(tmp_path: Path) -> None:
    rows = _all(make_stream(tmp_path, packing=False))
    assert int(rows.doc_ids.max()) == 0
    assert int(_all(open_stream(tmp_path)).doc_ids.max()) > 0


# ---- the same samples however they are read ----


@pytest.mark.parametrize(
    "more", [{}, {"phases": TWO_PHASES}, {"shuffle": False}, {"epochs": 3}], ids=lambda more: "".join(more)
)
def test_a_sample_is_the_same_read_alone_in_any_order_or_after_opening_again(
    more: dict[str, Any], tmp_path: Path
) -> None:
    stream = make_stream(tmp_path, **more)
    count = min(len(stream), 120)
    together = stream.read(range(count))
    mixed = np.random.default_rng(0).permutation(count)
    assert _same(open_stream(tmp_path, **more).read(mixed), Rows(*(getattr(together, n)[mixed] for n in _NAMES)))
    alone = [open_stream(tmp_path, **more)[sample] for sample in range(0, count, 17)]
    assert np.array_equal(np.concatenate([each.tokens for each in alone]), together.tokens[::17])


_NAMES = ("tokens", "labels", "doc_ids")


def test_a_stream_handed_to_another_process_reads_the_same(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, phases=TWO_PHASES, check_reads=True)
    _all(stream)
    other = pickle.loads(pickle.dumps(stream))
    assert other.checks_reads and _same(_all(other), _all(stream))


def test_another_seed_is_another_order_of_the_same_samples(tmp_path: Path) -> None:
    one, other = make_stream(tmp_path), open_stream(tmp_path, seed=6)
    rows, others = _all(one).tokens.tolist(), _all(other).tokens.tolist()
    assert rows != others and sorted(rows) == sorted(others)


@pytest.mark.promise("C13")
def test_every_epoch_has_each_sequence_once_in_another_order(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, epochs=3)
    rows = _all(stream).tokens
    epochs = [each.tolist() for each in np.split(rows, 3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert len({str(epoch) for epoch in epochs}) == 3


def test_without_an_end_it_continues_for_ever_and_has_no_length(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, epochs=None)
    assert stream.end is None and stream[10**9].tokens.shape == (1, 32)
    with pytest.raises(TypeError):
        len(stream)


def test_beyond_the_end_there_is_no_sample(tmp_path: Path) -> None:
    stream = make_stream(tmp_path)
    for sample in (-1, len(stream)):
        with pytest.raises(IndexError):
            stream[sample]


# ---- growth ----


def test_shards_that_join_later_leave_every_sample_before_as_it_was_and_come_once(tmp_path: Path) -> None:
    before = make_stream(tmp_path)
    old, joined_at = _all(before).tokens.tolist(), 30
    known = before.eras[0]
    make_corpus(
        tmp_path, {"code": {**TWO_BUCKETS["code"], "2": lengths(30, 90, 4)}, "maths": {"0": lengths(20, 50, 5)}}
    )
    new = frozenset({("code", "2"), ("maths", "0")})
    grown = open_stream(tmp_path, eras=[known, Era(joined_at, new)])
    rows = _all(grown).tokens.tolist()
    assert rows[:joined_at] == old[:joined_at] and rows[joined_at : len(old)] != old[joined_at:]
    alone = Stream(open_corpus(tmp_path), max_length=32, overlap_size=4, seed=5, eras=[known, Era(len(old), new)])
    assert sorted(rows) == sorted(_all(alone).tokens.tolist()) and _all(alone).tokens.tolist()[: len(old)] == old


def test_eras_that_do_not_hold_each_shard_once_are_refused(tmp_path: Path) -> None:
    era = make_stream(tmp_path).eras[0]
    for eras in ([Era(0, frozenset())], [era, era], [Era(3, era.shards)]):
        with pytest.raises(ValueError, match="eras"):
            open_stream(tmp_path, eras=eras)


# ---- what is held, and what is looked at ----


class Counting(Stream):
    """Counts the samples it looks up."""

    looked = 0

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        self.looked += len(samples)
        return super().locate(samples)


def test_a_read_looks_at_no_more_than_it_returns_wherever_it_stands(tmp_path: Path) -> None:
    make_corpus(tmp_path, TWO_BUCKETS)
    stream = Counting(open_corpus(tmp_path), max_length=32, epochs=None)
    for sample in (0, 1_000, 10**7, 10**12):
        stream.looked = 0
        stream.read(range(sample, sample + 8))
        assert stream.looked == 8


@pytest.mark.promise("G14")
def test_no_more_than_a_bounded_number_of_shards_is_mapped_at_a_time(tmp_path: Path) -> None:
    shards = {f"{number:04}": [5, 9] for number in range(MOST + 60)}
    stream = make_stream(tmp_path, {"tiny": shards}, max_length=16)
    assert _same(_all(stream), _all(open_stream(tmp_path, max_length=16)))
    maps = TokenMaps(stream.shards, 16)
    for number in range(len(stream.shards)):
        assert maps[number].nbytes == 2 * 14
    assert len(maps) == MOST and maps[0].nbytes == 2 * 14


# ---- holding reads to their digests ----


def _flip(root: Path, at: int) -> None:
    path = root / "train" / "web" / "a" / "0.bin"
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_bit_that_flips_after_the_plan_was_made_is_caught_at_the_read_and_named(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, check_reads=True)
    _all(stream)
    _flip(tmp_path, 1234)
    for found in (stream, open_stream(tmp_path, check_reads=True)):
        with pytest.raises(SequenceDamaged) as damage:
            _all(found)
        assert damage.value.shards == ("web/a/0",)
        bad = damage.value.sample
        for sample in range(len(found)):
            if sample != bad:
                found[sample]
    assert _all(open_stream(tmp_path, check_reads=False)).tokens.shape == (len(stream), 32)


def test_digests_are_taken_only_of_shards_that_are_what_they_are_listed_as(tmp_path: Path) -> None:
    make_corpus(tmp_path, TWO_BUCKETS)
    _flip(tmp_path, 99)
    with pytest.raises(DataDamaged) as damage:
        open_stream(tmp_path, check_reads=True)
    assert "web/a/0.bin" in damage.value.findings[0]


def test_kept_digests_that_do_not_prove_themselves_are_taken_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = make_stream(tmp_path, check_reads=True)
    kept = sorted((stream.cache_dir / "reads").iterdir())
    assert kept
    for path in kept:
        path.write_bytes(path.read_bytes()[:-3])
    assert _same(_all(open_stream(tmp_path, check_reads=True)), _all(stream))
    assert caplog.text.count("computing them again") == len(kept)


def test_what_a_killed_process_left_of_the_digests_is_removed(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, check_reads=True)
    kept = sorted((stream.cache_dir / "reads").iterdir())
    left = kept[0].with_name(f".{kept[0].name}-0123")
    left.write_bytes(b"half")
    kept[0].unlink()
    open_stream(tmp_path, check_reads=True)
    assert sorted((stream.cache_dir / "reads").iterdir()) == kept


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"epochs": -1}, {"on_exhausted": "stop"}, {"max_length": 1 << 40}])
def test_what_no_stream_can_be_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    make_corpus(tmp_path, TWO_BUCKETS)
    corpus = open_corpus(tmp_path)
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} "):
        Stream(corpus, **{"max_length": 16, **wrong})


def test_a_seed_is_a_number_and_a_cache_may_be_text(tmp_path: Path) -> None:
    make_corpus(tmp_path, TWO_BUCKETS)
    corpus = open_corpus(tmp_path)
    with pytest.raises(TypeError, match="seed must be a whole number"):
        Stream(corpus, max_length=16, seed="a")  # type: ignore[arg-type]
    assert Stream(corpus, max_length=16, cache_dir=str(tmp_path / "plans")).cache_dir == tmp_path / "plans"
