"""Digests of sequences, killed while they are kept: whole or not there, and nothing blocks the next."""

import atexit
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from tests.unit.data.streams import make_stream
from unbroken.data.packing.sequence_digests import SequenceDigests
from unbroken.data.stream import Stream
from unbroken.disk import Disk
from unbroken.files import Files
from unbroken.testing import ERRORS, Kill, MemoryDisk, crash_points, crash_states, tree

CACHE = Path("/cache")


class _Made:
    """One small stream on the real disk, made when it is first asked for; its digests go to a disk of the test's."""

    stream: Stream | None = None

    @classmethod
    def get(cls) -> Stream:
        if cls.stream is None:
            home = TemporaryDirectory()
            atexit.register(home.cleanup)
            cls.stream = make_stream(Path(home.name), {"code": {"0": [9, 5, 40]}, "web": {"0": [12]}})
        return cls.stream


def digests(disk: Disk, token: str) -> SequenceDigests:
    stream = _Made.get()
    return SequenceDigests(stream.buckets, stream.shards, 32, cache=CACHE, files=Files(disk), token=token)


def with_scratch() -> MemoryDisk:
    """A cache in which somebody who took digests was killed."""
    whole = MemoryDisk([CACHE])
    digests(whole, "whole").prepare()
    disk = MemoryDisk([CACHE, CACHE / "reads"])
    for node in Files(whole).list_directory(CACHE / "reads"):
        Files(disk).write_new(CACHE / "reads" / f".{node.name}-dead", [b"half"])
    disk.sync_all()
    return disk


def takes_digests(disk: Disk) -> None:
    """Take the digests of every group, keep them, and clear away what the killed one left."""
    digests(disk, "mine").prepare()


@pytest.mark.promise("X7")
def test_after_every_crash_the_digests_are_whole_or_taken_again_and_nothing_is_left() -> None:
    finished = with_scratch()
    takes_digests(finished)
    trials = 0
    for trial in crash_points(with_scratch, takes_digests, (Kill("before"), Kill("during"), *ERRORS)):
        for words, disk in (("the process was killed", trial.disk), *crash_states(trial.disk)):
            later = digests(disk, "other")
            later.prepare()
            for bucket in _Made.get().buckets:
                asked = np.arange(bucket.sequences)
                found = later.of(bucket, 0, asked).tolist()
                assert found == digests(finished, "reader").of(bucket, 0, asked).tolist(), (str(trial), words)
            assert tree(disk).keys() == tree(finished).keys(), (str(trial), words)
            trials += 1
    assert trials > 20
