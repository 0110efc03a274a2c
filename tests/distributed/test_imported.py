"""An imported checkpoint on two ranks, into a model that FSDP2 shards: the numbered optimizer finds its parameters."""

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import unbroken
from tests.unit.foreign.test_import import call
from tests.unit.state.tiny import adam, learn, model, quietly, tiny
from unbroken import Run
from unbroken.testing.worlds import spawn


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _resumes(folder: str, way: str) -> list[torch.Tensor]:
    module = model(5)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    optimizer = adam(module)
    source = f"{folder}/model_000100.pt"
    if way == "load":
        # Each rank reads it, and keeps its shards.
        assert unbroken.load(source, model=module, optimizer=optimizer).step == 100
        return [_whole(optimizer.state[p]["exp_avg"]) for p in module.parameters()]
    settings = quietly(accept=("rng_state",), load_path=source if way == "load_path" else None)
    with Run(f"{folder}/run", settings=settings, model=module, optimizer=optimizer) as run:
        assert run.step == 100
        return [_whole(optimizer.state[p]["exp_avg"]) for p in module.parameters()]


@pytest.mark.promise("M1", "M5")
@pytest.mark.parametrize("way", ["import", "load_path", "load"])
def test_a_numbered_optimizer_is_sharded_as_its_parameters_are(tmp_path: Path, way: str) -> None:
    objects = tiny()
    learn(objects)
    torch.save(objects["model"].state_dict(), tmp_path / "model_000100.pt")
    torch.save(objects["optimizer"].state_dict(), tmp_path / "optim_000100_rank0.pt")
    if way == "import":
        assert call(tmp_path, tmp_path / "run")[0] == 0
    ended = spawn(2, _resumes, str(tmp_path), way)
    assert all(each.is_good for each in ended), [each.error for each in ended]
    optimizer = objects["optimizer"]
    kept = [optimizer.state[p]["exp_avg"] for p in objects["model"].parameters()]
    for each in ended:
        assert all(torch.equal(one, other) for one, other in zip(each.value, kept, strict=True))
