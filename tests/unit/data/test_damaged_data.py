"""Training data that was damaged is not trained on, without any setting."""

import logging
from pathlib import Path

import numpy as np
import pytest

from tests.exact.gpt_world import tiny, tokenize_text, write_text
from tests.unit.data.streams import TWO_BUCKETS, make_corpus, open_stream
from unbroken.data import Loader, Stream, open_corpus, seal_shards
from unbroken.data.corpus.listing import LISTING
from unbroken.data.packing.sequence_digests import SequenceDigests
from unbroken.errors import DataDamaged, SequenceDamaged
from unbroken.files import LOCAL

pytestmark = pytest.mark.promise("U11")


def _flip(path: Path, at: int = 101) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def _read_all(root: Path) -> int:
    stream = Stream(open_corpus(root), max_length=32)
    return sum(len(batch.tokens) for batch in Loader(stream, global_batch_size=1))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    make_corpus(tmp_path / "data", TWO_BUCKETS)
    return tmp_path / "data"


def test_a_loop_does_not_get_damaged_data(data: Path) -> None:
    assert _read_all(data) > 100
    _flip(data / "train/web/a/0.bin")
    with pytest.raises(SequenceDamaged) as damage:
        _read_all(data)
    assert damage.value.shards == ("web/a/0",)


def test_damage_from_before_the_first_read_is_found(data: Path) -> None:
    _flip(data / "train/code/1.bin")
    with pytest.raises(DataDamaged) as damage:
        _read_all(data)
    assert [each.partition(":")[0] for each in damage.value.findings] == ["code/1.bin"]


def test_shards_of_another_tool_are_checked_from_the_first_read_on(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for listing in data.rglob(LISTING):
        listing.unlink()
    with caplog.at_level(logging.INFO, logger="unbroken"):
        _read_all(data)
        first = caplog.text
        _read_all(data)
    assert "3 shards without shards.json" in first and f"unbroken data seal {data}/train/code" in first
    assert caplog.text == first, "said once"
    _flip(data / "train/code/0.bin")
    with pytest.raises(SequenceDamaged) as damage:
        _read_all(data)
    assert damage.value.shards == ("code/0",)
    # Listed as they are now, they are what they are listed as.
    seal_shards(data / "train", None)
    assert _read_all(data) > 100


def test_ranks_that_open_the_data_together_share_the_reading(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = open_stream(data, check_reads=False)
    taken: list[str] = []
    ranks = [
        SequenceDigests(stream.buckets, stream.shards, 32, cache=stream.cache_dir, files=LOCAL, token=token)
        for token in ("a", "b")
    ]
    take = SequenceDigests._take

    def counted(self: SequenceDigests, bucket: object, group: int) -> object:
        taken.append(f"{bucket}-{group}")
        if self is ranks[0] and len(taken) == 1:
            # The second rank comes while the first is at its first group.
            ranks[1].prepare()
        return take(self, bucket, group)  # type: ignore[arg-type]

    monkeypatch.setattr(SequenceDigests, "_take", counted)
    ranks[0].prepare()
    groups = sum(len(bucket.group_digests) for bucket in stream.buckets)
    assert groups == 2 and len(taken) == groups + 1


def test_digests_beyond_the_memory_they_may_take_are_read_again(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = open_stream(data)
    monkeypatch.setattr("unbroken.data.packing.sequence_digests._HELD_BYTES", 8)
    samples = range(len(checked))
    assert np.array_equal(open_stream(data).read(samples).tokens, checked.read(samples).tokens)


def test_the_trainer_ends_at_damaged_data(tmp_path: Path) -> None:
    from unbroken.gpt import train

    data = tokenize_text(write_text(tmp_path / "text"), tmp_path / "data")
    assert train(tiny(data, tmp_path / "sound", max_steps=4)).is_completed
    for shard in data.glob("train/**/*.bin"):
        shard.write_bytes(bytes(each ^ 1 for each in shard.read_bytes()))
    with pytest.raises(SequenceDamaged):
        train(tiny(data, tmp_path / "damaged", max_steps=4))
