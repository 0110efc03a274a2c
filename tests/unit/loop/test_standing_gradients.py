"""Loops that use gradients of the step before are exact over kills and stops; loops that do not save none."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.state.tiny import bits, quietly
from unbroken import Run
from unbroken.errors import LeftMidStep, NotExact
from unbroken.store.compare import compare
from unbroken.store.directory import Store
from unbroken.testing import compare_checkpoints

pytestmark = pytest.mark.promise("U3")

TOTAL = 8


class Killed(Exception):
    """Ends a job as a kill would: nothing more is saved."""


class Loop:
    """A model of two parts, of which a step uses one or both, and an optimizer that moves with every gradient."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.ModuleDict({"one": nn.Linear(3, 2), "two": nn.Linear(3, 2)})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def backward(self, step: int, part: str | None = None) -> None:
        rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        parts = [part] if part else list(self.model)
        loss: Any = torch.stack([self.model[each](rows).square().mean() for each in parts]).sum()
        loss.backward()

    def zero(self) -> None:
        """By hand, in place."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def bits(self) -> dict[str, object]:
        moments = {
            f"{number}.{key}": value.tolist()
            for number, kept in self.optimizer.state_dict()["state"].items()
            for key, value in kept.items()
        }
        return {**bits(self.model), **moments}


Step = Callable[[Loop, int], None]


def steps_before_backward(loop: Loop, step: int) -> None:
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    loop.backward(step)


def steps_before_it_uses_the_batch(loop: Loop, step: int) -> None:
    if step:
        nn.utils.clip_grad_norm_(loop.model.parameters(), 0.3)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    loop.backward(step)


def never_zeroes(loop: Loop, step: int) -> None:
    loop.backward(step)
    loop.optimizer.step()


def zeroes_in_place_first(loop: Loop, step: int) -> None:
    loop.optimizer.zero_grad(set_to_none=False)
    loop.backward(step, "one" if step % 2 else "two")
    loop.optimizer.step()


def zeroes_in_place_last(loop: Loop, step: int) -> None:
    loop.backward(step, "one" if step % 3 else "two")
    loop.optimizer.step()
    loop.zero()


def zeroes_every_other_step(loop: Loop, step: int) -> None:
    if step % 2 == 0:
        loop.optimizer.zero_grad()
    loop.backward(step)
    loop.optimizer.step()


def computes_gradients_before_the_loop(loop: Loop, step: int) -> None:
    loop.backward(step)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


KEEPING: dict[str, tuple[Step, bool]] = {
    "steps before backward, filled before the loop": (steps_before_backward, True),
    "steps before backward, first step apart": (steps_before_it_uses_the_batch, False),
    "never zeroes": (never_zeroes, False),
    "zeroes in place, first": (zeroes_in_place_first, False),
    "zeroes in place, last": (zeroes_in_place_last, False),
    "zeroes every other step": (zeroes_every_other_step, False),
    "gradients from before the loop": (computes_gradients_before_the_loop, True),
}


def train(
    directory: Path,
    one_step: Step,
    *,
    fills: bool = False,
    end: tuple[str, int] | None = None,
    **settings: Any,  # noqa: ANN401
) -> dict[str, object]:
    loop = Loop()
    with Run(directory, settings=quietly(**{"save_steps": 1, **settings}), **loop.objects) as run:
        if fills:
            loop.backward(100)
        for step in run.steps(TOTAL):
            if end == ("kill", step):
                raise Killed
            if end == ("break", step):
                run.stop()
                break
            if end == ("stop", step):
                run.stop()
            one_step(loop, step)
    return loop.bits()


def stored(directory: Path) -> dict[int, bool]:
    """Of which steps there are checkpoints, and whether they contain gradients."""
    store = Store(directory / "checkpoints")
    found = [store.read_manifest(path.parent.name) for path in store.root.glob("*/manifest.json")]
    return {each.step: any(name.startswith("gradients.") for name in each.tensors) for each in found}


def notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.message for each in caplog.records if "gradients" in each.message and each.levelname == "WARNING"]


@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("how", ["kill", "break"])
def test_gradients_that_are_kept_are_there_after_every_interruption(tmp_path: Path, name: str, how: str) -> None:
    one_step, fills = KEEPING[name]
    whole = train(tmp_path / "whole", one_step, fills=fills)
    for at in (1, 4):
        directory = tmp_path / f"run-{at}"
        # Where the first body made no step, it is not known whether one that makes none is complete.
        with contextlib.suppress(Killed, LeftMidStep):
            train(directory, one_step, fills=fills, end=(how, at))
        assert train(directory, one_step, fills=fills) == whole, at


@pytest.mark.parametrize("name", KEEPING)
def test_a_run_of_jobs_of_one_step_each_is_exact(tmp_path: Path, name: str) -> None:
    one_step, fills = KEEPING[name]
    whole = train(tmp_path / "whole", one_step, fills=fills)
    for at in range(TOTAL - 1):
        train(tmp_path / "run", one_step, fills=fills, end=("stop", at))
    assert train(tmp_path / "run", one_step, fills=fills) == whole


def test_a_loop_that_keeps_gradients_is_warned_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path / "run", never_zeroes, end=("stop", 5))
    [said] = notices(caplog)
    assert "optimizer.zero_grad()" in said
    train(tmp_path / "run", never_zeroes)
    assert notices(caplog) == [said]
    assert stored(tmp_path / "run")[TOTAL]


# ---- loops that begin late ----


def begins_late(at: int) -> Step:
    def one_step(loop: Loop, step: int) -> None:
        if step < at:
            loop.optimizer.zero_grad()
        loop.backward(step)
        loop.optimizer.step()

    return one_step


def test_what_begins_late_is_seen_and_saved_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = train(tmp_path / "whole", begins_late(4))
    caplog.clear()
    with pytest.raises(Killed):
        train(tmp_path / "run", begins_late(4), end=("kill", 7), keep_last_k=None)
    assert [said for said in notices(caplog) if "checkpoint of step 4" in said]
    assert stored(tmp_path / "run")[6]
    assert train(tmp_path / "run", begins_late(4)) == whole


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_what_begins_right_after_a_resume_is_refused_and_changes_nothing(tmp_path: Path, how: str) -> None:
    at = 4 if how == "kill" else 3
    with contextlib.suppress(Killed):
        train(tmp_path / "run", begins_late(4), end=(how, at))
    with pytest.raises(NotExact) as refused:
        train(tmp_path / "run", begins_late(4))
    assert [name for name, _ in refused.value.differences] == ["gradients"]
    train(tmp_path / "run", begins_late(4), accept=("gradients",))


def test_what_begins_late_is_seen_without_a_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path / "run", begins_late(6), save_steps=None)
    assert notices(caplog)


# ---- loops that drop them ----


def zeroes_first(objects: dict[str, Any], step: int) -> None:
    objects["optimizer"].zero_grad()
    objects["model"](torch.ones(2, 3)).square().mean().backward()
    objects["optimizer"].step()


def zeroes_last(objects: dict[str, Any], step: int) -> None:
    objects["model"](torch.ones(2, 3)).square().mean().backward()
    objects["optimizer"].step()
    objects["optimizer"].zero_grad()


def zeroes_in_a_closure(objects: dict[str, Any], step: int) -> None:
    def closure() -> Any:  # noqa: ANN401
        objects["optimizer"].zero_grad()
        loss: Any = objects["model"](torch.ones(2, 3)).square().mean()
        loss.backward()
        return loss

    objects["optimizer"].step(closure)


def scales_and_clips(objects: dict[str, Any], step: int) -> None:
    scaler, optimizer, model = objects["scaler"], objects["optimizer"], objects["model"]
    optimizer.zero_grad()
    scale = float("inf") if step == 3 else 1.0
    scaler.scale(model(torch.ones(2, 3)).square().mean() * scale).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()


def accumulates(objects: dict[str, Any], step: int) -> None:
    if step % 3 == 0:
        objects["optimizer"].zero_grad()
    objects["model"](torch.ones(2, 3)).square().mean().backward()
    if step % 3 == 2:
        objects["optimizer"].step()


def takes_turns(objects: dict[str, Any], step: int) -> None:
    """Two optimizers, each of whose backward passes writes to the gradients of the other."""
    model, critic = objects["model"], objects["critic"]
    for name, times in (("critic_optimizer", 1), ("optimizer", int(step % 3 == 2))):
        for _ in range(times):
            objects[name].zero_grad()
            critic(model(torch.ones(2, 3))).square().mean().backward()
            objects[name].step()


def hands_memory_out_again(objects: dict[str, Any], step: int) -> None:
    """As buckets of DDP: dropped, computed anew, and copied into the same tensors."""
    model, buckets = objects["model"], objects["scaler"].buckets
    objects["optimizer"].zero_grad()
    model(torch.ones(2, 3)).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad = buckets.setdefault(parameter, torch.zeros_like(parameter)).copy_(parameter.grad)
    objects["optimizer"].step()


def assigns(objects: dict[str, Any], step: int) -> None:
    """No ``zero_grad``: each step's gradients replace those before it."""
    parameters = list(objects["model"].parameters())
    loss = objects["model"](torch.ones(2, 3)).square().mean()
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    objects["optimizer"].step()


class Buckets:
    """Static memory of a loop, with an empty state."""

    def __init__(self) -> None:
        self.buckets: dict[torch.Tensor, torch.Tensor] = {}

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        del state


def lbfgs(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.01, max_iter=2)


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


DROPPING: dict[str, tuple[Callable[[dict[str, Any], int], None], Any]] = {
    "first": (zeroes_first, adamw),
    "last": (zeroes_last, adamw),
    "closure": (zeroes_in_a_closure, adamw),
    "closure of LBFGS": (zeroes_in_a_closure, lbfgs),
    "scaler and clipping": (scales_and_clips, adamw),
    "accumulation": (accumulates, adamw),
    "two optimizers": (takes_turns, adamw),
    "assigned by hand": (assigns, adamw),
    "memory handed out again": (hands_memory_out_again, adamw),
}


@pytest.mark.parametrize("name", DROPPING)
def test_a_loop_that_drops_its_gradients_gets_no_warning_and_saves_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    one_step, make = DROPPING[name]

    def job(total: int, directory: Path = tmp_path / "run") -> dict[str, bytes]:
        torch.manual_seed(0)
        model, critic = nn.Linear(3, 2), nn.Linear(2, 1)
        objects: dict[str, Any] = {"model": model, "optimizer": make(model.parameters()), "critic": critic}
        objects["critic_optimizer"] = adamw(critic.parameters())
        objects["scaler"] = torch.amp.GradScaler("cpu", init_scale=4.0)
        if name == "memory handed out again":
            objects["scaler"] = Buckets()
        with Run(directory, settings=quietly(save_steps=6, keep_last_k=None), **objects) as run:
            for step in run.steps(total):
                one_step(objects, step)
        return bits(model)

    whole = job(18, tmp_path / "whole")
    job(12)
    assert job(18) == whole
    assert notices(caplog) == []
    assert stored(tmp_path / "run") == {6: False, 12: False, 18: False}


def test_a_job_of_one_step_ends_in_a_checkpoint_that_compares_as_equal(tmp_path: Path) -> None:
    for name, targets in (("whole", (2,)), ("run", (1, 2))):
        for total in targets:
            torch.manual_seed(0)
            model = nn.Linear(3, 2)
            objects: dict[str, Any] = {"model": model, "optimizer": adamw(model.parameters())}
            with Run(tmp_path / name, settings=quietly(), **objects) as run:
                for step in run.steps(total):
                    zeroes_first(objects, step)
    # While it is not known whether the next step uses them.
    assert (stored(tmp_path / "whole")[2], stored(tmp_path / "run")[2]) == (False, True)
    one, other = (Store(tmp_path / name / "checkpoints") for name in ("whole", "run"))
    found = compare_checkpoints(one, "final", other, "final")
    assert found.is_equal and found.tensors
    shown = compare(one.read_manifest("final"), other.read_manifest("final"))
    assert shown.is_same and [name.partition(".")[0] for name in shown.ignored] == ["gradients"] * 2


def test_a_gradient_that_no_checkpoint_can_contain_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Run(tmp_path / "run", settings=quietly(save_steps=1), model=model, optimizer=optimizer) as run:
        for step in run.steps(5):
            model(torch.tensor([step % 5])).sum().backward()
            optimizer.step()
    [said] = notices(caplog)
    assert "not be exact" in said
    assert stored(tmp_path / "run")[5] is False


# ---- optimizers that share their parameters ----


def drops(step: int) -> bool:
    del step
    return True


def drops_in_every_other_step(step: int) -> bool:
    """What the first optimizer has used, the second uses again."""
    return step % 2 == 0


def drops_but_in_odd_steps_from_5(step: int) -> bool:
    return step < 5 or step % 2 == 0


def drops_but_in_even_steps_from_4(step: int) -> bool:
    return step < 4 or step % 2 == 1


def share(
    directory: Path, is_computed: Callable[[int], bool], *, end: tuple[str, int] | None = None
) -> dict[str, object]:
    """Two optimizers of the same parameters take turns; where gradients are not computed, those that stand are used."""
    loop = Loop()
    second = torch.optim.SGD(loop.model.parameters(), lr=0.1, momentum=0.9)
    settings = quietly(save_steps=1, keep_last_k=None)
    # The one that may keep them comes first: what is put back for it must outlast the other.
    with Run(directory, settings=settings, second=second, **loop.objects) as run:
        for step in run.steps(TOTAL):
            if end == ("kill", step):
                raise Killed
            if end == ("stop", step):
                run.stop()
            if is_computed(step):
                loop.optimizer.zero_grad()
                loop.backward(step)
            (second if step % 2 else loop.optimizer).step()
    return loop.bits()


@pytest.mark.parametrize("is_computed", [drops, drops_in_every_other_step])
def test_optimizers_that_share_their_parameters_are_saved_when_it_is_due(
    tmp_path: Path, is_computed: Callable[[int], bool]
) -> None:
    whole = share(tmp_path / "whole", is_computed)
    assert sorted(stored(tmp_path / "whole")) == list(range(1, TOTAL + 1))
    for at in range(1, TOTAL - 1):
        with contextlib.suppress(Killed):
            share(tmp_path / f"killed-{at}", is_computed, end=("kill", at))
        assert share(tmp_path / f"killed-{at}", is_computed) == whole, at
        share(tmp_path / "jobs", is_computed, end=("stop", at))
    assert share(tmp_path / "jobs", is_computed) == whole


def test_of_shared_parameters_what_is_dropped_is_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    share(tmp_path / "run", drops)
    assert not notices(caplog)
    assert not any(has for step, has in stored(tmp_path / "run").items() if step > 3)


@pytest.mark.parametrize(
    ("last", "is_computed"), [(4, drops_but_in_odd_steps_from_5), (3, drops_but_in_even_steps_from_4)]
)
def test_an_optimizer_that_begins_to_use_the_gradients_of_another_after_a_resume_is_refused(
    tmp_path: Path, last: int, is_computed: Callable[[int], bool]
) -> None:
    share(tmp_path / "run", is_computed, end=("stop", last))
    with pytest.raises(NotExact) as refused:
        share(tmp_path / "run", is_computed)
    assert [name for name, _ in refused.value.differences] == ["gradients"]
