"""Let `unbroken prove` loose for hours, with random seeds, and keep a ledger of what came of it.

    python tools/soak.py --hours 8                  what `make soak HOURS=8` runs
    python tools/soak.py --hours 8 --folder PLACE   elsewhere than in build/soak

The ledger, ``ledger.jsonl``, has one line a proof: seed, command, faults, verdict, cost. After a kill the same command
resumes: the hours count what the ledger holds. A seed that failed is tried again first, and counts until it passes. The
folder of a failed one is kept. Exit code 3 while any seed fails.
"""

import argparse
import json
import secrets
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOOL = (sys.executable, "-m", "unbroken")
SCRIPT = (sys.executable, str(ROOT / "tests" / "e2e" / "proven_script.py"), "run", "60")
TRAIN = (
    *("unbroken", "train", "run.yaml", "model.n_layer=1", "model.n_embd=32", "model.n_head=2"),
    *("training.max_steps=40", "training.eval_steps=8", "training.max_eval_batches=2", "optimizer.warmup_steps=4"),
)
COMMANDS = {"script": SCRIPT, "train": TRAIN}
MODULES = ("argparse", "calendar", "csv", "dis", "enum")
EXIT_DIFFERS = 3
MINUTES_A_PROOF = 10.0


@dataclass(frozen=True)
class Entry:
    """One proof of the ledger."""

    name: str
    seed: int
    verdict: str
    seconds: float
    at: float
    chains: int = 0
    injected: int = 0
    computed_again: int = 0
    faults: tuple[str, ...] = ()
    rerun: str = ""


def read_ledger(path: Path) -> list[Entry]:
    """What was proven before; a line that a crash cut is none."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(Entry(**{**json.loads(line), "faults": ()}))
        except (ValueError, TypeError):
            continue
    return found


def append(path: Path, entry: Entry) -> None:
    """Add a proof, on a line of its own, also behind one that a crash cut."""
    is_cut = path.exists() and not path.read_bytes().endswith(b"\n")
    with path.open("a") as lines:
        lines.write(("\n" if is_cut else "") + json.dumps(asdict(entry)) + "\n")


def failing(entries: list[Entry]) -> list[Entry]:
    """The seeds whose last proof did not pass."""
    last = {(entry.name, entry.seed): entry for entry in entries}
    return [entry for entry in last.values() if entry.verdict != "proven"]


def next_proofs(entries: list[Entry]) -> Iterator[tuple[str, int]]:
    """What to prove next, for ever: what failed before, then every command in turn under a new seed."""
    yield from ((entry.name, entry.seed) for entry in failing(entries))
    while True:
        for name in COMMANDS:
            yield name, secrets.randbelow(1 << 31)


def prepare(folder: Path) -> None:
    """Data and a config for the trainer, once."""
    if (folder / "run.yaml").exists():
        return
    text = folder / "text" / "library"
    text.mkdir(parents=True, exist_ok=True)
    for name in MODULES:
        (text / f"{name}.txt").write_text((Path(sysconfig.get_path("stdlib")) / f"{name}.py").read_text())
    words = ("tokenize", "--input-dir", "text", "--output-dir", "data", "--tokenizer-path", "bytes")
    subprocess.run([*TOOL, *words, "--val-fraction", "0.2"], cwd=folder, check=True)
    subprocess.run([*TOOL, "init", "--preset", "tiny", "-o", "run.yaml"], cwd=folder, check=True)


def one_proof(folder: Path, name: str, seed: int, minutes: float) -> Entry:
    """Prove one command under one seed; a prover that itself falls over is a failure too."""
    began_s = time.monotonic()
    words = [*TOOL, "prove", "--json", "--seed", str(seed), "--minutes", str(minutes), "--dir", "proofs", "--"]
    ended = subprocess.run([*words, *COMMANDS[name]], cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.monotonic() - began_s
    try:
        facts: dict[str, Any] = json.loads(ended.stdout)
        chains = facts["chains"]
    except (ValueError, KeyError):
        said = " ".join(ended.stdout.split())[-500:]
        return Entry(name, seed, f"exit code {ended.returncode}: {said}", seconds, time.time())
    failed = [chain for chain in chains if not chain["is_proven"]]
    if facts["is_proven"]:
        shutil.rmtree(facts["folder"], ignore_errors=True)
    return Entry(
        name,
        seed,
        "proven" if facts["is_proven"] else f"chain {failed[0]['chain']}: {failed[0]['problem'] or 'other bits'}",
        seconds,
        time.time(),
        chains=len(chains),
        injected=facts["injected"],
        computed_again=sum(chain["computed_again"] for chain in chains),
        faults=tuple(facts["faults"]),
        rerun=failed[0]["rerun"] if failed else "",
    )


def soak(folder: Path, hours: float) -> int:
    """Prove until the ledger holds so many hours; returns the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    ledger = folder / "ledger.jsonl"
    entries = read_ledger(ledger)
    proofs = next_proofs(entries)
    # What failed is tried again even where the hours are full: a fix must be able to clear it.
    again = len(failing(entries))
    while (left_s := hours * 3600 - sum(entry.seconds for entry in entries)) > 0 or again > 0:
        again -= 1
        name, seed = next(proofs)
        entry = one_proof(folder, name, seed, min(MINUTES_A_PROOF, max(left_s / 60, 0.1)))
        entries.append(entry)
        append(ledger, entry)
        sys.stderr.write(f"{name} seed {seed}: {entry.verdict} ({entry.chains} chains, {entry.seconds:.0f} s)\n")
    proven = sum(entry.chains for entry in entries if entry.verdict == "proven")
    sys.stdout.write(f"{len(entries)} proofs, {proven} chains proven, {sum(e.injected for e in entries)} faults\n")
    for entry in failing(entries):
        sys.stdout.write(f"failing: {entry.name} seed {entry.seed}: {entry.verdict}\n  {entry.rerun}\n")
    return EXIT_DIFFERS if failing(entries) else 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Prove for hours under random seeds.")
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "soak")
    asked = parser.parse_args()
    if not 0 < asked.hours < float("inf"):
        parser.error("--hours is a number above 0")
    return soak(asked.folder, asked.hours)


if __name__ == "__main__":
    sys.exit(main())
