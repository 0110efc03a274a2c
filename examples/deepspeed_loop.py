"""A DeepSpeed engine with ZeRO on the CPU, made a run.

    torchrun --nproc-per-node 2 deepspeed_loop.py STEPS DIRECTORY

``deepspeed_loop_plain.py`` is the same training without it.
"""

import hashlib
import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch

from unbroken.frameworks import deepspeed as unbroken_ds

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": int(os.environ.get("ZERO_STAGE", "2"))},
}
# The ranks exchange over gloo: the op that DeepSpeed would compile for one machine is not needed.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(1000 * step + torch.distributed.get_rank()))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(7)
    # Without a launcher, one rank.
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "0")
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    layers = [torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 16)]
    model = torch.nn.Sequential(*layers)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)

    with unbroken_ds.Checkpoints(engine, sys.argv[2], save_steps=4, keep_last_k=2) as checkpoints:
        checkpoints.load()
        while engine.global_steps < STEPS:
            data = batch(engine.global_steps)
            loss = (engine(data) - data).square().mean()
            engine.backward(loss)
            engine.step()
            if checkpoints.step_done(loss=loss):
                checkpoints.save()
            if checkpoints.is_stopping:
                break

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        weights = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    if torch.distributed.get_rank() == 0:
        print("weights", hashlib.sha256(weights).hexdigest())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
