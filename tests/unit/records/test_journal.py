"""The journal: what is written is read again, torn lines never break it, promises are durable."""

import errno
import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.errors import StorageFailed
from unbroken.files import Files
from unbroken.records.journal import DURABLE, KINDS, Journal, read_history, read_journal
from unbroken.records.layout import Layout
from unbroken.testing import FaultyDisk, MemoryDisk, Refuse, Shorten, Tail, at_nth

RUN = Layout(Path("/run"))
NOON = 1_700_000_000.25


def _journal(files: Files, job: int = 1) -> Journal:
    return Journal(RUN, job, clock=lambda: NOON, files=files)


def test_events_are_read_again_job_by_job_in_the_order_they_were_written(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    for job in (2, 11, 10_000):
        journal = Journal(layout, job, clock=lambda: NOON)
        journal.write("job-start", world_size=4)
        journal.write("commit", step=job, name=f"checkpoint-{job}", seconds=0.5)
        journal.close()
    facts = read_journal(layout)
    assert [(fact.job, fact.kind) for fact in facts] == [
        *((2, "job-start"), (2, "commit"), (11, "job-start"), (11, "commit")),
        *((10_000, "job-start"), (10_000, "commit")),
    ]
    assert (facts[1].at_s, facts[1].whole("step"), facts[1].text("name")) == (NOON, 2, "checkpoint-2")
    assert (facts[1].number("seconds"), facts[1].number("step")) == (0.5, 2.0)
    assert (facts[1].text("step"), facts[1].whole("name"), facts[1].number("name")) == (None, None, None)
    history = read_history(layout)
    assert history.jobs == (2, 11, 10_000) and history.torn == 0
    last = history.last("commit", job=11)
    assert last is not None and last.whole("step") == 11
    assert history.last("mirror") is None and len(history.of_kind("commit", "mirror")) == 3


def test_a_line_is_one_json_object_with_instant_and_kind_first(tmp_path: Path) -> None:
    Journal(Layout(tmp_path), 5, clock=lambda: NOON).write("stop", reason="SIGTERM")
    text = (tmp_path / "journal" / "job-0005.jsonl").read_text()
    assert text == '{"at": "2023-11-14T22:13:20.250+00:00", "kind": "stop", "reason": "SIGTERM"}\n'


def test_a_run_without_a_journal_has_no_events(tmp_path: Path) -> None:
    assert read_journal(Layout(tmp_path)) == []


def test_what_json_has_no_word_for_is_written_as_its_name(tmp_path: Path) -> None:
    journal = Journal(Layout(tmp_path), 1, clock=lambda: NOON)
    journal.write("save", loss=math.nan, worst=-math.inf, path=Path("a/b"), parts=("x", 1), nested={"y": math.inf})
    line = (tmp_path / "journal" / "job-0001.jsonl").read_text()
    assert "NaN" not in line and "Infinity" not in line
    values = read_journal(Layout(tmp_path))[0].values
    assert values == {"loss": "nan", "worst": "-inf", "path": "a/b", "parts": ["x", 1], "nested": {"y": "inf"}}


def test_an_invalid_event_is_rejected_before_anything_is_written(tmp_path: Path) -> None:
    journal = Journal(Layout(tmp_path), 1, clock=lambda: NOON)
    with pytest.raises(TypeError, match="object"):
        journal.write("save", thing=object())
    for kind in ("", "Job Start", "job_start"):
        with pytest.raises(ValueError, match="no event"):
            journal.write(kind)
    with pytest.raises(ValueError, match="no event"):
        journal.write("save", at="now")
    assert not (tmp_path / "journal").exists()


def test_every_kind_that_promises_something_is_a_kind_of_the_journal() -> None:
    assert set(KINDS) >= DURABLE


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_an_event_that_promises_something_survives_a_power_cut_and_carries_those_before_it(kind: str) -> None:
    disk = MemoryDisk([RUN.run])
    journal = _journal(Files(disk))
    journal.write("save", step=1)
    journal.write(kind, step=2)
    found = [fact.whole("step") for fact in read_journal(RUN, Files(disk.after_crash()))]
    assert found == ([1, 2] if kind in DURABLE else [])
    journal.write("save", durable=True)
    assert len(read_journal(RUN, Files(disk.after_crash()))) == 3


@pytest.mark.parametrize("tail", list(Tail))
def test_a_line_that_a_crash_tore_is_counted_and_the_next_writer_begins_behind_it(tail: Tail) -> None:
    disk = MemoryDisk([RUN.run])
    journal = _journal(Files(disk))
    journal.write("commit", step=1)
    journal.write("save", step=2)
    after = Files(disk.after_crash(tail=tail))
    _journal(after).write("commit", step=3)
    history = read_history(RUN, after)
    assert [fact.whole("step") for fact in history.events] == ([1, 2, 3] if tail is Tail.KEPT else [1, 3])
    assert history.torn == (tail in (Tail.HALF, Tail.ZEROED))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_write_that_was_cut_short_is_reported_and_does_not_spoil_the_next(code: int) -> None:
    disk = FaultyDisk(MemoryDisk([RUN.run]), at_nth("write", 1, Shorten(9, then=code)))
    journal = _journal(Files(disk))
    journal.write("commit", step=1)
    with pytest.raises(StorageFailed):
        journal.write("commit", step=2)
    journal.write("commit", step=3)
    history = read_history(RUN, Files(disk))
    assert [fact.whole("step") for fact in history.events] == [1, 3] and history.torn == 1


def test_a_sync_that_was_refused_is_reported() -> None:
    disk = FaultyDisk(MemoryDisk([RUN.run]), at_nth("sync_file", 0, Refuse(errno.EIO)))
    journal = _journal(Files(disk))
    with pytest.raises(StorageFailed):
        journal.write("commit", step=1)
    journal.write("commit", step=2)
    # What the kernel could not sync may read as zeros: the next line does not begin behind them.
    assert isinstance(disk.inner, MemoryDisk)
    content = Files(disk).read_bytes(RUN.journal / "job-0001.jsonl", limit_bytes=1000)
    assert b"\n\n{" in content


GARBAGE = [b"\0\0\0\0", b"[1, 2]", b'"text"', b"{", b'{"kind": 7}', b"\xff\xfe", b"[" * 100_000, b'{"at": "never"}']


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda each: repr(each[:16]))
def test_a_line_that_is_none_of_ours_is_counted_and_passed_by(tmp_path: Path, garbage: bytes) -> None:
    layout = Layout(tmp_path)
    Journal(layout, 1, clock=lambda: NOON).write("commit", step=1)
    with (tmp_path / "journal" / "job-0001.jsonl").open("ab") as record:
        record.write(garbage + b"\n")
    Journal(layout, 1, clock=lambda: NOON).write("commit", step=2)
    history = read_history(layout)
    assert [fact.whole("step") for fact in history.events] == [1, 2] and history.torn == 1


def test_an_instant_that_is_none_is_none_and_other_files_are_no_jobs(tmp_path: Path) -> None:
    (tmp_path / "journal" / "job-0003.jsonl").mkdir(parents=True)
    (tmp_path / "journal" / "notes.txt").write_text('{"kind": "commit"}\n')
    lines = [{"kind": "commit", "at": at} for at in (None, 7, "x", "2023-11-14", "2023-11-14T22:13:20+00:00")]
    (tmp_path / "journal" / "job-0001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = [(fact.job, fact.at_s) for fact in read_journal(Layout(tmp_path))]
    assert found == [(1, None)] * 4 + [(1, NOON - 0.25)]


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    journal = Journal(Layout(tmp_path), 1, clock=lambda: NOON)

    def write(thread: int) -> None:
        for number in range(200):
            journal.write("save", thread=thread, number=number, padding="x" * (7 * thread))

    threads = [threading.Thread(target=write, args=(each,)) for each in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    history = read_history(Layout(tmp_path))
    assert len(history.events) == 800 and history.torn == 0
    for each in range(4):
        assert [f.whole("number") for f in history.events if f.whole("thread") == each] == list(range(200))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text().filter(lambda name: name not in ("at", "kind", "self", "durable")), JSON, max_size=4))
def test_every_value_of_json_comes_back_as_it_was(facts: dict[str, Any]) -> None:
    files = Files(MemoryDisk([RUN.run]))
    _journal(files).write("save", **facts)
    history = read_history(RUN, files)
    assert [dict(fact.values) for fact in history.events] == [facts] and history.torn == 0
