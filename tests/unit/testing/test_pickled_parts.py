"""Checkpoints of frameworks are compared by value: equal values may have other bytes, and one bit is a difference."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import unbroken
from unbroken.frameworks.epoch_rng import packed
from unbroken.frameworks.folders import Folder
from unbroken.frameworks.framework_run import open_framework_run
from unbroken.records.stop import StopReason
from unbroken.testing import compare_runs

SETTINGS = unbroken.Settings(save_steps=None, keep_last_k=None, console=False, catch_signals=False)
PART = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
HEADER = b'{"weight":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
SAFETENSORS = len(HEADER).to_bytes(8, "little") + HEADER + b"ab"


class Scaler:
    """A class of another package, whose objects stand in a checkpoint."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Command:
    """Its pickle runs a command if it is unpickled by pickle itself."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (self.command,)


def state(*, is_shared: bool, moment: float = 0.5, scale: float = 8.0, **more: object) -> dict[str, Any]:
    """An optimizer's state, with its words as one object each or as several: pickle writes those otherwise."""
    word = "exp_avg"
    again = word if is_shared else "".join(list(word))
    moments = torch.full((3,), 0.5)
    moments[1] = moment
    return {"names": [word, again], "state": {0: {"exp_avg": moments}}, "scaler": Scaler(scale), **more}


def saved(
    run: Path,
    held: dict[str, Any],
    name: str = PART,
    *,
    rng: dict[str, Any] | None = None,
    weights: bytes = b"",
    place: int = 0,
) -> Path:
    """A run with one checkpoint of a framework."""
    opened = open_framework_run(run, SETTINGS, origin="some tool")
    staged = opened.stage(1, coming_bytes=0)
    assert isinstance(staged, Path)
    (staged / "checkpoint-1").mkdir()
    torch.save(held, staged / "checkpoint-1" / name)
    if weights:
        (staged / "checkpoint-1" / "model.safetensors").write_bytes(weights)
    if rng is not None:
        (staged / "checkpoint-1" / "unbroken_rng_0.pt").write_bytes(packed({"rng": rng}))
    assert opened.publish(Folder(1, "some tool", metadata={"place": place}), is_staged=True).name is not None
    opened.close(StopReason("done"), step=1)
    return run


def differing(a: Path, b: Path) -> tuple[str, ...]:
    found = compare_runs(a, b).state
    assert found is not None
    return (*found.tensors_differing, *found.values_differing)


@pytest.mark.promise("C8")
def test_equal_values_with_other_bytes_are_equal_and_one_bit_is_not(tmp_path: Path) -> None:
    one = saved(tmp_path / "a", state(is_shared=True))
    same = saved(tmp_path / "b", state(is_shared=False))
    digests = [unbroken.checkpoints(run)[0].path.joinpath(PART).read_bytes() for run in (one, same)]
    assert digests[0] != digests[1]
    assert differing(one, same) == ()
    moved = saved(tmp_path / "c", state(is_shared=False, moment=0.50000006))
    assert differing(one, moved) == (f"{PART}.state.0.exp_avg",)
    scaled = saved(tmp_path / "d", state(is_shared=False, scale=8.000000000000002))
    assert differing(one, scaled) == (f"{PART}.scaler.state.scale",)
    more = saved(tmp_path / "e", state(is_shared=False, extra=1))
    assert differing(one, more) == (f"{PART}.'extra'",)


@pytest.mark.promise("C8")
def test_a_pickle_that_runs_code_is_compared_by_its_bytes_and_not_run(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    one = saved(tmp_path / "a", state(is_shared=True, extra=Command(f"touch {touched}")))
    other = saved(tmp_path / "b", state(is_shared=False, extra=Command(f"touch {touched}")))
    assert differing(one, other) == (PART,)
    assert not touched.exists()


@pytest.mark.promise("C9", "C10")
def test_rng_states_of_a_framework_are_compared_and_those_of_no_use_are_not(tmp_path: Path) -> None:
    def rng(python: int, torch_seed: int) -> dict[str, Any]:
        return {"python": (3, (python, 624), None), "torch": torch.Generator().manual_seed(torch_seed).get_state()}

    one, other = (saved(tmp_path / str(number), state(is_shared=True), rng=rng(number, 7)) for number in (1, 2))
    found = compare_runs(one, other, idle=("python",)).state
    assert found is not None and found.is_equal and found.idle == ("python",)
    drawn = saved(tmp_path / "drawn", state(is_shared=True), rng=rng(1, 8))
    found = compare_runs(one, drawn, idle=("python",)).state
    assert found is not None and [each.partition(":")[0] for each in found.values_differing] == [
        "ranks.0.rng_state.torch.2"
    ]


@pytest.mark.promise("C9", "C10")
def test_the_optimizer_beside_weights_in_safetensors_is_compared_too(tmp_path: Path) -> None:
    one = saved(tmp_path / "a", state(is_shared=True), "optimizer.pt", weights=SAFETENSORS)
    same = saved(tmp_path / "b", state(is_shared=False), "optimizer.pt", weights=SAFETENSORS)
    other = saved(tmp_path / "c", state(is_shared=False, moment=0.25), "optimizer.pt", weights=SAFETENSORS)
    assert differing(one, same) == ()
    assert differing(one, other) == ("optimizer.pt.state.0.exp_avg",)
    # Before and after what follows the last step of an epoch: the weights alone have to agree.
    later = saved(tmp_path / "d", state(is_shared=False, moment=0.25), "optimizer.pt", weights=SAFETENSORS, place=1)
    assert differing(one, later) == ()
