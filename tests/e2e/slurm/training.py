"""What the jobs of these tests train: tiny runs of one process and of two ranks, and their references without SLURM."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from unbroken.records.layout import Layout
from unbroken.records.metrics import is_exact, read_metrics
from unbroken.records.snapshot import read_run_state
from unbroken.store.directory import Store

STEPS = 600
# `go` lets it run, `halt` lets it ask for a person.
TRAIN = """
import sys, time, pathlib
import torch, unbroken
run_dir, seed = sys.argv[1], int(sys.argv[2])
torch.manual_seed(seed)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
examples = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
loader = torch.utils.data.DataLoader(examples, batch_size=8, shuffle=True)
trackers = tuple(sys.argv[3:])
settings = unbroken.Settings(save_steps=200, logging_steps=1, trackers=trackers)
with unbroken.Run(run_dir, settings=settings, model=model, optimizer=optimizer, data=loader) as run:
    for step in run.steps(600):
        features, target = next(run.data)
        loss = torch.nn.functional.mse_loss(model(features), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        if pathlib.Path("halt").exists():
            run.halt("the data is odd")
        if not pathlib.Path("go").exists():
            time.sleep(0.2)
"""

# `kill` or `raise` in the backward pass of the victim, once: the step is computed again by the next job.
DDP_TRAIN = """
import os, pathlib, signal, sys
import torch, torch.distributed as dist, unbroken
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
how, victim, resume = sys.argv[1], int(sys.argv[2]), sys.argv[3]
failed = pathlib.Path("failed")

def fail(_):
    failed.touch()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("the label is 1001 of 1000")

dist.init_process_group("gloo")
torch.manual_seed(7)
examples = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(examples, batch_size=8, sampler=DistributedSampler(examples, seed=7))
torch.manual_seed(dist.get_rank())
settings = unbroken.Settings(save_steps=2, logging_steps=1, keep_last_k=None, resume=resume)
with unbroken.Run("runs/a", settings=settings, model=model, optimizer=optimizer, data=loader) as run:
    for step in run.steps(12):
        features, target = next(run.data)
        out = model(features)
        if step == 9 and dist.get_rank() == victim and how != "never" and not failed.exists():
            out.register_hook(fail)
        loss = torch.nn.functional.mse_loss(out, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
"""

# The Trainer of Lightning, which has an answer of its own to SLURM's warning.
LIGHTNING_TRAIN = """
import hashlib, pathlib, sys, time
import lightning, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from unbroken.frameworks import lightning as unbroken_pl

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 4))

    def training_step(self, batch, batch_idx):
        if not pathlib.Path("go").exists():
            time.sleep(0.2)
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

lightning.seed_everything(7, verbose=False)
torch.set_num_threads(1)
model = Model()
examples = torch.utils.data.TensorDataset(torch.randn(64, 4))
loader = torch.utils.data.DataLoader(examples, batch_size=8, shuffle=True)
saver = ModelCheckpoint(f"{sys.argv[1]}/models", save_last=True, every_n_train_steps=100)
trainer = lightning.Trainer(max_steps=300, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
                            enable_model_summary=False, callbacks=[saver, unbroken_pl.Callback(sys.argv[1])])
trainer.fit(model, loader, ckpt_path="last")
weights = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
pathlib.Path("weights").write_text(hashlib.sha256(weights).hexdigest())
"""


def fit_alone(folder: Path) -> str:
    """The weights of Lightning's training that nobody disturbs."""
    (folder / "fit.py").write_text(LIGHTNING_TRAIN)
    (folder / "go").touch()
    command = [sys.executable, "fit.py", "run"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return (folder / "weights").read_text()


def train_alone(folder: Path, seed: int) -> Path:
    """The run that nobody disturbs; returns its directory."""
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(TRAIN)
    (folder / "go").touch()
    ended = subprocess.run(
        [sys.executable, "train.py", "run", str(seed)], cwd=folder, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return folder / "run"


def train_two_ranks_alone(folder: Path) -> Path:
    """The run of two ranks that nobody disturbs; returns its directory."""
    (folder / "ddp.py").write_text(DDP_TRAIN)
    command = [sys.executable, "-m", "unbroken", "run", "--nproc-per-node", "2", "--", "ddp.py", "never", "0", "auto"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return folder / "runs" / "a"


def bits(run: Path) -> dict[str, Any]:
    """All that must be equal: the final state, and every loss."""
    kept = read_metrics(Layout(run)).kept
    losses = {step: {name: text for name, text in row.bits.items() if is_exact(name)} for step, row in kept.items()}
    return {"final": Store(Layout(run).checkpoints).read_manifest("final").fingerprint, "losses": losses}


def step_of(run: Path) -> int:
    """How far a run is, by its live snapshot."""
    state = read_run_state(Layout(run))
    return (state.step or 0) if state is not None else 0
