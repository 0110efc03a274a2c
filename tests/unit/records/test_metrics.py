"""Metrics of many jobs read as one series, and the proof by steps that were computed twice."""

import json
import math
import struct
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.errors import StorageFailed
from unbroken.files import Files
from unbroken.records.jsonl import plain
from unbroken.records.layout import Layout
from unbroken.records.metrics import (
    MOST_WAITING,
    JobRows,
    MetricsWriter,
    Mismatch,
    Number,
    Recheck,
    Recomputed,
    Row,
    _line,
    bits_of,
    compare_recomputed,
    is_exact,
    lost_values,
    read_metrics,
    stitch,
)
from unbroken.testing import FaultyDisk, MemoryDisk, Shorten, at_nth

RUN = Layout(Path("/run"))


def _loss(step: int) -> float:
    return 10.0 / (step + 3)


def _job(layout: Layout, job: int, start: int, end: int, *, poison: int | None = None, comparable: bool = True) -> None:
    """A job that resumes from ``start`` and is killed after ``end``; ``poison`` is a step with one wrong bit."""
    writer = MetricsWriter(layout, job, start=start, is_comparable=comparable)
    for step in range(start + 1, end + 1):
        loss = _loss(step) if step != poison else math.nextafter(_loss(step), 0.0)
        writer.write(step, {"loss": loss, "tokens_per_s": 1000.0 + job})


def test_a_line_holds_the_number_and_its_bits(tmp_path: Path) -> None:
    writer = MetricsWriter(Layout(tmp_path), 5, start=11)
    writer.write(12, {"loss": 2.31, "seen": 7})
    writer.close()
    head, line = map(json.loads, (tmp_path / "metrics" / "job-0005.jsonl").read_text().splitlines())
    assert head == {"schema": "unbroken.metrics/1", "job": 5, "start": 11, "is_comparable": True}
    assert line == {"step": 12, "loss": 2.31, "seen": 7, "bits": {"loss": "0x1.27ae147ae147bp+1", "seen": "7"}}


@given(st.floats() | st.integers())
def test_bits_are_equal_exactly_when_the_numbers_are(value: int | float) -> None:
    text = bits_of(value)
    if isinstance(value, float):
        back = float.fromhex(text)
        assert math.isnan(value) if math.isnan(back) else struct.pack("d", back) == struct.pack("d", value)
        assert bits_of(-value) != text or math.isnan(value)
    else:
        assert int(text) == value


_NUMBERS = st.one_of(st.floats(), st.integers(-(10**300), 10**300), st.booleans(), st.floats().map(np.float64))


@given(st.dictionaries(st.text(max_size=8).filter(lambda name: name not in ("step", "bits")), _NUMBERS, max_size=4))
def test_a_line_made_by_hand_is_what_json_makes_of_it(values: dict[str, Number]) -> None:
    bits = {name: bits_of(value) for name, value in values.items()}
    assert _line(3, values) == json.dumps({"step": 3, **plain(values), "bits": bits})


@pytest.mark.promise("X3")
def test_after_a_kill_the_steps_computed_twice_agree_bit_for_bit(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    _job(layout, 1, 0, 900)
    _job(layout, 2, 180, 1000)
    found = read_metrics(layout)
    assert found.recomputed == Recomputed(720, 720)
    assert len(found.lost) == 720 and {row.job for row in found.lost} == {1}
    assert [step for step, _ in found.series("loss")] == list(range(1, 1001))
    assert {found.kept[step].job for step in range(181, 1001)} == {2}
    assert found.series("tokens_per_s")[0] == (1, 1001.0)


@pytest.mark.promise("X3")
def test_one_wrong_bit_is_reported_with_its_step(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    _job(layout, 1, 0, 100)
    _job(layout, 2, 50, 100, poison=77)
    found = read_metrics(layout).recomputed
    first, second = bits_of(_loss(77)), bits_of(math.nextafter(_loss(77), 0.0))
    assert found == Recomputed(50, 49, (Mismatch(77, "loss", 1, first, 2, second),))
    sentence = found.sentence()
    assert sentence is not None
    assert first in sentence and second in sentence and "77" in sentence


def test_a_step_computed_three_times_is_compared_with_the_time_before_each_time(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    _job(layout, 1, 0, 30)
    _job(layout, 2, 10, 20)
    _job(layout, 3, 10, 40)
    found = read_metrics(layout)
    assert found.recomputed == Recomputed(30, 30)
    assert [(row.job, row.step) for row in found.lost] == [
        *((1, step) for step in range(11, 31)),
        *((2, step) for step in range(11, 21)),
    ]


def test_a_job_with_an_accepted_difference_is_not_compared_with_those_before_it(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    _job(layout, 1, 0, 30)
    _job(layout, 2, 10, 30, poison=15, comparable=False)
    _job(layout, 3, 20, 30)
    assert read_metrics(layout).recomputed == Recomputed(10, 10)
    assert sorted(lost_values(layout, job=4, start=5).lost) == list(range(11, 31))


def test_a_clean_stop_loses_nothing_and_proves_nothing(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    _job(layout, 1, 0, 30)
    _job(layout, 2, 30, 60)
    found = read_metrics(layout)
    assert found.lost == () and found.recomputed.sentence() is None and len(found.kept) == 60
    assert lost_values(layout, job=3, start=60).is_done


def test_a_run_without_metrics_is_empty(tmp_path: Path) -> None:
    found = read_metrics(Layout(tmp_path))
    assert (dict(found.kept), found.lost, found.recomputed, found.torn) == ({}, (), Recomputed(), 0)


def test_speeds_differ_and_are_no_mismatch() -> None:
    assert all(map(is_exact, ("loss", "train/loss", "val_loss", "eval.loss", "grad_norm", "lr", "a/learning_rate")))
    assert not any(map(is_exact, ("tokens_per_s", "seconds", "glossary", "lossless", "loss/seconds")))


@pytest.mark.promise("X3")
def test_the_live_check_finds_what_reading_finds_and_forgets_what_it_has_compared(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    _job(layout, 1, 0, 100)
    recheck = lost_values(layout, job=2, start=90)
    assert len(recheck.lost) == 10
    assert recheck.check(91, {"loss": _loss(91), "tokens_per_s": 5.0}) is None
    mismatch = recheck.check(92, {"loss": _loss(93)})
    assert mismatch == Mismatch(92, "loss", 1, bits_of(_loss(92)), 2, bits_of(_loss(93)))
    assert mismatch.as_json()["first_job"] == 1
    assert recheck.check(93, {"tokens_per_s": 5.0}) is None
    for step in range(94, 200):
        assert recheck.check(step, {"loss": _loss(step)}) is None
    assert recheck.is_done and recheck.as_json() == {"compared": 9, "agreeing": 8}
    assert recheck.result == Recomputed(9, 8, (mismatch,))


def test_two_nans_agree_and_a_nan_and_a_number_do_not() -> None:
    lost = {1: Row(1, 1, {"loss": math.nan}, {"loss": "nan"}), 2: Row(2, 1, {"loss": math.nan}, {"loss": "nan"})}
    recheck = Recheck(2, lost)
    assert recheck.check(1, {"loss": math.nan}) is None
    assert recheck.check(2, {"loss": 1.0}) is not None


def test_minus_zero_is_not_zero() -> None:
    recheck = Recheck(2, {1: Row(1, 1, {"loss": 0.0}, {"loss": bits_of(0.0)})})
    assert recheck.check(1, {"loss": -0.0}) is not None


def test_numbers_that_json_has_no_word_for_come_back(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    MetricsWriter(layout, 1, start=0).write(1, {"loss": math.nan, "a": math.inf, "b": -math.inf})
    text = (tmp_path / "metrics" / "job-0001.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    values = read_metrics(layout).kept[1].values
    assert math.isnan(values["loss"]) and (values["a"], values["b"]) == (math.inf, -math.inf)


def test_reserved_names_and_values_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    writer = MetricsWriter(Layout(tmp_path), 1, start=0)
    with pytest.raises(ValueError, match="step"):
        writer.write(1, {"step": 1.0})
    with pytest.raises(TypeError, match="str"):
        writer.write(1, {"loss": "2.3"})  # type: ignore[dict-item]


def test_lines_wait_until_the_flush_and_only_a_durable_one_syncs() -> None:
    disk = FaultyDisk(MemoryDisk([RUN.run]))
    writer = MetricsWriter(RUN, 1, start=0, every=10, files=Files(disk))
    for step in range(1, 6):
        writer.write(step, {"loss": 1.0})
    assert disk.names == []
    writer.flush()
    assert len(read_metrics(RUN, Files(disk)).kept) == 5
    assert "sync_file" not in disk.names
    writer.flush(durable=True)
    assert "sync_file" in disk.names
    assert isinstance(disk.inner, MemoryDisk)
    assert len(read_metrics(RUN, Files(disk.inner.after_crash())).kept) == 5


def test_lines_that_could_not_be_written_are_written_with_the_next() -> None:
    disk = FaultyDisk(MemoryDisk([RUN.run]), at_nth("write", 2, Shorten(5, then=28)))
    writer = MetricsWriter(RUN, 1, start=0, every=1, files=Files(disk))
    writer.flush()
    writer.write(1, {"loss": 1.0})
    with pytest.raises(StorageFailed):
        writer.write(2, {"loss": 2.0})
    writer.write(3, {"loss": 3.0})
    found = read_metrics(RUN, Files(disk))
    assert found.series("loss") == [(1, 1.0), (2, 2.0), (3, 3.0)] and found.torn == 1


def test_a_storage_that_refuses_for_long_does_not_fill_the_memory() -> None:
    disk = FaultyDisk(MemoryDisk([RUN.run]))
    writer = MetricsWriter(RUN, 1, start=0, every=10 * MOST_WAITING, files=Files(disk))
    for step in range(1, MOST_WAITING + 101):
        writer.write(step, {"loss": 1.0})
    writer.flush()
    assert list(read_metrics(RUN, Files(disk)).kept) == list(range(101, MOST_WAITING + 101))


def test_two_lines_of_one_step_hold_different_metrics(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    writer = MetricsWriter(layout, 1, start=0)
    writer.write(1, {"loss": 1.0})
    writer.write(1, {"val_loss": 2.0})
    assert read_metrics(layout).kept[1].values == {"loss": 1.0, "val_loss": 2.0}


def test_a_file_whose_first_line_is_torn_starts_before_its_first_step(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    _job(layout, 1, 0, 10)
    _job(layout, 2, 5, 10)
    path = tmp_path / "metrics" / "job-0002.jsonl"
    path.write_bytes(b"\0\0\0" + path.read_bytes()[7:])
    found = read_metrics(layout)
    assert found.recomputed == Recomputed(5, 5) and found.torn == 1


def test_lines_that_are_none_of_ours_are_counted(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    _job(layout, 1, 0, 2)
    with (tmp_path / "metrics" / "job-0001.jsonl").open("a") as record:
        record.write(
            '{"loss": 3}\n{"step": "x"}\n{"step": 9, "bits": 3}\n{"step": 3, "loss": [], "bits": {"loss": 1}}\n'
        )
    found = read_metrics(layout)
    assert found.torn == 3 and found.kept[3] == Row(3, 1, {}, {})


KILLS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), min_size=1, max_size=6)


@given(KILLS)
def test_whatever_the_kills_an_exact_run_agrees_and_counts_every_step_again(kills: list[tuple[int, int]]) -> None:
    jobs, reached, computed, repeated = list[JobRows](), 0, set[int](), 0
    for number, (back, length) in enumerate(kills, start=1):
        start = max(0, reached - back)
        rows = [_row(step, number) for step in range(start + 1, start + length + 1)]
        jobs.append(JobRows(number, start, True, rows))
        repeated += sum(row.step in computed for row in rows)
        computed |= {row.step for row in rows}
        reached = start + length
    assert compare_recomputed(jobs) == Recomputed(repeated, repeated)


def _row(step: int, job: int) -> Row:
    values: dict[str, Number] = {"loss": _loss(step)}
    return Row(step, job, values, {"loss": bits_of(_loss(step))})


@settings(deadline=None, max_examples=60)
@given(tail_bytes=st.sampled_from([1, 300, 1 << 16]), kills=KILLS, asked=st.integers(0, 60), torn=st.integers(0, 40))
def test_the_end_of_the_files_is_enough_to_know_what_was_lost(
    tail_bytes: int, kills: list[tuple[int, int]], asked: int, torn: int
) -> None:
    files, reached, expected = Files(MemoryDisk()), 0, dict[int, tuple[int, str]]()
    files.make_directory(RUN.run)
    for number, (back, length) in enumerate(kills, start=1):
        start = max(0, reached - back)
        writer = MetricsWriter(RUN, number, start=start, files=files)
        for step in range(start + 1, start + length + 1):
            writer.write(step, {"loss": _loss(step) + number})
            expected |= {step: (number, bits_of(_loss(step) + number))} if step > asked else {}
        # A kill in the middle of a line, anywhere in it.
        files.appending(RUN.metrics / f"job-{number:04}.jsonl").append(b'{"step": 70, "loss": 1.0, "bits": {'[:torn])
        reached = start + length
    with mock.patch("unbroken.records.jsonl._TAIL_BYTES", tail_bytes):
        found = lost_values(RUN, job=len(kills) + 1, start=asked, files=files).lost
    assert {step: (row.job, row.bits["loss"]) for step, row in found.items()} == expected


def test_what_was_committed_is_not_read_again(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    _job(layout, 1, 0, 2_000)
    path = tmp_path / "metrics" / "job-0001.jsonl"
    text = path.read_text().splitlines(keepends=True)
    # The middle of the file: lines that would be met if all of it were read.
    path.write_text("".join([*text[:10], '{"step": 5000, "loss": 1.0, "bits": {"loss": "1"}}\n', *text[10:]]))
    assert path.stat().st_size > 2 * 65_536
    assert sorted(lost_values(layout, job=2, start=1_990).lost) == list(range(1_991, 2_001))
    assert 5000 in read_metrics(layout).kept


def test_a_file_whose_steps_are_not_in_order_is_read_all_the_same() -> None:
    rows = [_row(step, 1) for step in (1, 2, 9, 4, 3, 8)]
    found = stitch([JobRows(1, 0, True, rows), JobRows(2, 3, True, [_row(4, 2)])])
    assert sorted(found.kept) == [1, 2, 3, 4] and [row.step for row in found.lost] == [4, 8, 9]
