"""What a user gets: saves and resumes through ``unbroken.Run`` with default settings, beside the limit of the disk.

    python -m bench.defaults [--device cuda] [--width 8192] [--layers 20] [--steps 300] [--directory DIR]

Every save counts, the first of a job included. The disk's limit is taken in the same run: the best of direct and
buffered I/O by one to sixteen threads, writes with a sync. Reads are cold where the kernel's caches can be dropped
(root).
"""

import argparse
import contextlib
import itertools
import json
import mmap
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from bench.measure import write_results
from unbroken.report.style import Style
from unbroken.report.table import Column, table

BLOCK_BYTES = 16 << 20
# Threads that read so many files: many threads are not the fastest readers of every disk.
READERS: Final[Mapping[int, Sequence[int]]] = {4: (1, 2, 4, 8, 16), 16: (16,)}


# ---- the script of a user, in a process of its own ----


def loop(options: argparse.Namespace) -> None:
    """A plain loop: a model, AdamW, one logged loss."""
    import torch
    from torch import nn

    import unbroken

    torch.manual_seed(0)
    device = torch.device(options.device)
    model = nn.Sequential(*(nn.Linear(options.width, options.width) for _ in range(options.layers))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    batch = torch.randn(options.batch, options.width, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    settings = unbroken.Settings(save_steps=options.save_steps, keep_last_k=1)
    began = time.perf_counter()
    times: list[float] = []
    opened_s = None
    with unbroken.Run(options.run, model=model, optimizer=optimizer, settings=settings) as run:
        opened_s = time.perf_counter() - began
        last = time.perf_counter()
        for step in run.steps(options.steps):
            if step == options.stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss.detach())
            # Waits for the device, so that whatever holds the loop up is seen in its step.
            loss.item()
            now = time.perf_counter()
            times.append(now - last)
            last = now
    state_bytes = sum(each.nbytes for each in model.parameters()) * 3
    Path(options.out).write_text(json.dumps({"times": times, "opened_s": opened_s, "bytes": state_bytes}))


def run_loop(options: argparse.Namespace, run: Path, *, steps: int, stop_at: int = -1) -> dict[str, Any]:
    """One job; returns what it measured and the commits in its journal."""
    out = run.with_suffix(".json")
    command = [sys.executable, "-m", "bench.defaults", "--loop", "--run", str(run), "--out", str(out)]
    command += ["--steps", str(steps), "--stop-at", str(stop_at), "--save-steps", str(options.save_steps)]
    for name in ("device", "width", "layers", "batch"):
        command += [f"--{name}", str(getattr(options, name))]
    began = time.monotonic()
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode or not out.exists():
        raise SystemExit(f"exit code {done.returncode}: {done.stderr}")
    found: dict[str, Any] = json.loads(out.read_text())
    out.unlink()
    journals = sorted((run / "journal").iterdir(), key=lambda path: path.stat().st_mtime)
    events = [json.loads(line) for line in journals[-1].read_text().splitlines()]
    found["commits"] = [event for event in events if event["kind"] == "commit"]
    found["job_s"] = time.monotonic() - began
    return found


# ---- the limit ----


def disk_limit(root: Path, size_bytes: int) -> dict[str, float]:
    """GB per second of plain writes with a sync, and of cold reads, by way and number of writers."""
    found: dict[str, float] = {}
    for is_direct in (True, False):
        for files in (1, 2, 4, 8, 16):
            each = size_bytes // files // BLOCK_BYTES * BLOCK_BYTES
            paths = [root / f"limit-{number}" for number in range(files)]
            with ThreadPoolExecutor(files) as pool:
                began = time.perf_counter()
                list(pool.map(_write, paths, [each] * files, [is_direct] * files))
                taken = time.perf_counter() - began
            way = "direct" if is_direct else "buffered"
            found[f"write, {way}, {files}"] = each * files / taken / 1e9
            for readers, direct_read in itertools.product(READERS.get(files, ()), (True, False)):
                drop_caches()
                rate = each * files / _read_all(paths, each, readers, direct_read) / 1e9
                found[f"read, {'direct' if direct_read else 'buffered'}, {files} by {readers}, {way}"] = rate
            for path in paths:
                path.unlink()
    return found


def _write(path: Path, size_bytes: int, is_direct: bool) -> None:
    block = mmap.mmap(-1, BLOCK_BYTES)
    block.write(os.urandom(BLOCK_BYTES))
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if is_direct else 0))
    for _ in range(size_bytes // BLOCK_BYTES):
        os.write(handle, block)
    os.fsync(handle)
    os.close(handle)


def _read_all(paths: Sequence[Path], each: int, readers: int, is_direct: bool) -> float:
    """Seconds for all blocks of some files, by so many threads."""
    places = [(path, at) for at in range(0, each, BLOCK_BYTES) for path in paths]
    with ThreadPoolExecutor(readers) as pool:
        began = time.perf_counter()
        list(pool.map(_read, *zip(*places, strict=True), [is_direct] * len(places)))
        return time.perf_counter() - began


def _read(path: Path, at: int, is_direct: bool) -> None:
    block = mmap.mmap(-1, BLOCK_BYTES)
    handle = os.open(path, os.O_RDONLY | (os.O_DIRECT if is_direct else 0))
    os.preadv(handle, [block], at)
    os.close(handle)


def drop_caches() -> bool:
    """Whether the kernel's caches could be dropped."""
    os.sync()
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3")
        return True
    return False


# ---- the table ----


def beside_writes(found: dict[str, Any], save_steps: int) -> tuple[float, float, float]:
    """A step's median seconds, the seconds lost to all saves, and the share of the time beside them that is."""
    times = found["times"]
    base = statistics.median(times[save_steps // 2 : save_steps - 1])
    lost = beside = 0.0
    for commit in found["commits"]:
        at, left = commit["step"], commit["seconds"]
        while left > 0 and at < len(times):
            lost, beside, left = lost + times[at] - base, beside + times[at], left - times[at]
            at += 1
    return base, lost, lost / beside if beside else 0.0


def main() -> None:
    options = _options()
    if options.loop:
        loop(options)
        return
    root = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        report(options, root)
    finally:
        shutil.rmtree(root)


def report(options: argparse.Namespace, root: Path) -> None:
    size_bytes = 12 * options.layers * (options.width**2 + options.width)
    limit = disk_limit(root, min(size_bytes, 4 << 30))
    write_limit = max(value for name, value in limit.items() if name.startswith("write"))
    read_limit = max(value for name, value in limit.items() if name.startswith("read"))
    early = run_loop(options, root / "early", steps=options.steps, stop_at=3)
    shutil.rmtree(root / "early")
    full = run_loop(options, root / "run", steps=options.steps)
    base, lost, share = beside_writes(full, options.save_steps)
    is_cold = drop_caches()
    resumed = run_loop(options, root / "run", steps=options.steps + 1)
    drop_caches()
    began = time.monotonic()
    verify = [sys.executable, "-m", "unbroken", "verify", str(root / "run"), "--full"]
    subprocess.run(verify, check=True, stdout=subprocess.DEVNULL)
    verify_s = time.monotonic() - began
    rates = [commit["bytes"] / commit["seconds"] / 1e9 for commit in full["commits"]]
    pauses = [f"{commit['paused_s']:.3f}" for commit in (*early["commits"], *full["commits"])]
    resume_rate, verify_rate = size_bytes / resumed["opened_s"] / 1e9, size_bytes / verify_s / 1e9
    rows = [
        ("pause, save after an early SIGTERM, s", pauses[0], "", ""),
        ("pause, first save, s", pauses[1], "", ""),
        ("pause, later saves, s", ", ".join(pauses[2:]), "", ""),
        ("lost beside all writes, s", f"{lost:.2f}", "", f"{share:.1%} of the steps, {base:.3f} s each"),
        ("durable, GB/s", ", ".join(f"{rate:.2f}" for rate in rates), *_against(statistics.median(rates), write_limit)),
        ("resume, GB/s", f"{resume_rate:.2f}", *_against(resume_rate, read_limit)),
        ("verify --full, GB/s", f"{verify_rate:.2f}", *_against(verify_rate, read_limit)),
    ]
    cold = "cold" if is_cold else "warm"
    print(f"{size_bytes / 1e9:.1f} GB of state; a {cold} resume took {resumed['opened_s']:.2f} s")
    columns = [Column("what"), Column("unbroken", True), Column("limit", True), Column("ratio")]
    print(table(columns, rows, style=Style(False)))
    print(json.dumps({name: round(value, 2) for name, value in limit.items()}, indent=1))
    facts = {"limit": limit, "early": early, "full": full, "resumed": resumed, "verify_s": verify_s}
    print(write_results(f"defaults-{options.device}", facts))


def _against(rate: float, limit: float) -> tuple[str, str]:
    return f"{limit:.2f}", f"{rate / limit:.2f}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--batch", type=int, default=20480)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-steps", type=int, default=90)
    parser.add_argument("--directory", default=None)
    parser.add_argument("--loop", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--stop-at", type=int, default=-1, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
