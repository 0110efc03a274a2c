"""fp16: the loss scale begins where nothing overflows, has an end, and comes back exactly."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.exact.gpt_world import Job, tiny, tokenize_text, train, write_text
from unbroken.config import Config
from unbroken.errors import GradientNotFinite
from unbroken.gpt.optimizer import LossScaler
from unbroken.records.journal import Event, read_history
from unbroken.records.layout import Layout
from unbroken.records.metrics import read_metrics
from unbroken.state.flatten import unflatten
from unbroken.store.directory import Store
from unbroken.testing.worlds import logs, spawn

CPU = torch.device("cpu")
TOKENS = 14 * 32


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenize_text(write_text(tmp_path_factory.mktemp("text")), tmp_path_factory.mktemp("data"))


@pytest.fixture
def config(data: Path, tmp_path: Path) -> Config:
    low: dict[str, Any] = {"mixed_precision": "fp16", "eval_steps": None, "save_steps": 3}
    return tiny(data, tmp_path / "run", **low)


def at(config: Config, run: Path, **training: Any) -> Config:  # noqa: ANN401 - of TrainingConfig
    return replace(config, training=replace(config.training, output_dir=str(run), **training))


def layout_of(config: Config) -> Layout:
    return Layout(Path(config.training.output_dir))


def facts(config: Config, kind: str) -> list[Event]:
    return read_history(layout_of(config)).of_kind(kind)


# ---- the scale ----


@pytest.mark.parametrize(("tokens", "first"), [(1, 65536.0), (448, 128.0), (512, 128.0), (524_288, 0.125)])
def test_the_first_scale_is_the_usual_one_over_the_tokens_of_a_step(tokens: int, first: float) -> None:
    scaler = LossScaler(CPU, tokens)
    assert (scaler.get_scale(), scaler.lowest) == (first, first / 65536)


def test_it_is_halved_down_to_the_lowest_and_stays_there() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = LossScaler(CPU, 512)
    said = []
    for _ in range(18):
        scaler.scale(weight.sum()).backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        weight.grad.fill_(math.inf)
        scaler.unscale_(optimizer)
        said.append(scaler.lower())
    assert said == [True] * 16 + [False] * 2
    assert scaler.get_scale() == scaler.lowest == 1 / 512


# ---- whole jobs ----


@pytest.mark.promise("C15")
def test_scale_and_growth_tracker_after_a_kill_and_a_stop_on_two_ranks_are_those_of_one_job(
    config: Config, tmp_path: Path
) -> None:
    poison = (2, 5)
    [alone] = spawn(1, train, config, Job(overflow_in=poison))
    assert alone.is_good, logs([alone])
    chained = at(config, tmp_path / "chained")
    sharded = Job(ranks=2, sharding="fsdp2", overflow_in=poison)
    for each in (replace(sharded, kill_in=6), Job(stop_at=9, overflow_in=poison), Job(ranks=2, overflow_in=poison)):
        ended = spawn(each.ranks, train, chained, each)
        assert each.kill_in is not None or all(rank.is_good for rank in ended), logs(ended)
    scaler = scaler_of(config)
    assert (scaler["scale"], scaler["_growth_tracker"]) == (128.0 / 4, 7)
    assert scaler_of(chained) == scaler
    assert losses(chained) == losses(config) and len(losses(config)) == 12
    assert fingerprint(chained) == fingerprint(config) is not None
    results = [
        (fact.values["step"], fact.values["scale"], fact.values["overflowed"]) for fact in facts(config, "overflowed")
    ]
    assert results == [(2, 64.0, 1), (5, 32.0, 2)]
    said = (Path(config.training.output_dir) / "logs" / "job-0001.log").read_text().splitlines()
    lines = {line.split("step")[1].split("/")[0].strip(): line for line in said if " % " in line}
    assert "overflowed" not in lines["1"] and lines["12"].endswith("done  2 overflowed")


def test_an_ordinary_small_model_makes_every_one_of_its_first_steps(config: Config) -> None:
    [ended] = spawn(1, train, config, Job())
    assert ended.is_good, logs([ended])
    assert not facts(config, "overflowed")
    assert scaler_of(config)["_growth_tracker"] == 12


def test_a_gradient_that_is_never_finite_ends_the_job_at_the_lowest_scale_with_its_step_and_counts(
    config: Config,
) -> None:
    long = at(config, Path(config.training.output_dir), max_steps=30, save_steps=8)
    ended = spawn(2, train, long, Job(ranks=2, overflow_in=tuple(range(4, 31))))
    error = ended[0].error
    assert isinstance(error, GradientNotFinite), logs(ended)
    assert (error.step, error.overflowed, error.scale) == (20, 16, 1 / 512)
    assert math.isfinite(error.loss) and error.exit_code == 8
    ending = facts(long, "job-end")[-1].values
    assert (ending["status"], ending["exit_code"]) == ("error", 8)
    rows = read_metrics(layout_of(long)).kept
    assert rows[19].values["overflowed_steps"] == 16


def test_where_such_steps_are_skipped_they_are_counted_and_the_scale_stays_at_the_lowest(config: Config) -> None:
    skipping = at(config, Path(config.training.output_dir), max_steps=24, save_steps=30, non_finite="skip")
    [ended] = spawn(1, train, skipping, Job(overflow_in=tuple(range(2, 21))))
    assert ended.is_good, logs([ended])
    assert [fact.values["step"] for fact in facts(skipping, "step-skipped")] == [18, 19, 20]
    assert len(facts(skipping, "overflowed")) == 16
    scaler = scaler_of(skipping)
    assert (scaler["scale"], scaler["_growth_tracker"]) == (1 / 512, 4)


def scaler_of(config: Config) -> dict[str, Any]:
    """What the last checkpoint holds of the scaler."""
    state = json.loads((layout_of(config).checkpoints / "final" / "trainer_state.json").read_text())
    held: Any = unflatten(state["values"]["scaler"], {}, item="scaler", allow_pickle=False)
    return dict(held["state"])


def losses(config: Config) -> dict[int, str]:
    return {step: row.bits["loss"] for step, row in read_metrics(layout_of(config)).kept.items()}


def fingerprint(config: Config) -> str | None:
    return Store(layout_of(config).checkpoints).read_manifest("final").fingerprint
