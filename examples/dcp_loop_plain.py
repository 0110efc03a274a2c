"""The training of dcp_loop.py as torch's documentation has it, for comparison.

python dcp_loop_plain.py STEPS DIRECTORY
"""

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
SAVE_STEPS = 4


class Training:
    """Model and optimizer as one object that DCP saves and loads."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        layers = [torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 32)]
        self.model = torch.nn.Sequential(*layers)
        if dist.is_initialized():
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, step: int) -> torch.Tensor:
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        # DCP saves no RNG state: what is drawn depends on the step alone.
        torch.manual_seed(1000 * step + rank)
        batch = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))[rank::size]
        loss: torch.Tensor = (self.model(batch) - batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    directory = Path(sys.argv[2])
    directory.mkdir(parents=True, exist_ok=True)
    with process_group():
        training = Training()
        state = {"training": training}
        saved = sorted(int(path.name.removeprefix("step-")) for path in directory.iterdir())
        first = saved[-1] if saved else 0
        if first:
            dcp.load(state, checkpoint_id=directory / f"step-{first}")
        for step in range(first + 1, STEPS + 1):
            training.step(step)
            if step % SAVE_STEPS == 0:
                dcp.save(state, checkpoint_id=directory / f"step-{step}")
        whole = [
            value.full_tensor() if hasattr(value, "full_tensor") else value for value in training.model.parameters()
        ]
        weights = b"".join(value.detach().numpy().tobytes() for value in whole)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print("weights", hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
