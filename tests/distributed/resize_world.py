"""What the ranks run that save in one world and load in another."""

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

import unbroken
from tests.distributed.training_world import Job, digest, moments, train, weights, wrapped

STEPS = 2


def place(root: str, wrap: str, size: int) -> str:
    """The run that a world of a size saved."""
    return f"{root}/{wrap}-{size}"


def plain_job(directory: str, wrap: str) -> Job:
    """A training whose state is the same on all ranks, but for the generators."""
    # Replicas that nobody keeps equal stay so only if all ranks draw alike.
    is_alike = wrap in ("bare", "tp")
    return Job(directory, wrap, total=STEPS, has_data=False, has_average=False, has_norm=False, is_alike=is_alike)


def save_each(root: str, wraps: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Train and save under each wrapper; tell the whole tensors' digests."""
    size = dist.get_world_size()
    return {wrap: train(plain_job(place(root, wrap, size), wrap)) for wrap in wraps}


def load_each(root: str, sources: tuple[tuple[str, int], ...], wraps: tuple[str, ...]) -> dict[str, Any]:
    """Load every source into fresh objects of each wrapper, whose optimizer never made a step."""
    results: dict[str, Any] = {}
    for source, size in sources:
        for wrap in wraps:
            model = wrapped(wrap, has_norm=False)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
            assert not optimizer.state
            objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            settings = unbroken.Settings(audit="off")
            with unbroken.Run(place(root, source, size), settings=settings, **objects) as run:
                results[f"{source} {size} as {wrap}"] = {
                    "step": run.step,
                    "weights": weights(model),
                    "moments": moments(model, optimizer),
                    "rates": scheduler.get_last_lr(),
                    "learning": [group["lr"] for group in optimizer.param_groups],
                }
                if wrap == "fsdp1":
                    results[f"{source} {size} exported"] = export_whole(cast("FullyShardedDataParallel", model))
    return results


def export_whole(model: FullyShardedDataParallel) -> dict[str, str]:
    """FSDP's own full state dict: on the first rank everything, on the others nothing."""
    # Not offloaded: torch reads freed memory where the model is on the CPU already.
    config = FullStateDictConfig(offload_to_cpu=False, rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        return {name: digest(value) for name, value in model.state_dict().items()}


def load_stock(directory: str, wrap: str) -> dict[str, Any]:
    """Read a checkpoint with torch's own tools alone."""
    model = wrapped(wrap, has_norm=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = Path(directory) / "checkpoints/final/state"
    into: dict[str, Any] = {"model": get_model_state_dict(model)}
    load(into, checkpoint_id=state)
    results: dict[str, Any] = {"loaded": weights(model), "files": len(list(state.glob("*.distcp")))}
    if dist.get_rank() == 0:
        out = Path(directory) / "whole.pt"
        dcp_to_torch_save(state, out)
        saved = torch.load(out, weights_only=True)["model"]
        results["converted"] = {name: digest(value) for name, value in saved.items()}
        convert = ("-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch", str(state), str(out))
        subprocess.run([sys.executable, *convert], check=True)
        again = torch.load(out, weights_only=True)["model"]
        results["converted by the command"] = {name: digest(value) for name, value in again.items()}
        bare = wrapped("bare", has_norm=False)
        bare.load_state_dict(saved, strict=True)
    dist.barrier()
    return results
