"""Lightning's ``DeepSpeedStrategy`` as a run, in every ZeRO stage: killed or stopped, it ends in the same bits."""

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lightning")
pytest.importorskip("deepspeed")

import unbroken
from tests.frameworks.forking import Ended, Jobs, events, forking, resumed_from

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
KILL, TERM = int(signal.SIGKILL), int(signal.SIGTERM)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with forking(tmp_path_factory.mktemp("jobs"), "tests.frameworks.zero_fits") as started:
        yield started


def result(ended: Ended) -> dict[str, Any]:
    assert ended.result is not None, ended.said
    return ended.result


def two(stage: int, **trainer: object) -> dict[str, Any]:
    # Five batches an epoch for each rank; the data set draws from the global RNG.
    more = {"max_steps": 8, "devices": 2, **trainer}
    return {"zero": stage, "ranks": 2, "noise": 0.1, "trainer": more, "checkpoints": [{"every_n_train_steps": 2}]}


@pytest.mark.promise("C11", "X6")
def test_killed_inside_deepspeeds_own_write_it_resumes_to_the_same_bits(jobs: Jobs, tmp_path: Path) -> None:
    job = two(3)
    whole = jobs.run(tmp_path / "whole", plain=True, ckpt_path=None, **job)
    run = tmp_path / "run"
    assert jobs.run(run, torn=6, **job).code == -KILL
    # Inside the first epoch.
    assert unbroken.checkpoints(run)[0].step == 4
    resumed = jobs.run(run, convert=True, **job)
    assert resumed_from(run)[-1] == 4 and resumed.digest == whole.digest, resumed.said
    # Lightning's converter reads the path that ModelCheckpoint gave a folder that is sealed and verified.
    last = Path(result(resumed)["last"][0])
    assert last.resolve() == run / "checkpoint-8" / "lightning.ckpt" and result(resumed)["converts"] == [True]
    assert all(each.is_usable for each in unbroken.checkpoints(run)) and not list(run.glob(".tmp-*"))


@pytest.mark.promise("C11")
def test_stopped_it_resumes_exactly_and_refuses_another_stage_and_world_by_name(jobs: Jobs, tmp_path: Path) -> None:
    # Four batches an epoch, two a step.
    job = two(2, accumulate_grad_batches=2, limit_train_batches=4)
    whole = jobs.run(tmp_path / "whole", plain=True, ckpt_path=None, **job)
    run = tmp_path / "run"
    # The second rank alone hears of it; step 4 ends an epoch.
    stopped = jobs.run(run, interrupts=[{"step": 3, "number": TERM, "rank": 1}], **job)
    assert stopped.code == 0 and result(stopped)["is_stopped"] and result(stopped)["step"] == 5, stopped.said
    refused = jobs.run(run, **{**job, "zero": 1})
    assert refused.code == 1 and "zero_stage: 2 before, 1 now" in refused.said
    alone = {**job, "ranks": 1, "trainer": {**job["trainer"], "devices": 1}}
    refused = jobs.run(run, ALONE, **alone)
    assert refused.code == 1 and "world_size: 2 before, 1 now" in refused.said
    resumed = jobs.run(run, convert=True, **job)
    assert resumed_from(run)[-1] == 5 and resumed.digest == whole.digest, resumed.said
    assert result(resumed)["converts"] == [True]


@pytest.mark.promise("C11")
def test_with_deepspeed_a_damaged_newest_is_skipped_and_what_cannot_be_exact_is_refused(
    jobs: Jobs, tmp_path: Path
) -> None:
    job: dict[str, Any] = {"zero": 1, "average": True, "trainer": {"max_epochs": 2, "max_steps": -1}}
    job["options"] = {"save_steps": 3}
    refused = jobs.run(tmp_path / "run", ALONE, zero=1, trainer={"accumulate_grad_batches": 4})
    assert refused.code == 1 and "limit_train_batches=8" in refused.said
    whole = jobs.run(tmp_path / "whole", ALONE, plain=True, ckpt_path=None, **job)
    run = tmp_path / "epochs"
    jobs.run(run, ALONE, interrupts=[{"step": 14, "number": KILL}], **job)
    newest = unbroken.checkpoints(run)[0]
    (states,) = Path(newest.path).rglob("*_optim_states.pt")
    data = bytearray(states.read_bytes())
    data[-100] ^= 1
    states.write_bytes(data)
    resumed = jobs.run(run, ALONE, **job)
    assert [event.text("name") for event in events(run, "checkpoint-skipped")] == [f"checkpoint-{newest.step}"]
    assert resumed.digest == whole.digest, resumed.said
    # It is complete: nothing is trained, and its end is as it was.
    again = jobs.run(run, ALONE, **job)
    assert result(again)["trained"] == 0 and again.digest == whole.digest, again.said


@pytest.mark.promise("C11")
def test_killed_between_two_files_lightning_alone_resumes_with_states_of_two_steps(jobs: Jobs, tmp_path: Path) -> None:
    # It writes its last.ckpt into the folder of the one before: the optimizer is still that of step 4.
    cut: dict[str, Any] = {"zero": 1, "cut": ["last.ckpt/checkpoint/zero_pp_rank_0_mp_rank_00_optim_states.pt", 2]}
    ends: dict[str, Any] = {"zero": 1, "trainer": {"max_steps": 8}, "convert": True}
    assert jobs.run(tmp_path / "plain", ALONE, plain=True, **cut).code == -KILL
    plain = jobs.run(tmp_path / "plain", ALONE, plain=True, **ends)
    assert result(plain)["step"] == 8 and result(plain)["trained"] == 0, plain.said
    assert result(plain)["converts"] == [False]
    run = tmp_path / "run"
    jobs.run(run, ALONE, zero=1, cut=["optim_states.pt", 2])
    assert [each.step for each in unbroken.checkpoints(run)] == [4]
    resumed = jobs.run(run, ALONE, **ends)
    assert resumed_from(run)[-1] == 4 and result(resumed)["converts"] == [True], resumed.said


@pytest.mark.promise("C11")
def test_full_weights_without_optimizer_states_are_refused(tmp_path: Path) -> None:
    from lightning.pytorch.strategies import DeepSpeedStrategy

    from unbroken.frameworks import lightning as unbroken_pl

    trainer = SimpleNamespace(strategy=DeepSpeedStrategy(load_full_weights=True))
    with pytest.raises(ValueError, match="load_full_weights"):
        unbroken_pl.Callback(tmp_path / "run").setup(trainer, None, "fit")
    assert not (tmp_path / "run").exists()
