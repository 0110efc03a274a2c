"""Small trainings with DeepSpeed on the CPU, each described by a dict."""

import contextlib
import hashlib
import json
import os
import random
import runpy
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import zero_to_fp32

from unbroken.frameworks import deepspeed as unbroken_ds

# The ranks exchange over gloo: the compiled op for one machine is not needed.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# Once, before the forks: an optimizer imports much when it is made.
torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
WIDTH = 16
# What the process that forks the trainings does once, to import what they will: in a world of one, at any free port.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
SMALLEST = {"plain": True, "stage": 1, "steps": 2, "environ": ALONE}


def make_model() -> torch.nn.Module:
    layers = [torch.nn.Linear(WIDTH, 64), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, WIDTH)]
    return torch.nn.Sequential(*layers)


def make_engine(stage: int, *, bf16: bool = False) -> Any:  # noqa: ANN401
    random.seed(7)
    torch.manual_seed(7 + int(os.environ["RANK"]))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "bf16": {"enabled": bf16},
    }
    model = make_model()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train_step(engine: Any) -> torch.Tensor:  # noqa: ANN401
    made = torch.Generator().manual_seed(1000 * engine.micro_steps + dist.get_rank())
    batch = torch.randn(4, WIDTH, generator=made).to(engine.get_data_types()[0])
    loss = (engine(batch) - batch).square().mean()
    engine.backward(loss)
    engine.step()
    found: torch.Tensor = loss.detach().float()
    return found


def weights_of(engine: Any) -> dict[str, torch.Tensor]:  # noqa: ANN401
    """The live weights, gathered."""
    held = list(engine.module.parameters())
    partitioned = [each for each in held if hasattr(each, "ds_id")]
    with deepspeed.zero.GatheredParameters(partitioned) if partitioned else contextlib.nullcontext():
        return {name: value.detach().clone() for name, value in engine.module.named_parameters()}


def digest(engine: Any) -> str:  # noqa: ANN401
    """The weights, the schedule and the RNG states of a rank; wrong moments show in the weights that follow."""
    found = hashlib.sha256()
    for name, value in sorted(weights_of(engine).items()):
        found.update(name.encode() + value.float().numpy().tobytes())
    found.update(repr((engine.lr_scheduler.state_dict(), engine.global_steps, engine.micro_steps)).encode())
    found.update(torch.get_rng_state().numpy().tobytes() + repr(random.getstate()).encode())
    return found.hexdigest()


def train(job: dict[str, Any]) -> None:
    """Do one job. ``plain``: without unbroken. ``result``: where its end is written."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    engine = make_engine(job["stage"], bf16=job.get("bf16", False))
    found = plain(job, engine) if job.get("plain") else ours(job, engine)
    found["digest"] = digest(engine)
    if job.get("convert"):
        found["converted"] = converted(job, engine)
    if int(os.environ["RANK"]) == 0:
        Path(job["result"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def plain(job: dict[str, Any], engine: Any) -> dict[str, Any]:  # noqa: ANN401
    """As DeepSpeed's documentation has it."""
    if Path(job["directory"], "latest").exists():
        engine.load_checkpoint(job["directory"])
    first = engine.global_steps
    while engine.global_steps < job.get("steps", 8):
        train_step(engine)
        at = engine.global_steps
        if engine.micro_steps % 2 == 0 and at % 2 == 0:
            if job.get("torn") == at:
                die_while_writing()
            engine.save_checkpoint(job["directory"])
    return {"first": first}


def die_while_writing() -> None:
    real_save = torch.save

    def torch_save(value: object, path: Any, *rest: Any, **more: Any) -> None:  # noqa: ANN401
        Path(path).write_bytes(b"PK half of it")
        os.kill(os.getpid(), signal.SIGKILL)
        real_save(value, path, *rest, **more)

    setattr(torch, "save", torch_save)  # noqa: B010 - typed otherwise


def ours(job: dict[str, Any], engine: Any) -> dict[str, Any]:  # noqa: ANN401
    """With unbroken."""
    options = {"save_steps": 2, **job.get("options", {})}
    with unbroken_ds.Checkpoints(engine, job["directory"], **options) as checkpoints:
        client_state = checkpoints.load()
        first = checkpoints.step
        if job.get("draws"):
            torch.rand(())
        while engine.global_steps < job.get("steps", 8):
            loss = train_step(engine)
            at = engine.global_steps
            if job.get("stop") == at and engine.micro_steps % 2 == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpoints.step_done(loss=loss):
                if job.get("torn") == at:
                    die_while_writing()
                if not job.get("alone") or dist.get_rank() == 0:
                    checkpoints.save(client_state={"seen": at})
            if checkpoints.is_stopping:
                if "exit_code" in job:
                    sys.exit(job["exit_code"])
                break
        return {"first": first, "client_state": client_state and client_state["seen"], "step": checkpoints.step}


def converted(job: dict[str, Any], engine: Any) -> dict[str, bool]:  # noqa: ANN401
    """Whether the weights that each converter gives are the live ones, bit for bit, or round to them in 16 bits."""
    run, live = job["directory"], weights_of(engine)
    engine.save_16bit_model(f"{run}/../model")
    dist.barrier()
    if dist.get_rank() != 0:
        return {}
    found = {"get": zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(run)}
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(run, f"{run}/../converted")
    found["convert"] = torch.load(f"{run}/../converted/pytorch_model.bin", weights_only=True)
    found["load"] = zero_to_fp32.load_state_dict_from_zero_checkpoint(make_model(), run).state_dict()
    argv, sys.argv = (
        sys.argv,
        ["zero_to_fp32.py", run, f"{run}/../by-script", "-t", f"checkpoint-{engine.global_steps}"],
    )
    runpy.run_path(f"{run}/zero_to_fp32.py", run_name="__main__")
    sys.argv = argv
    found["script"] = torch.load(f"{run}/../by-script/pytorch_model.bin", weights_only=True)
    found["16bit"] = torch.load(f"{run}/../model/pytorch_model.bin", weights_only=True)
    assert all(given.dtype == live[name].dtype for name, given in found["16bit"].items())
    return {
        how: given.keys() == live.keys()
        and all(torch.equal(given[name].to(live[name].dtype), live[name]) for name in live)
        for how, given in found.items()
    }
