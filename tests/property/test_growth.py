"""A stream that grows, wherever and however often: what was served stays, and every pass has every sequence once."""

import json
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.by_hand import ByHand
from tests.unit.data.making import make_bucket
from unbroken.data.corpus.catalogue import Corpus, open_corpus
from unbroken.data.order.schedule import DataGeneration, Exhausted, OnExhausted, Phase
from unbroken.data.stream import Stream
from unbroken.data.stream_record import GROW, StreamRecord, read_stream_record, resume_stream, stream_record

EOD = 256
SEED = 5
HORIZON = 150
# Buckets of different sizes: the small ones have often not been drawn yet when an epoch has begun.
SIZES = {"a": (4, 7, 2, 5), "b": (1, 1, 2, 1), "c": (2, 3, 1, 6)}

Document = tuple[int, int, int]  # bucket, shard and entry: the tokens of the only document in it
Shards = frozenset[tuple[str, int]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """All shards there ever are; every document fills a sequence and says where it stands."""
    root = tmp_path_factory.mktemp("grown")
    for bucket, (name, sizes) in enumerate(SIZES.items()):
        shards = {str(shard): [[bucket, shard, entry, EOD] for entry in range(n)] for shard, n in enumerate(sizes)}
        make_bucket(root / "train" / name, shards)
    return open_corpus(root)


def part_of(corpus: Corpus, shards: Shards) -> Corpus:
    """The folder when only these shards were there."""
    buckets = [
        replace(bucket, shards=tuple(each for each in bucket.shards if (bucket.name, int(each.name)) in shards))
        for bucket in corpus.buckets
    ]
    return replace(corpus, buckets=tuple(bucket for bucket in buckets if bucket.shards))


@dataclass(frozen=True)
class Event:
    """What holds from the ``at``-th place of those there are on: 0 is where the last event was, -1 is the end."""

    at: int
    joining: Shards
    epochs: int | None
    on_exhausted: OnExhausted


@dataclass(frozen=True)
class History:
    phases: tuple[Phase, ...] | None
    events: tuple[Event, ...]


every_shard = [(name, shard) for name, sizes in SIZES.items() for shard in range(len(sizes))]
on_exhausted_choices: st.SearchStrategy[OnExhausted] = st.sampled_from(["halt", "renormalise"])


@st.composite
def histories(draw: st.DrawFn) -> History:
    since = draw(st.lists(st.integers(0, 4), min_size=len(every_shard), max_size=len(every_shard)))
    since[0] = 0
    epochs = draw(st.integers(1, 3) | st.none())
    on_exhausted = draw(on_exhausted_choices)
    events = []
    for number in range(draw(st.integers(2, 5))):
        joining = frozenset(each for each, era in zip(every_shard, since, strict=True) if era == number)
        place = st.sampled_from([0, -1]) | st.integers(0, HORIZON)
        events.append(Event(draw(place) if number else 0, joining, epochs, on_exhausted))
        if draw(st.integers(0, 3)) == 0:
            epochs, on_exhausted = draw(st.integers(1, 3) | st.none()), draw(on_exhausted_choices)
    names = sorted({name for name, _ in events[0].joining})
    mixes = st.dictionaries(st.sampled_from(names), st.fractions(0, 1, max_denominator=6), min_size=1)
    phase = st.builds(
        lambda samples, mix: Phase(samples, tuple(mix.items())),
        st.integers(1, 30),
        mixes.filter(lambda mix: any(mix.values())),
    )
    phases = draw(st.none() | st.lists(phase, min_size=1, max_size=3).map(tuple))
    return History(phases, tuple(events))


def drawn(stream: Stream, limit: int = HORIZON) -> list[Document]:
    """The sequences themselves, in the order in which they are read."""
    last = limit if stream.end is None else min(stream.end, limit)
    return [(row[0], row[1], row[2]) for row in stream.read(range(last)).tokens.tolist()] if last else []


@dataclass
class Reader:
    """Somebody who ticks off every sequence as it comes; buckets are read pass by pass together, or each alone."""

    together: bool
    held: dict[str, set[Document]] = field(default_factory=lambda: {name: set() for name in SIZES})
    unread: dict[str, set[Document]] = field(default_factory=lambda: {name: set() for name in SIZES})
    passes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SIZES, 0))

    def join(self, shards: Shards) -> None:
        for name, shard in shards:
            new = {(list(SIZES).index(name), shard, entry) for entry in range(SIZES[name][shard])}
            self.held[name] |= new
            self.unread[name] |= new

    def _beside(self, name: str) -> list[str]:
        return list(SIZES) if self.together else [name]

    def has_more(self, name: str, epochs: int | None) -> bool:
        """Whether a bucket, or any where they are read together, has something left."""
        is_left = any(self.unread[each] for each in self._beside(name))
        return epochs is None or self.passes[name] + 1 < epochs or (is_left and self.passes[name] < epochs)

    def take(self, sequence: Document) -> None:
        name = list(SIZES)[sequence[0]]
        if not any(self.unread[each] for each in self._beside(name)):
            for each in self._beside(name):
                self.unread[each] = self.held[each].copy()
                self.passes[each] += 1
        assert sequence in self.unread[name], f"{sequence} is read twice in pass {self.passes[name]}, or not yet there"
        self.unread[name].remove(sequence)


@dataclass
class Told:
    """A history as it went: the stream after each event, and the sample of each."""

    streams: list[Stream] = field(default_factory=list)
    at: list[int] = field(default_factory=list)


def recorded(stream: Stream) -> StreamRecord:
    return read_stream_record(json.loads(json.dumps(stream_record(stream))))


def live(corpus: Corpus, history: History) -> Told:
    """Let a run go through its history as a loader does: record, come back to more data, accept it, continue."""
    results, here = Told(), frozenset[tuple[str, int]]()
    for event in history.events:
        here |= event.joining
        fresh = Stream(
            part_of(corpus, here),
            max_length=4,
            seed=SEED,
            phases=history.phases,
            epochs=event.epochs,
            on_exhausted=event.on_exhausted,
        )
        if not results.streams:
            results.streams, results.at = [fresh], [0]
            continue
        before = results.streams[-1]
        last = HORIZON if before.end is None else min(before.end, HORIZON)
        at = last if event.at == -1 else results.at[-1] + event.at % (last - results.at[-1] + 1)
        results.at.append(at)
        results.streams.append(resume_stream(recorded(before), fresh, at, {GROW}).stream)
    return results


def read_through(results: Told, history: History) -> None:
    """Read the stream to its end, with every event at its sample, and tick off what comes."""
    stream, reader = results.streams[-1], Reader(together=history.phases is None)
    rows = drawn(stream)
    for event, at, until in zip(history.events, results.at, [*results.at[1:], len(rows)], strict=True):
        reader.join(event.joining)
        for sequence in rows[at:until]:
            assert reader.has_more(list(SIZES)[sequence[0]], event.epochs)
            reader.take(sequence)
    if stream.end is not None and history.phases is None:
        assert not reader.has_more("a", history.events[-1].epochs)
        assert stream.exhausted == tuple(Exhausted(stream.end, each.name, 0) for each in stream.buckets)


@pytest.mark.promise("C13")
@given(histories())
@settings(deadline=None, max_examples=60)
def test_growth_changes_nothing_that_was_served(corpus: Corpus, history: History) -> None:
    results = live(corpus, history)
    for before, after, at in zip(results.streams, results.streams[1:], results.at[1:], strict=False):
        assert drawn(after, at) == drawn(before, at)


@pytest.mark.promise("C13")
@given(histories())
@settings(deadline=None, max_examples=150)
def test_every_pass_has_every_sequence_once_however_often_the_data_grows(corpus: Corpus, history: History) -> None:
    read_through(live(corpus, history), history)


@pytest.mark.promise("C13")
@pytest.mark.parametrize("at", range(16))
def test_data_joins_the_epoch_that_is_being_served_at_every_sample_of_three(corpus: Corpus, at: int) -> None:
    first, more = frozenset({("a", 0), ("b", 0)}), frozenset({("a", 2), ("b", 1), ("c", 0)})
    results = live(corpus, history := History(None, (Event(0, first, 3, "halt"), Event(at, more, 3, "halt"))))
    read_through(results, history)
    # 5 sequences an epoch, 10 from the one on in which the others joined: at its end they still join it.
    assert results.streams[-1].end == 30 - 5 * (max(at - 1, 0) // 5)


@pytest.mark.promise("G18")
@given(histories().filter(lambda each: each.phases is not None))
@settings(deadline=None, max_examples=80)
def test_where_a_curriculum_that_grew_ends_is_what_drawing_by_hand_gives(corpus: Corpus, history: History) -> None:
    assert history.phases is not None
    results = live(corpus, history)
    stream, hand = results.streams[-1], ByHand(history.phases, SEED)
    here = frozenset[tuple[str, int]]()
    for event, until in zip(history.events, [*results.at[1:], HORIZON], strict=True):
        here |= event.joining
        held = {name: sum(SIZES[name][shard] for each, shard in here if each == name) for name in SIZES}
        hand.run(DataGeneration(0, held, event.epochs, event.on_exhausted), until)
    assert [list(SIZES)[bucket] for bucket, _, _ in drawn(stream)] == [name for name, _ in hand.out]
    if hand.is_over:
        assert (stream.end, list(stream.exhausted)) == (len(hand.out), hand.exhausted)


@pytest.mark.promise("C13")
@given(histories(), st.integers(0, HORIZON))
@settings(deadline=None, max_examples=40)
def test_a_run_that_grew_resumes_from_its_record(corpus: Corpus, history: History, position: int) -> None:
    results = live(corpus, history)
    stream, last = results.streams[-1], history.events[-1]
    position = position if stream.end is None else min(position, stream.end)
    fresh = Stream(
        stream.corpus,
        max_length=4,
        seed=SEED,
        phases=history.phases,
        epochs=last.epochs,
        on_exhausted=last.on_exhausted,
    )
    again = resume_stream(recorded(stream), fresh, position, ())
    assert not again.notices
    assert again.stream.eras == stream.eras
    assert (again.stream.end, again.stream.exhausted) == (stream.end, stream.exhausted)
    assert drawn(again.stream) == drawn(stream)
