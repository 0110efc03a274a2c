"""What the jobs of these tests train: a tiny run that is slow until it is let go, and its reference without SLURM."""

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
settings = unbroken.Settings(save_steps=200, log_steps=1)
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


def bits(run: Path) -> dict[str, Any]:
    """All that must be equal: the final state, and every loss."""
    kept = read_metrics(Layout(run)).kept
    losses = {step: {name: text for name, text in row.bits.items() if is_exact(name)} for step, row in kept.items()}
    return {"final": Store(Layout(run).checkpoints).read_manifest("final").fingerprint, "losses": losses}


def step_of(run: Path) -> int:
    """How far a run is, by its live snapshot."""
    state = read_run_state(Layout(run))
    return (state.step or 0) if state is not None else 0
