"""A tiny training run, killed three ways, ends with the same bits as one that was left alone.

    python examples/killed_and_resumed.py

It trains a small character model on its own source text, once in one job, and once as a chain of jobs: one is killed
with SIGKILL in mid-step, one during a save, and one bit of the newest checkpoint is flipped before the last. It uses
the store alone, so it also shows how to put `unbroken.store` under a loop by hand. Exit code 3: the bits differ.
"""

import argparse
import io
import json
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from unbroken.run.lease import acquire, release, require_held
from unbroken.run.process import process_of, this_holder
from unbroken.store.check import Level
from unbroken.store.choose import resume_point
from unbroken.store.commit import Record, begin, commit
from unbroken.store.keep import LastK
from unbroken.store.parts import read_part
from unbroken.store.place import Store
from unbroken.store.sweep import settle

STEPS, SAVE_EVERY, CONTEXT, BATCH = 120, 20, 16, 32


class Trainer:
    """A model, its optimizer and its randomness: everything that one step depends on."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        text = Path(__file__).read_bytes()
        self.text = torch.tensor(list(text), dtype=torch.long)
        self.model = nn.Sequential(
            nn.Embedding(256, 32),
            nn.Flatten(),
            nn.Linear(32 * CONTEXT, 256),
            nn.Dropout(0.1),
            nn.ReLU(),
            nn.Linear(256, 256),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def step(self) -> float:
        """One optimizer step on a random batch."""
        at = torch.randint(0, len(self.text) - CONTEXT - 1, (BATCH,))
        context = torch.stack([self.text[i : i + CONTEXT] for i in at])
        loss = functional.cross_entropy(self.model(context), self.text[at + CONTEXT])
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()

    def state(self) -> bytes:
        """All of it as bytes that `torch.load(weights_only=True)` reads."""
        out = io.BytesIO()
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
        }
        torch.save(state, out)
        return out.getvalue()

    def restore(self, data: bytes) -> None:
        """Everything back, the generator last."""
        state = torch.load(io.BytesIO(data), weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])


def job(run: Path) -> None:
    """One job: take the run, resume from the newest usable checkpoint or start, train, save, let the run go."""
    store, trainer, losses, step = Store(run / "checkpoints"), Trainer(), list[str](), 0
    lease = acquire(run, this_holder(), token=secrets.token_hex(4), now_s=time.time(), process_of=process_of)
    choice = resume_point(store, Level.FULL, job=lease.job, at_ns=time.time_ns())
    for over in choice.passed_over:
        say(f"passed over {over.name}: {over.reason}")
    if choice.chosen is not None and choice.chosen.manifest is not None:
        manifest, directory = choice.chosen.manifest, store.path(choice.chosen.name)
        parts = {
            part.name: b"".join(map(bytes, read_part(store.files, directory, manifest, part)))
            for part in manifest.parts
        }
        trainer.restore(parts["state.pt"])
        losses, step = json.loads(parts["losses.json"]), manifest.step
    say(f"from {step}")
    while step < STEPS:
        losses.append(trainer.step().hex())
        step += 1
        say(f"step {step}")
        if step % SAVE_EVERY == 0:
            draft = begin(store, step=step, job=lease.job)
            written = [
                draft.write_part("state.pt", slowly(trainer.state(), step)),
                draft.write_part("losses.json", [json.dumps(losses).encode()]),
            ]
            record = Record(kind="final" if step == STEPS else "periodic", saved_at_ns=time.time_ns())
            plan = ["state.pt", "losses.json"]
            name = commit(draft, plan=plan, parts=written, record=record, fence=lambda: require_held(run, lease))
            settle(store, name, [LastK(3)], job=lease.job, is_live=lambda draft: draft.job == lease.job)
            say(f"committed {name}")
    release(run, lease, now_s=time.time())


def slowly(data: bytes, step: int) -> Iterator[bytes]:
    """The bytes in two halves, with a word between them: the instant at which the demo kills a save."""
    yield data[: len(data) // 2]
    say(f"saving {step}")
    yield data[len(data) // 2 :]


def say(line: str) -> None:
    print(line, flush=True)


def launch(run: Path, kill_at: str | None = None) -> tuple[str, str]:
    """Run one job, kill it when it says `kill_at`; returns where it began and how it ended."""
    command = [sys.executable, __file__, "--job", str(run)]
    began = "?"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            began = line.split()[1] if line.startswith("from ") else began
            if line.startswith("passed over"):
                print(f"    {line.rstrip()}")
            if line.rstrip() == kill_at:
                process.send_signal(signal.SIGKILL)
                break
        ended = process.wait()
    if ended not in (0, -signal.SIGKILL):
        raise SystemExit(f"the job failed with exit code {ended}")
    return began, "completed" if ended == 0 else f"SIGKILL at '{kill_at}'"


def flip_one_bit(run: Path) -> str:
    """Damage the newest checkpoint, as a bad disk or a cosmic ray would."""
    newest = (run / "checkpoints" / "latest").resolve() / "state.pt"
    data = bytearray(newest.read_bytes())
    data[len(data) // 3] ^= 1
    newest.write_bytes(data)
    return f"one bit flipped in {newest.parent.name}/state.pt"


def final(run: Path) -> dict[str, bytes]:
    store = Store(run / "checkpoints")
    manifest = store.read_manifest("final")
    directory = store.path("final")
    return {
        part.name: b"".join(map(bytes, read_part(store.files, directory, manifest, part))) for part in manifest.parts
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="A tiny run, killed three ways, against one that was left alone.")
    parser.add_argument("--job", type=Path, metavar="RUN", help=argparse.SUPPRESS)
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where to keep both runs (default: a temporary folder)")
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    if options.job:
        job(options.job)
        return 0
    where = options.dir or Path(tempfile.mkdtemp(prefix="unbroken-demo-"))
    print(f"runs are kept in {where}\n\n1. one job, left alone: {STEPS} steps, a save every {SAVE_EVERY}")
    launch(where / "one")
    print("2. the same run as a chain of short jobs")
    for number, kill_at in enumerate(["step 33", f"saving {4 * SAVE_EVERY}", None], start=1):
        if kill_at is None:
            print(f"    {flip_one_bit(where / 'many')}")
        began, ended = launch(where / "many", kill_at)
        print(f"    job {number}: from step {began:>3}  {ended}")
    alone, chained = final(where / "one"), final(where / "many")
    losses, again = json.loads(alone["losses.json"]), json.loads(chained["losses.json"])
    agree = sum(a == b for a, b in zip(losses, again, strict=True))
    same = agree == STEPS and alone["state.pt"] == chained["state.pt"]
    print(f"3. {agree} of {STEPS} losses agree bit for bit; the final state is {'equal' if same else 'NOT EQUAL'}")
    print(f"   loss {float.fromhex(losses[0]):.3f} -> {float.fromhex(losses[-1]):.3f}")
    print(f"\ntry next: unbroken ls {where / 'many'}\n          unbroken verify {where / 'many'} --full")
    return 0 if same else 3


if __name__ == "__main__":
    sys.exit(main())
