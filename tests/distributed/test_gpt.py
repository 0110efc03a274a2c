"""The model under FSDP2: one block after the other is sharded, and nothing about it changes."""

from typing import Any

import pytest
import torch

from tests.distributed.gpt_world import OPTIONS, config_of, sharded, tokens, whole
from tests.torch_versions import torch_is_older
from unbroken.gpt.build import initialize
from unbroken.gpt.model import GPT
from unbroken.testing.worlds import logs, spawn


def alone(label: str, dtype: torch.dtype) -> dict[str, Any]:
    """What one process computes with weights cast beforehand."""
    model = GPT(config_of(label))
    initialize(model, torch.Generator().manual_seed(11))
    initial = {name: whole(parameter) for name, parameter in model.named_parameters()}
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = model(tokens(), labels=tokens())
    loss.total.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"initial": initial, "loss": loss.total.item().hex(), "gradients": gradients}


@pytest.mark.skipif(torch_is_older(2, 9), reason="FSDP2 over gloo adds gradients and does not average them")
@pytest.mark.parametrize("dtype_name", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("label", list(OPTIONS))
def test_a_sharded_model_has_the_weights_and_the_loss_of_a_whole_one(label: str, size: int, dtype_name: str) -> None:
    ended = spawn(size, sharded, label, dtype_name, size)
    assert [each.exit_code for each in ended] == [0] * size, logs(ended)
    expected = alone(label, getattr(torch, dtype_name))
    for each in ended:
        assert each.value["initial"] == expected["initial"]
        assert each.value["loss"] == expected["loss"]
        assert each.value["gradients"].keys() == expected["gradients"].keys()
        for name, found in each.value["gradients"].items():
            # A mean over ranks rounds, and in bf16 a tied weight's two gradients are added before or after rounding.
            tolerance = 1e-4 if dtype_name == "float32" else 5e-2
            given, reference = torch.tensor(found), torch.tensor(expected["gradients"][name])
            assert float((given - reference).norm()) <= tolerance * float(reference.norm()), name
