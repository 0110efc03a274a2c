"""A run on a GPU: killed or stopped and resumed, it ends with the bits of one that was left alone.

Needs a CUDA device, which CI has not; the results of a run on one are kept in ``docs/measured/run-cuda.md``.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SCRIPT = """
import json, os, signal, sys
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
import unbroken

directory, kill_at, stop_at, fused = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "fused"
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
data = torch.randn(256, 64)
model = nn.Sequential(nn.Linear(64, 512), nn.Dropout(0.2), nn.GELU(), nn.Linear(512, 8)).cuda()
average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
scaler = torch.amp.GradScaler("cuda")
loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
items = dict(model=model, average=average, optimizer=optimizer, scheduler=scheduler, scaler=scaler, data=loader)
losses = {}
with unbroken.Run(directory, settings=unbroken.Settings(save_steps=4, audit="error", logging_steps=1), **items) as run:
    for step in run.steps(24):
        batch = next(run.data).cuda(non_blocking=True) + 0.1 * torch.randn(1, device="cuda")
        with torch.autocast("cuda", torch.float16):
            loss = model(batch).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update_parameters(model)
        run.log(loss=loss, lr=scheduler.get_last_lr()[0], scale=scaler.get_scale())
        if step + 1 == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if step + 1 == stop_at:
            run.stop("asked")
"""


def job(tmp_path: Path, run: str, *, kill_at: int = 0, stop_at: int = 0, fused: str = "plain") -> int:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    command = [sys.executable, str(script), str(tmp_path / run), str(kill_at), str(stop_at), fused]
    return subprocess.run(command, env=env, check=False).returncode


def compared(tmp_path: Path) -> int:
    command = [sys.executable, "-m", "unbroken", "diff", str(tmp_path / "one"), str(tmp_path / "many")]
    return subprocess.run(command, check=False).returncode


@pytest.mark.parametrize("fused", ["plain", "fused"])
def test_a_run_on_cuda_that_is_killed_and_stopped_ends_with_the_bits_of_one_left_alone(
    tmp_path: Path, fused: str
) -> None:
    assert job(tmp_path, "one", fused=fused) == 0
    assert job(tmp_path, "many", kill_at=7, fused=fused) == -signal.SIGKILL
    assert job(tmp_path, "many", stop_at=13, fused=fused) == 0
    assert job(tmp_path, "many", kill_at=19, fused=fused) == -signal.SIGKILL
    assert job(tmp_path, "many", fused=fused) == 0
    assert compared(tmp_path) == 0
    history = "".join(path.read_text() for path in sorted((tmp_path / "many/journal").glob("*.jsonl")))
    assert '"kind": "mismatch"' not in history
    assert '"kind": "recomputed"' in history
