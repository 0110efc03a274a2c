"""The parts of the trainer that need no second process: what is said, evaluated, accepted, skipped and kept."""

import importlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.exact.gpt_world import tiny, tokenize_text, write_text
from tests.torch_versions import torch_is_older
from unbroken import exact
from unbroken.cli.status import _fields
from unbroken.config import Config
from unbroken.errors import ArithmeticDiffers, ConfigInvalid, DataMissing, DataUnfit, NonFiniteLoss
from unbroken.exact.numerics import differences
from unbroken.gpt.arithmetic import FOLLOWING, Arithmetic
from unbroken.gpt.build import build_model
from unbroken.gpt.device import RankDevice
from unbroken.gpt.evaluate import Evaluation
from unbroken.gpt.run_files import IDENTITY, TOKENIZER
from unbroken.gpt.speed import Speed, flops_per_token, peak_of
from unbroken.gpt.training_data import open_data, validation_stream
from unbroken.gpt.training_log import StepLog
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.records.metrics import read_metrics
from unbroken.records.summary import summarize
from unbroken.store.directory import Store
from unbroken.store.scan import scan
from unbroken.testing.worlds import logs, spawn
from unbroken.world import World

CPU = torch.device("cpu")
ALONE = RankDevice(World(0, 1), CPU)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenize_text(write_text(tmp_path_factory.mktemp("text")), tmp_path_factory.mktemp("data"))


@pytest.fixture
def config(data: Path, tmp_path: Path) -> Config:
    return tiny(data, tmp_path / "run", max_steps=4, save_steps=2)


# ---- what is said ----


def test_a_line_says_step_share_loss_rate_time_speed_and_what_is_left() -> None:
    times = iter((0.0, 2.0))
    speed = Speed(tokens_per_step=50_000, flops_per_token=10, peak=1e6, clock=lambda: next(times))
    progress = StepLog(1_000, speed, is_first=True)
    speed.begin(0)
    each_s, measured = speed.look(20)
    assert measured == {"tokens_per_s": 500_000.0, "mfu": 5.0}
    line = progress.wording(20, 2.5, 3e-4, 1.25, each_s, measured)
    assert line.startswith("step    20/1,000    2.0 %  loss 2.5000  lr 3.00e-04  norm 1.25  100 ms  500 k tokens/s")
    assert line.endswith("  MFU 500.0 %  1 min 38 s left")


def test_a_line_counts_the_steps_that_moved_no_weight(caplog: pytest.LogCaptureFixture) -> None:
    progress = StepLog(10, Speed(1, 1, None), is_first=True)
    with caplog.at_level("INFO", "unbroken"):
        progress.line(10, 2.5, 3e-4, 1.0, {"overflowed": 3, "skipped": 1})
    assert caplog.messages[0].endswith("done  3 overflowed  1 skipped")


def test_where_no_peak_is_known_no_share_of_it_is_reported() -> None:
    assert peak_of(CPU, torch.bfloat16) is None
    speed = Speed(1, 1, None)
    speed.begin(0)
    assert speed.look(1)[1].keys() == {"tokens_per_s"}


def test_operations_are_six_for_each_parameter_and_those_of_causal_attention(config: Config) -> None:
    assert flops_per_token(config, 1_000) == 6_000 + 6 * 2 * 32 * 32


# ---- evaluation ----


def evaluation(config: Config, lane: int = 2, most: int | None = None) -> Evaluation:
    return Evaluation(validation_stream(config), lane, most, ALONE)


def test_an_evaluation_leaves_mode_and_generators_as_they_were(config: Config) -> None:
    model = build_model(config, 384, CPU, None)
    before = torch.get_rng_state()
    found = evaluation(config, most=3)(model)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert found.loss == pytest.approx(math.log(384), rel=0.1)
    assert found == evaluation(config, most=3)(model), "dropout is off"


def test_all_of_val_is_counted_once_whatever_the_size_of_a_lane(config: Config) -> None:
    model = build_model(config, 384, CPU, None)
    one, seven = evaluation(config, lane=1)(model), evaluation(config, lane=7)(model)
    assert one.tokens == seven.tokens > 10_000
    assert one.loss == pytest.approx(seven.loss, rel=1e-6)


# ---- what differs at a resume ----


def arithmetic(*, lanes: int = 4, stock: bool = False, accept: tuple[str, ...] = ()) -> Arithmetic:
    reducer = exact.Reducer(torch.nn.Linear(2, 2), lanes=lanes, seed=1, stock=stock)
    return Arithmetic(reducer, exact.Numerics("cpu"), accept)


def test_another_torch_or_lane_count_is_named_and_passes_only_if_it_is_accepted() -> None:
    saved = {**arithmetic(lanes=8).state_dict(), "torch": "2.0.0"}
    with pytest.raises(ArithmeticDiffers) as caught:
        arithmetic().load_state_dict(saved)
    assert {name for name, _, _ in caught.value.differences} == {"lanes", "torch"}
    arithmetic(accept=("lanes", "torch")).load_state_dict(saved)


def test_who_accepts_a_field_accepts_what_follows_from_it() -> None:
    saved = arithmetic().state_dict()
    with pytest.raises(ArithmeticDiffers):
        arithmetic(stock=True).load_state_dict(saved)
    arithmetic(stock=True, accept=("training.exact",)).load_state_dict(saved)


def test_on_a_gpu_too_who_accepts_the_opt_out_accepts_all_that_pinning_has_set() -> None:
    [ended] = spawn(1, changed_by_pinning)
    assert ended.is_good, logs([ended])
    # Older versions have one switch for both, which is set by default as pinning sets it.
    always = {"deterministic", "conv_fp32", "attention"} | (set() if torch_is_older(2, 9) else {"matmul_fp32"})
    assert always <= ended.value <= set(FOLLOWING["training.exact"])


def changed_by_pinning() -> set[str]:
    """Names of a GPU's record that differ between an exact job and one that opted out."""
    with mock.patch.multiple(torch.cuda, get_device_name=lambda _: "H200", get_device_capability=lambda _: (9, 0)):
        before = exact.Numerics("cuda").record()
        return {name for name, _, _ in differences(before, exact.pin("cuda").record())}


# ---- bad input ----


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(config: Config) -> None:
    small = replace(config, model=replace(config.model, vocab_size=100))
    with pytest.raises(DataUnfit, check=lambda each: len(each.problems) == 1):
        open_data(small, World(0, 1))


def test_a_folder_that_is_not_there_is_missing_data(config: Config, tmp_path: Path) -> None:
    with pytest.raises(DataMissing):
        open_data(replace(config, data=replace(config.data, path=str(tmp_path / "no"))), World(0, 1))


def test_a_config_made_in_python_is_checked_as_strictly_as_a_file_and_takes_no_overrides(config: Config) -> None:
    from unbroken import gpt

    with pytest.raises(ConfigInvalid):
        gpt.train(config=replace(config, model=replace(config.model, n_head=5)))
    with pytest.raises(ValueError, match="overrides need a config file"):
        gpt.train(config=config, overrides=["training.max_steps=1"])


# ---- whole jobs, in a process of their own ----


def job(config: Config, poisoned: int | None = None, **more: Any) -> Any:  # noqa: ANN401 - a Trained
    """One job; in the poisoned step the gradient of one weight is NaN."""
    torch.set_num_threads(1)
    trainer = importlib.import_module("unbroken.gpt.train")
    clip = trainer.Training._clip

    def poisoning(training: Any) -> torch.Tensor:  # noqa: ANN401
        if training.run.step + 1 == poisoned:
            next(iter(training.model.parameters())).grad[0, 0] = math.nan
        norm: torch.Tensor = clip(training)
        return norm

    trainer.Training._clip = poisoning
    return trainer.train(config, **more)


def done(config: Config, poisoned: int | None = None) -> Any:  # noqa: ANN401
    [ended] = spawn(1, job, config, poisoned)
    assert ended.is_good, logs([ended])
    return ended.value


def test_a_run_leaves_its_config_its_tokenizer_and_its_log(config: Config) -> None:
    trained = done(config)
    run = Path(config.training.output_dir)
    assert trained.is_completed and trained.step == 4 and trained.tokens == 4 * 14 * 32
    assert trained.checkpoint is not None and trained.checkpoint.name == "final"
    assert trained.loss is not None and trained.val_loss is not None
    recorded = json.loads((run / "config.json").read_text())
    assert recorded["training"]["global_batch_size"] == 14
    assert json.loads((run / TOKENIZER / IDENTITY).read_text())["name"] == "bytes"
    said = (run / "logs" / "job-0001.log").read_text()
    assert "4/4" in said and "final" in said
    # How long it took to start is shown by `status`, part by part.
    summary = summarize(Store(Layout(run).checkpoints), now_s=0.0)
    start = _fields(summary)["first_step"]
    assert start["job"] == 1 and sum(start["parts"].values()) == pytest.approx(start["seconds"], abs=0.01)
    assert list(start["parts"]) == ["process_group", "data", "numerics", "model", "restore", "first_step"]
    assert start["cpu_parts"].keys() == start["parts"].keys()


def test_a_gradient_that_is_nan_ends_the_job_and_is_not_saved(config: Config) -> None:
    [ended] = spawn(1, job, config, 3)
    assert isinstance(ended.error, NonFiniteLoss), logs([ended])
    assert (ended.error.metric, ended.error.step, ended.error.resumable_step) == ("grad_norm", 3, 2)


def test_a_step_that_is_skipped_is_counted_journalled_and_moves_nothing(config: Config) -> None:
    skipping = replace(config, training=replace(config.training, non_finite="skip"))
    trained = done(skipping, poisoned=3)
    assert trained.is_completed
    layout = Layout(Path(config.training.output_dir))
    [fact] = read_history(layout).of_kind("step-skipped")
    assert fact.values["step"] == 3 and fact.values["skipped"] == 1
    rows = read_metrics(layout).kept
    assert rows[3].values["skipped_steps"] == 1
    assert math.isfinite(rows[4].values["loss"]), "the weights are still numbers"


def test_the_best_by_validation_is_kept_and_saved_when_it_is_met(config: Config) -> None:
    training = replace(config.training, eval_steps=1, keep_best="val_loss:min", save_steps=100, keep_last_k=1)
    done(replace(config, training=training))
    commits = read_history(Layout(Path(config.training.output_dir))).of_kind("commit")
    assert [fact.values["step"] for fact in commits] == [1, 2, 3, 4]


def test_a_checkpoint_behind_the_best_one_is_not_taken_for_it(config: Config) -> None:
    training = replace(config.training, eval_steps=2, keep_best="val_loss:min", save_steps=1, keep_last_k=1)
    done(replace(config, training=training))
    store = Store(Layout(Path(config.training.output_dir)).checkpoints)
    results = {name: store.read_manifest(name) for name in scan(store).committed}
    measured = {manifest.step: "val_loss" in manifest.metrics for manifest in results.values()}
    assert measured.pop(4) and all(measured.values())
