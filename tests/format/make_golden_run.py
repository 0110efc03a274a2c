"""Makes the golden run: a small training over several jobs, as this version writes it to disk, kept in git.

    python -m tests.format.make_golden_run NAME    writes tests/format/golden/NAME; only for a new format

What is here must still resume with every later version, bit for bit. ``train`` is one job of it. Its learning rate and
momentum are powers of two and its sums have a fixed order, so that every CPU computes the same bits.
"""

import contextlib
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unbroken
from unbroken.records import process
from unbroken.store.directory import Store
from unbroken.store.sweep import pin

HERE = Path(__file__).parent / "golden"
# Where it is made: pointers and the journal hold absolute paths.
PLACE = Path("/tmp/golden-run")
HOST, BOOT = "node-1", "0f0f0f0f-golden"
TARGET = 24


class Best:
    """A user's own object with state, rank by rank."""

    def __init__(self) -> None:
        self.loss = float("inf")

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss = state["loss"]


class Scale(nn.Module):
    """One weight for each input, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return inputs * self.weight


@contextlib.contextmanager
def on_the_golden_host(folder: Path) -> Iterator[None]:
    """Be the machine on which it was made: dumps on local disk count on the host that wrote them."""
    boot = folder / "boot_id"
    boot.write_text(BOOT)
    with mock.patch.object(socket, "gethostname", return_value=HOST), mock.patch.object(process, "_BOOT_ID", boot):
        yield


def train(directory: Path, *, until: int = TARGET, end: str = "", lr: float = 0.125, **settings: Any) -> Scale:  # noqa: ANN401
    """One job: resume or start, train to ``until``, and end as asked: ``stop``, ``dump`` or ``crash``."""
    torch.manual_seed(7)
    model, best = Scale(), Best()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.5)
    loader = DataLoader(TensorDataset(torch.arange(48.0).reshape(12, 4) / 8), batch_size=2, shuffle=True)
    chosen = unbroken.Settings(save_steps=4, keep_last_k=3, logging_steps=1, console=False, **settings)
    run = unbroken.Run(directory, settings=chosen, model=model, optimizer=optimizer, scheduler=scheduler, data=loader, best=best)  # fmt: skip  # noqa: E501
    with run:
        for step in run.steps(TARGET):
            (inputs,) = next(run.data)
            noise = torch.randint(0, 8, (4,)) / 8
            one, two, three, four = (model(inputs) * (inputs.round() - noise).sign()).sum(0) / 64
            # Added in an order that no vector unit chooses.
            loss = (one + two) + (three + four)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            best.loss = min(best.loss, loss.item())
            run.counters["noise"] = float(noise.sum())
            run.log(loss=loss)
            if step + 1 == until and end == "stop":
                run.stop("the golden run stops here")
            if step + 1 == until and end == "dump":
                os.kill(os.getpid(), signal.SIGTERM)
            if step + 1 == until and end == "crash":
                raise RuntimeError("the golden run crashes here")
    return model


def damage(path: Path) -> None:
    """Turn one byte of a file over."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def make(folder: Path) -> None:
    """Write the whole run into ``folder/run``, and its emergency area into ``folder/local``."""
    run, store = folder / "run", Store(folder / "run" / "checkpoints")
    emergency: dict[str, Any] = {"emergency_dir": str(folder / "local"), "grace_s": 0.001}
    train(run, until=10, end="stop")
    pin(store, "checkpoint-4", reason="for the paper", job="pin", at_ns=1_700_000_000_000_000_000)
    train(run, until=14, end="dump", **emergency)
    # Makes a checkpoint of the dump, and uses the learning rate of the checkpoint.
    with contextlib.suppress(RuntimeError):
        train(run, until=21, end="crash", lr=0.25, **emergency)
    damage(store.path("checkpoint-20") / "trainer_state.json")
    train(run, until=18, end="stop")
    train(run, until=18, end="stop", resume="16")
    # A window in which not even a dump fits, and one in which a dump fits and a save does not.
    train(run, until=19, end="dump", **emergency)
    train(run, until=19, end="dump", **{**emergency, "grace_s": 0.17})
    assert (run / "emergency" / "rank-00000.json").exists(), "this machine was too fast or too slow; make it again"


def main() -> None:
    """Make the golden run."""
    target = HERE / sys.argv[1]
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir()
    with on_the_golden_host(PLACE):
        make(PLACE)
    (PLACE / "boot_id").unlink()
    shutil.copytree(PLACE, target, symlinks=True)
    shutil.rmtree(PLACE)


if __name__ == "__main__":
    main()
