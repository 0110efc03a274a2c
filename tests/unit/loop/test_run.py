"""The object a training loop holds: what it refuses, when it saves, how it ends."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.state.tiny import adam, disk, job, learn, model, quietly, tiny
from unbroken import Run, Settings
from unbroken.disk import LocalDisk
from unbroken.errors import EvidenceMissing, Halted, NeedsPickle, NotAnItem, NotAStore, NotExact, RunHeld
from unbroken.records.journal import read_journal
from unbroken.records.layout import Layout
from unbroken.records.lease import read_current
from unbroken.state.description import Describer
from unbroken.state.payload import METADATA_PART
from unbroken.store.fields import Malformed
from unbroken.testing import FaultyDisk, Operation


def names(directory: Path) -> set[str]:
    return {path.name for path in (directory / "checkpoints").iterdir() if not path.name.startswith(".")} - {"latest"}


def outcome(directory: Path) -> tuple[str | None, int | None, str | None]:
    [*_, last] = [fact for fact in read_journal(Layout(directory)) if fact.kind == "job-end"]
    return last.text("status"), last.whole("exit_code"), last.text("reason")


def test_steps_number_what_was_completed_before_and_the_end_is_committed(tmp_path: Path) -> None:
    seen: list[int] = []
    run = job(tmp_path / "run", 5, body=lambda run, step: seen.append(step), **tiny())
    assert seen == [0, 1, 2, 3, 4]
    assert not run.is_stopped
    assert names(tmp_path / "run") == {"checkpoint-2", "checkpoint-4", "final"}
    assert outcome(tmp_path / "run")[:2] == ("completed", 0)
    assert os.readlink(tmp_path / "run" / "checkpoints" / "latest") == "final"


def test_a_loop_in_two_parts_continues_to_the_second_target(tmp_path: Path) -> None:
    objects = tiny()
    seen: list[int] = []
    with Run(tmp_path / "run", settings=quietly(), **objects) as run:
        for target in (3, 6):
            for step in run.steps(target):
                learn(objects)
                seen.append(step)
    assert seen == [0, 1, 2, 3, 4, 5]
    with Run(tmp_path / "run", settings=quietly(), **tiny()) as run:
        assert run.step == 6


def test_a_save_that_is_requested_comes_at_the_edge_of_the_step(tmp_path: Path) -> None:
    def ask(run: Run, step: int) -> None:
        if step == 2:
            run.save()

    job(tmp_path / "run", 5, quietly(save_steps=None), ask, **tiny())
    assert names(tmp_path / "run") == {"checkpoint-3", "final"}
    state = json.loads((tmp_path / "run" / "checkpoints" / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["step"] == 3


def test_a_stop_that_the_loop_asks_for_saves_and_reports_it(tmp_path: Path) -> None:
    def ask(run: Run, step: int) -> None:
        if step == 1:
            run.stop("enough for today")

    run = job(tmp_path / "run", 5, body=ask, **tiny())
    assert run.is_stopped
    assert names(tmp_path / "run") == {"checkpoint-2-shutdown"}
    status, code, reason = outcome(tmp_path / "run")
    assert (status, code) == ("stopped", 0)
    assert reason is not None and "enough for today" in reason, "the script's own words"


def test_an_error_in_the_body_ends_the_job_as_an_error_and_lets_the_run_go(tmp_path: Path) -> None:
    def fail(run: Run, step: int) -> None:
        if step == 3:
            raise LookupError("no such sample")

    with pytest.raises(LookupError):
        job(tmp_path / "run", 5, body=fail, **tiny())
    status, code, reason = outcome(tmp_path / "run")
    assert (status, code, reason) == ("error", 1, "LookupError: no such sample")
    assert job(tmp_path / "run", 5, **tiny()).step == 5


def test_one_directory_is_one_run_at_a_time_in_one_process_too(tmp_path: Path) -> None:
    second = Run(tmp_path / "run", settings=quietly(), **tiny())
    with Run(tmp_path / "run", settings=quietly(), **tiny()), pytest.raises(RunHeld):
        second.__enter__()


def test_a_run_that_is_not_open_reports_it(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", **tiny())
    with pytest.raises(RuntimeError, match="not open"):
        run.stop()
    with pytest.raises(AttributeError, match="this Run has no loader"):
        _ = run.data


@pytest.mark.parametrize(
    ("objects", "lacks"),
    [
        ({"schedule": print}, "state_dict and load_state_dict"),
        ({"data": 3}, "a way to be iterated"),
        ({"rng_state": nn.Linear(1, 1)}, "a name of its own"),
        ({"ranks": nn.Linear(1, 1)}, "a name of its own"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)}, "a model, passed to the run"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(
    objects: dict[str, Any], lacks: str, tmp_path: Path
) -> None:
    with pytest.raises(NotAnItem) as refused, Run(tmp_path / "run", **objects):
        pass
    assert lacks in refused.value.lacks
    assert not (tmp_path / "run").exists()


def test_an_optimizer_over_two_models_is_saved_under_the_names_of_both(tmp_path: Path) -> None:
    def objects(seed: int) -> dict[str, Any]:
        first, second = model(seed), model(seed + 1)
        both = torch.optim.AdamW([*first.parameters(), *second.parameters()])
        return {"actor": first, "critic": second, "optimizer": both}

    saved, fresh = objects(0), objects(5)
    job(tmp_path / "run", 2, **saved)
    with Run(tmp_path / "run", settings=quietly(), **fresh):
        pass
    kept = [state["exp_avg"] for state in saved["optimizer"].state.values()]
    again = [state["exp_avg"] for state in fresh["optimizer"].state.values()]
    assert len(kept) == 8
    assert all(map(torch.equal, kept, again))


def test_several_optimizers_of_one_model_come_back_each(tmp_path: Path) -> None:
    def objects(seed: int) -> dict[str, Any]:
        module = model(seed)
        return {
            "model": module,
            "first": torch.optim.SGD(module[0].parameters(), lr=0.1, momentum=0.9),
            "optimizer": adam(module[2]),
        }

    saved, fresh = objects(0), objects(5)
    job(tmp_path / "run", 2, **saved)
    with Run(tmp_path / "run", settings=quietly(), **fresh):
        pass
    assert not fresh["first"].state
    assert len(fresh["optimizer"].state) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"save_steps": 0},
        {"logging_steps": 0},
        {"keep_last_k": 0},
        {"save_steps": "often"},
        {"keep_every_seconds": 0.0},
        {"max_runtime_seconds": -1},
        {"max_runtime_seconds": 0},
        {"max_runtime_seconds": float("nan")},
        {"max_runtime_seconds": "3h"},
        {"walltime_reserve_seconds": -0.5},
        {"walltime_reserve_seconds": float("inf")},
        {"keep_best": "loss:least"},
        {"audit": "loud"},
        {"non_finite": "ignore"},
        {"accept": "optimizer"},
    ],
)
def test_settings_that_could_only_fail_later_are_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Settings(**wrong)


def test_keeping_follows_the_settings(tmp_path: Path) -> None:
    job(tmp_path / "run", 9, quietly(save_steps=1, keep_last_k=2, keep_milestone_every=4), **tiny())
    # The last two steps, the milestones, and nothing else.
    assert names(tmp_path / "run") == {"checkpoint-4", "checkpoint-8", "final"}


def test_the_best_by_a_metric_that_is_logged_now_and_then_is_the_checkpoint_of_the_step_it_was_logged_for(
    tmp_path: Path,
) -> None:
    scores = {1: 0.3, 4: 0.9, 7: 0.2}

    def measure(run: Run, step: int) -> None:
        if step in scores:
            run.log(score=scores[step])
            run.save(by_all=True)

    settings = quietly(save_steps=3, keep_last_k=1, keep_best="score:max")
    job(tmp_path / "run", 10, settings, measure, **tiny())
    # Step 6 and 9 were saved behind it, while 0.9 was the last score that anybody knew.
    assert names(tmp_path / "run") == {"checkpoint-5", "final"}


def test_a_non_finite_loss_can_be_allowed(tmp_path: Path) -> None:
    def log(run: Run, step: int) -> None:
        run.log(loss=float("nan"), grad_norm=float("inf"))

    assert job(tmp_path / "run", 3, quietly(non_finite="allow"), log, **tiny()).step == 3


def test_records_that_storage_refuses_never_end_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def plan(operation: Operation) -> Any:  # noqa: ANN401
        from unbroken.testing import Refuse

        is_record = {"journal", "metrics"} & set(operation.path.parts)
        return Refuse(5) if is_record and operation.name in ("write", "sync_file") else None

    with disk(FaultyDisk(LocalDisk(), plan)):
        assert job(tmp_path / "run", 3, **tiny()).step == 3
    assert [each.levelname for each in caplog.records if each.name == "unbroken.loop.recorder"]
    assert "final" in names(tmp_path / "run")


def test_the_handlers_of_signals_are_put_back(tmp_path: Path) -> None:
    import signal

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    job(tmp_path / "run", 2, quietly(catch_signals=True), **tiny())
    with pytest.raises(Exception, match="do not match"):
        job(tmp_path / "run", 4, quietly(catch_signals=True), **tiny(width=5))
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


def test_a_hint_that_storage_refuses_does_not_make_a_committed_save_a_failed_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def plan(operation: Operation) -> Any:  # noqa: ANN401
        from unbroken.testing import Refuse

        return Refuse(5) if operation.name == "make_symlink" else None

    with disk(FaultyDisk(LocalDisk(), plan)):
        assert job(tmp_path / "run", 3, **tiny()).step == 3
    facts = read_journal(Layout(tmp_path / "run"))
    assert [fact.text("name") for fact in facts if fact.kind == "commit"] == ["checkpoint-2", "final"]
    assert not [fact for fact in facts if fact.kind == "save-failed"]
    assert outcome(tmp_path / "run")[0] == "completed"
    assert "`latest`" in caplog.text


def test_an_unreported_part_of_the_plan_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    describe = Describer.write

    def without_metadata(self: Describer, plan: Any, reports: Any, draft: Any) -> Any:  # noqa: ANN401
        index, _ = describe(self, plan, reports, draft)
        (draft.path / METADATA_PART).unlink()
        return (index,)

    monkeypatch.setattr(Describer, "write", without_metadata)
    with pytest.raises(EvidenceMissing) as refused:
        job(tmp_path / "run", 1, **tiny())
    assert [line.split(":")[0] for line in refused.value.missing] == ["state/.metadata"]
    assert names(tmp_path / "run") == set()


def test_a_halt_in_the_last_step_is_a_halt(tmp_path: Path) -> None:
    def halt(run: Run, step: int) -> None:
        if step == 2:
            run.halt("a bucket ran dry")

    with pytest.raises(Halted, check=lambda halted: halted.reason == "a bucket ran dry"):
        job(tmp_path / "run", 3, body=halt, **tiny())
    assert outcome(tmp_path / "run")[0] == "halted"
    assert "final" in names(tmp_path / "run")


def test_interrupted_while_it_waits_for_a_save_a_job_records_it_and_releases_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = tiny()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("unbroken.state.save.Saver.wait", interrupt)

    def train() -> None:
        with Run(tmp_path / "run", settings=quietly(), **objects) as run:
            steps = run.steps(3)
            next(steps)

    with pytest.raises(KeyboardInterrupt):
        train()
    assert outcome(tmp_path / "run") == ("stopped", 130, "interrupted by Ctrl-C")
    current = read_current(tmp_path / "run")
    assert current is not None and current.is_released


@pytest.mark.parametrize("accept", [(), ("rng_state",)])
def test_generators_of_a_device_that_is_not_here_are_a_difference_that_can_be_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accept: tuple[str, ...]
) -> None:
    job(tmp_path / "run", 2, **tiny())

    def refuse(_: object) -> None:
        raise Malformed("the generators of 1 CUDA devices were saved; 0 are here")

    monkeypatch.setattr("unbroken.loop.opening.restore_rng", refuse)
    if not accept:
        with pytest.raises(NotExact):
            job(tmp_path / "run", 4, quietly(), **tiny())
        return
    assert job(tmp_path / "run", 4, quietly(accept=accept), **tiny()).step == 4


@pytest.mark.parametrize("total", [-1, 2.5, "10", None, True])
def test_a_target_that_is_not_a_number_of_steps_is_refused_at_the_call(tmp_path: Path, total: Any) -> None:  # noqa: ANN401
    with (
        Run(tmp_path / "run", settings=quietly(), **tiny()) as run,
        pytest.raises(ValueError, match="whole number of steps"),
    ):
        run.steps(total)


@pytest.mark.parametrize("below", ["", "run", "runs/a"])
def test_a_file_where_the_run_is_to_stand_is_a_mistake_in_the_command_that_names_it(tmp_path: Path, below: str) -> None:
    (tmp_path / "notes").write_text("mine")
    with (
        pytest.raises(NotAStore, check=lambda each: not each.is_directory) as refused,
        Run(tmp_path / "notes" / below, **tiny()),
    ):
        pass
    assert (refused.value.path, refused.value.exit_code) == (tmp_path / "notes", 2)
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_tensor_among_the_counters_is_refused_at_the_first_edge(tmp_path: Path) -> None:
    def count(run: Run, step: int) -> None:
        run.counters["best"] = torch.ones(())

    with pytest.raises(NeedsPickle, match="best") as refused:
        job(tmp_path / "run", 5, body=count, **tiny())
    assert ".item()" in (refused.value.so() or "")


@pytest.mark.parametrize("asked", ["5#2", "scratch#config-0123456789ab", "checkpoint-5#3"])
def test_a_request_with_a_tag_is_no_path(asked: str) -> None:
    assert Settings(resume=asked).resume == asked
