"""The exactness checker sees one bit, a step, a tensor, a value; and nothing in what is only measured."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from unbroken.records.layout import Layout
from unbroken.records.metrics import MetricsWriter, Number
from unbroken.store.commit import Record, begin, commit
from unbroken.store.directory import Store
from unbroken.store.manifest import Tensor
from unbroken.store.names import FINAL, PERIODIC
from unbroken.testing.exactness import compare_checkpoints, compare_runs, is_measured

STEPS = 4
TENSORS = {"model.weight": Tensor("f32", (2, 3), "aa"), "optimizer.exp_avg": Tensor("f32", (2, 3), "bb")}
VALUES = {"data": {"dict": [["position", 16]]}, "model": {"dict": []}}


def rows(**changes: Mapping[str, Number]) -> dict[int, dict[str, Number]]:
    """What a job logs; ``at_3={"loss": 0.0}`` changes step 3."""
    plain = {step: {"loss": 1.0 / step, "tokens": 8 * step, "tokens_per_s": step * 0.3} for step in range(1, STEPS + 1)}
    return {step: {**values, **changes.get(f"at_{step}", {})} for step, values in plain.items()}


def log(run: Path, job: int, found: Mapping[int, Mapping[str, Number]]) -> None:
    writer = MetricsWriter(Layout(run), job, start=min(found) - 1)
    for step, values in found.items():
        writer.write(step, values)
    writer.close()


def save(
    run: Path,
    step: int = STEPS,
    *,
    tensors: Mapping[str, Tensor] = TENSORS,
    values: Mapping[str, Any] = VALUES,
    counters: Sequence[Any] = (),
    ranks: Sequence[Mapping[str, Any]] = ({},),
    at_ns: int = 1,
) -> str:
    record = {
        "schema": "unbroken.trainer-state/2",
        "step": step,
        "world_size": len(ranks),
        "kinds": {},
        "values": values,
        "per_rank": sorted({name for each in ranks for name in each}),
        "counters": {"dict": list(counters)},
    }
    parts = {"trainer_state.json": json.dumps(record).encode(), f"state/{len(ranks)}": bytes(at_ns)}
    for rank, own in enumerate(ranks):
        parts[f"ranks/rank-{rank:05}.json"] = json.dumps({"rank": rank, "values": own}).encode()
    draft = begin(Store(Layout(run).checkpoints), step=step, job=f"j{at_ns}")
    written = [draft.write_part(name, [data]) for name, data in parts.items()]
    kind = FINAL if step == STEPS else PERIODIC
    return commit(draft, plan=list(parts), parts=written, record=Record(kind, at_ns, tensors=tensors))


@pytest.fixture
def a(tmp_path: Path) -> Path:
    log(tmp_path / "a", 1, rows())
    save(tmp_path / "a")
    return tmp_path / "a"


@pytest.fixture
def b(tmp_path: Path) -> Path:
    return tmp_path / "b"


@pytest.mark.promise("G1")
def test_runs_in_several_jobs_on_other_ranks_at_other_speeds_are_equal(a: Path, b: Path) -> None:
    first = {step: values for step, values in rows().items() if step <= 3}
    log(b, 1, first)
    log(b, 2, {step: {**values, "tokens_per_s": 0.1} for step, values in rows().items() if step > 2})
    save(b, 2)
    save(b, at_ns=99, ranks=({}, {}))
    found = compare_runs(a, b)
    assert found.is_equal
    assert (found.steps, found.agreeing, found.first, found.corrupt) == (STEPS, STEPS, None, ())
    assert found.lines() == [
        "4 of 4 steps agree bit for bit (loss, tokens)",
        "measured or ignored, so not compared: tokens_per_s",
        "all 2 tensors and all 3 values of final are equal",
    ]
    assert found.json_fields()["is_equal"]


@pytest.mark.promise("G1")
def test_one_bit_of_one_loss_is_named_with_its_step_and_both_jobs(a: Path, b: Path) -> None:
    other = math.nextafter(1 / 3, 1)
    log(b, 1, {step: values for step, values in rows().items() if step < 3})
    log(b, 2, {step: values for step, values in rows(at_3={"loss": other}, at_4={"loss": 7.0}).items() if step >= 3})
    save(b)
    found = compare_runs(a, b)
    assert not found.is_equal and found.agreeing == 2
    assert found.first is not None
    assert (found.first.step, found.first.metric) == (3, "loss")
    assert (found.first.bits_a, found.first.bits_b) == ((1 / 3).hex(), other.hex())
    assert (found.first.job_a, found.first.job_b) == (1, 2)


def test_a_number_that_was_changed_beside_its_bits_is_seen(a: Path, b: Path) -> None:
    log(b, 1, rows())
    save(b)
    file = b / "metrics" / "job-0001.jsonl"
    file.write_text(file.read_text().replace('"loss": 0.5,', '"loss": 0.25,'))
    found = compare_runs(a, b)
    assert not found.is_equal and found.first is not None
    assert found.first.bits_b == f"{(0.5).hex()}, written next to it as {(0.25).hex()}"


def test_a_step_that_only_one_run_has_is_a_difference(a: Path, b: Path) -> None:
    log(b, 1, {step: values for step, values in rows().items() if step != 2})
    save(b)
    firsts = [compare_runs(a, b).first, compare_runs(b, a).first]
    assert [first and (first.step, first.metric, first.job_a, first.job_b) for first in firsts] == [
        (2, None, 1, None),
        (2, None, None, 1),
    ]
    assert not compare_runs(a, b).is_equal


def test_a_metric_that_only_one_run_has_is_a_difference_unless_it_is_ignored(a: Path, b: Path) -> None:
    log(b, 1, rows(at_2={"val_loss": 3.0}))
    save(b)
    found = compare_runs(a, b)
    assert found.first is not None and (found.first.metric, found.first.bits_a) == ("val_loss", None)
    assert not found.is_equal
    assert compare_runs(a, b, ignore=["val_loss"]).is_equal


def test_losses_that_are_nan_are_equal_by_their_bits_too(tmp_path: Path, b: Path) -> None:
    a = tmp_path / "c"
    for run in (a, b):
        log(run, 1, rows(at_2={"loss": math.nan}, at_3={"loss": math.inf}))
        save(run)
    assert compare_runs(a, b).is_equal
    log(b, 2, {3: {"loss": -math.inf, "tokens": 24}, 4: rows()[4]})
    assert not compare_runs(a, b).is_equal


@pytest.mark.promise("X3")
def test_a_step_that_one_run_computed_twice_and_not_alike_is_corruption_though_the_last_one_is_right(
    a: Path, b: Path
) -> None:
    log(b, 1, rows(at_3={"loss": 0.1}))
    log(b, 2, {step: values for step, values in rows().items() if step > 2})
    save(b)
    found = compare_runs(a, b)
    assert found.first is None and found.state is not None and found.state.is_equal
    assert not found.is_equal
    [mismatch] = found.corrupt
    assert (mismatch.step, mismatch.first_job, mismatch.second_job) == (3, 1, 2)


def test_another_fingerprint_shape_or_tensor_is_named(a: Path, b: Path) -> None:
    log(b, 1, rows())
    changed = {"model.weight": Tensor("f32", (2, 3), "ab"), "ema.weight": Tensor("f32", (1,), "cc")}
    save(b, tensors=changed)
    found = compare_runs(a, b)
    assert found.tensors_differing == ("ema.weight", "model.weight", "optimizer.exp_avg")
    assert not found.is_equal and found.agreeing == STEPS


def test_a_value_that_differs_is_named_by_its_place(a: Path, b: Path) -> None:
    log(b, 1, rows())
    save(b, values={**VALUES, "data": {"dict": [["position", 17]]}}, counters=[["best", 0.5]])
    found = compare_runs(a, b)
    assert found.values_differing == (
        'counters: {} and {"best": 0.5}',
        "data.position: 16 and 17",
    )
    assert not found.is_equal


def test_what_each_rank_keeps_is_compared_in_worlds_of_one_size_and_named_where_it_cannot_be(tmp_path: Path) -> None:
    runs = [tmp_path / name for name in "abcd"]
    own = {"ranks.0.sampler.order": Tensor("u8", (5,), "g0")}
    other = {"ranks.0.sampler.order": Tensor("u8", (5,), "g1")}
    ranks: list[tuple[dict[str, Any], ...]] = [({"sampler": 1},), ({"sampler": 1},), ({"sampler": 2},), ({}, {})]
    for run, each, tensors in zip(runs, ranks, (own, own, other, other), strict=True):
        log(run, 1, rows())
        save(run, ranks=each, tensors={**TENSORS, **tensors})
    same, differs, elsewhere = (compare_runs(runs[0], run) for run in runs[1:])
    assert same.is_equal
    assert differs.tensors_differing == ("ranks.0.sampler.order",)
    assert differs.values_differing == ("ranks.0.sampler: 1 and 2",)
    assert elsewhere.is_equal and elsewhere.state is not None
    assert elsewhere.state.by_rank == ("sampler",)


def test_only_a_generator_that_was_used_counts(tmp_path: Path) -> None:
    def state(number: int) -> dict[str, Any]:
        began = {"dict": [["began", {"dict": [["python", {"tuple": [3, number]}]]}]]}
        return {"rng_state": {"dict": [["python", number], ["numpy", 7]]}, "data": began}

    runs = {"a": (None, 1), "idle": (2, 2), "drawn": (3, 2)}
    for name, (early, late) in runs.items():
        log(tmp_path / name, 1, rows())
        save(tmp_path / name, ranks=(state(late),))
        if early is not None:
            save(tmp_path / name, 2, ranks=(state(early),))
    idle, drawn = (compare_runs(tmp_path / "a", tmp_path / name) for name in ("idle", "drawn"))
    assert idle.is_equal and idle.state is not None and idle.state.idle == ("python",)
    assert not drawn.is_equal and drawn.values_differing == (
        "ranks.0.data.began.python.1: 1 and 2",
        "ranks.0.rng_state.python: 1 and 2",
    )


def test_a_generator_that_is_the_same_in_all_uninterrupted_runs_counts_even_unused(
    tmp_path: Path,
) -> None:
    for name, number in (("a", 1), ("b", 2)):
        log(tmp_path / name, 1, rows())
        for step in (2, STEPS):
            save(tmp_path / name, step, ranks=({"rng_state": {"dict": [["python", number]]}},))
    assert compare_runs(tmp_path / "a", tmp_path / "b").is_equal
    assert compare_runs(tmp_path / "a", tmp_path / "b", idle=("python",)).is_equal
    assert not compare_runs(tmp_path / "a", tmp_path / "b", idle=()).is_equal


def test_two_runs_that_logged_times_alone_prove_nothing(tmp_path: Path) -> None:
    for name in ("a", "b"):
        log(tmp_path / name, 1, {step: {"step_time": 0.1 * step} for step in range(1, 4)})
    found = compare_runs(tmp_path / "a", tmp_path / "b")
    assert found.is_empty and not found.is_equal
    assert found.metrics.lines()[1:] == ["measured or ignored, so not compared: step_time"]


def test_a_generator_whose_state_is_a_tensor_counts_once_it_was_drawn_from(tmp_path: Path) -> None:
    own = {"rng_state": {"dict": [["torch", {"tensor": "ranks.0.generators.torch"}]]}}
    for name, early, late in (("a", "g0", "g1"), ("b", "g0", "g2")):
        log(tmp_path / name, 1, rows())
        for step, digest in ((2, early), (STEPS, late)):
            state = {**TENSORS, "ranks.0.generators.torch": Tensor("u8", (5,), digest)}
            save(tmp_path / name, step, ranks=(own,), tensors=state)
    found = compare_runs(tmp_path / "a", tmp_path / "b")
    assert not found.is_equal and found.tensors_differing == ("ranks.0.generators.torch",)


def test_runs_that_end_at_different_steps_are_not_equal(a: Path, b: Path) -> None:
    log(b, 1, rows())
    save(a, 2)
    save(b, 2)
    found = compare_runs(a, b)
    assert found.state is not None and found.state.is_equal and found.state.step == 2
    assert not found.is_equal
    assert found.ends == (4, 2)


def test_two_runs_with_nothing_to_compare_prove_nothing(tmp_path: Path) -> None:
    found = compare_runs(tmp_path / "a", tmp_path / "b")
    assert found.is_empty and not found.is_equal


def test_checkpoints_of_two_steps_can_be_compared_by_name(a: Path) -> None:
    name = save(a, 2, values={**VALUES, "data": {"dict": [["position", 8]]}})
    store = Store(Layout(a).checkpoints)
    found = compare_checkpoints(store, name, store, "final")
    assert found.values_differing == ("data.position: 8 and 16",)


@pytest.mark.parametrize(
    "name", ["tokens_per_s", "step_time", "time/forward", "mfu", "samples_per_second", "gpu_memory_gb", "dt", "it/s"]
)
def test_times_speeds_and_memory_are_measured(name: str) -> None:
    assert is_measured(name)


@pytest.mark.parametrize("name", ["loss", "val_loss", "grad_norm", "lr", "tokens", "timesteps", "loss_scale", "bleu"])
def test_what_a_step_computes_is_not(name: str) -> None:
    assert not is_measured(name)
