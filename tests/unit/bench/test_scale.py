"""The prediction for larger runs: its formulas, and that the page shows what they give."""

import math
from dataclasses import replace

import pytest

from bench.scale import (
    BEGIN,
    CASES,
    END,
    EXCHANGES_OF_A_SAVE,
    GPU_SECONDS_BETWEEN_FAILURES,
    HOP_S,
    PAGE,
    SHARED_BYTES_PER_S_OF_A_GPU,
    Case,
    Measured,
    measured_here,
    predict,
    tables,
    with_tables,
)

# Numbers that make every formula computable by hand.
MEASURED = Measured(
    state_bytes=12e9,
    pause_s=0.1,
    lost_share=0.0,
    write_share=0.5,
    read_share=1.0,
    disk_write=2e9,
    disk_read=4e9,
    plan_piece_s=1e-3,
    describe_piece_s=2e-3,
    describe_again_piece_s=0.0,
    decode_piece_s=1e-3,
)
CASE = Case("two GPUs", 2e9, 2, 100, 1e6, is_shared=False)


def test_a_local_run_is_computed_by_hand() -> None:
    found = predict(CASE, MEASURED, restart_s=100.0)
    assert CASE.pieces == 800
    assert found.stall_s == pytest.approx(0.1 + EXCHANGES_OF_A_SAVE * HOP_S)
    assert found.stall_first_s == pytest.approx(found.stall_s + 0.8)
    assert found.durable_s == pytest.approx(24e9 / 1e9)
    assert found.durable_first_s == pytest.approx(24 + 1.6)
    assert found.restore_s == pytest.approx(24e9 / 4e9 + 0.8)
    assert found.mtbf_s == pytest.approx(GPU_SECONDS_BETWEEN_FAILURES / 2)


def test_interval_and_goodput_are_those_of_young_and_daly() -> None:
    often = GPU_SECONDS_BETWEEN_FAILURES / 2 / 10_000.0
    found = predict(CASE, MEASURED, restart_s=100.0, failures=often)
    assert found.mtbf_s == pytest.approx(10_000.0)
    assert math.sqrt(2 * 10_000.0 * found.stall_s) > 2 * found.durable_s
    assert found.interval_s == pytest.approx(math.sqrt(2 * 10_000.0 * found.stall_s))
    lost = found.interval_s / 2 + 24.0 + 100.0 + found.restore_s + 0.8
    assert found.lost_per_failure_s == pytest.approx(lost)
    assert found.goodput == pytest.approx((1 - lost / 10_000.0) / (1 + found.stall_s / found.interval_s))


def test_storage_that_is_shared_gives_each_gpu_its_share() -> None:
    found = predict(replace(CASE, is_shared=True), MEASURED, restart_s=0.0)
    assert found.durable_s == pytest.approx(24e9 / (0.5 * 2 * SHARED_BYTES_PER_S_OF_A_GPU))


def test_a_smaller_share_of_a_gpu_is_not_promised_a_shorter_pause() -> None:
    small, large = (predict(replace(CASE, parameters=size), MEASURED, restart_s=0.0).stall_s for size in (1e6, 20e9))
    assert small == predict(CASE, MEASURED, restart_s=0.0).stall_s
    assert large == pytest.approx(0.1 * 10 + EXCHANGES_OF_A_SAVE * HOP_S)


def test_the_page_shows_what_the_constants_give() -> None:
    page = PAGE.read_text()
    assert page.count(BEGIN) == page.count(END) == 1
    made = tables(measured_here(), 300.0)
    assert all(case.name in made for case in CASES)
    assert page == with_tables(page, made), "run: python -m bench.scale --write"
