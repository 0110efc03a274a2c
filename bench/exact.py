"""What the exact sum costs: whole steps of it beside stock DDP and stock FSDP2, on gloo ranks of this machine.

    python -m bench.exact [--only time|memory] [--ranks 2] [--width 256] [--layers 4] [--length 256] [--repeats 9]
        [--worlds 3]

Ratios are to the stock peer that holds the model in the same way. Times are taken in rounds: each round computes one
step of every variant, in an order that turns from round to round, and a ratio is that of two steps of one round, so
that a slow minute of a shared machine hits both. Told are medians with the middle half around them, over several worlds
that are started anew, since a process may be lucky with its memory. Every variant computes the same lanes with
deterministic kernels, clips and steps the same optimizer. Memory is the most of a rank above its weights and moments.
The times are kept by ranks and tokens of a lane: ``exact-2x1024.json``.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from bench.exact_memory import peaks
from bench.exact_variants import BATCH, PAIRS, VARIANTS, Options
from bench.measure import Samples, write_results
from unbroken import exact
from unbroken.quoting import amounts
from unbroken.quoting.amounts import plural
from unbroken.report.style import Style
from unbroken.report.table import Column, table
from unbroken.testing.worlds import logs, spawn

WARMUP_ROUNDS = 2


@dataclass(frozen=True)
class Measured:
    """Seconds of steps by variant, round by round: by the clock, and of the processor."""

    parameters: int
    wall: dict[str, tuple[float, ...]]
    cpu: dict[str, tuple[float, ...]]


def timed(step: Callable[[], None]) -> tuple[float, float]:
    """Seconds of one step, by the clock and of the processor."""
    dist.barrier()
    began, cpu_began = time.perf_counter(), time.process_time()
    step()
    dist.barrier()
    # Of all threads of this rank, those that move bytes too: what a busy machine does not distort.
    return time.perf_counter() - began, time.process_time() - cpu_began


def measure(options: Options) -> Measured:
    """Every variant's steps, in turn, on every rank."""
    exact.pin("cpu")
    variants = {name: make(options) for name, make in VARIANTS.items()}
    names = list(variants)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(WARMUP_ROUNDS + options.repeats):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            sample = timed(variants[name].step)
            if number >= WARMUP_ROUNDS:
                found[name].append(sample)
    numel = sum(p.numel() for p in variants["DDP"].model.parameters())
    wall, cpu = ({name: tuple(each[kind] for each in found[name]) for name in names} for kind in (0, 1))
    return Measured(numel, wall, cpu)


def measured(options: Options, ranks: int, worlds: int) -> Measured:
    """The rounds of several worlds, one after the other."""
    results: list[Measured] = []
    for _ in range(worlds):
        ended = spawn(ranks, measure, options, timeout_seconds=900)
        if not all(each.is_good for each in ended):
            raise SystemExit(logs(ended))
        results.append(ended[0].value)
    wall = {name: tuple(value for each in results for value in each.wall[name]) for name in VARIANTS}
    cpu = {name: tuple(value for each in results for value in each.cpu[name]) for name in VARIANTS}
    return Measured(results[0].parameters, wall, cpu)


def ratio(ours: tuple[float, ...], peers: tuple[float, ...]) -> Samples:
    """Round by round."""
    return Samples(tuple(a / b for a, b in zip(ours, peers, strict=True)))


def middle_half(samples: Samples) -> str:
    low, _, high = statistics.quantiles(samples.values, n=4) if len(samples.values) > 1 else [samples.median] * 3
    return f"{low:.2f} to {high:.2f}"


def times(asked: argparse.Namespace, kinds: dict[str, Options]) -> dict[str, object]:
    """Print the table of times; returns the figures."""
    rows, figures = [], {}
    for kind, options in kinds.items():
        found = measured(options, asked.ranks, asked.worlds)
        for ours, peer in PAIRS:
            wall, cpu = ratio(found.wall[ours], found.wall[peer]), ratio(found.cpu[ours], found.cpu[peer])
            rows.append((kind, peer, f"{cpu.median:.2f}", middle_half(cpu), f"{wall.median:.2f}", middle_half(wall)))
            figures[f"{kind}, {peer}"] = {
                "stock_s": found.wall[peer],
                "exact_s": found.wall[ours],
                "wall_ratio": wall.median,
                "stock_cpu_s": found.cpu[peer],
                "exact_cpu_s": found.cpu[ours],
                "cpu_ratio": cpu.median,
            }
    columns = [Column("lanes"), Column("peer"), Column("cpu", True), Column("middle half"), Column("wall", True)]
    print(f"{found.parameters / 1e6:.1f} M parameters, {asked.ranks} ranks; exact over stock, whole steps")
    print(table([*columns, Column("middle half")], rows, style=Style(False)))
    return {"parameters": found.parameters, "ranks": asked.ranks, "figures": figures}


def memory(asked: argparse.Namespace, kinds: dict[str, Options]) -> dict[str, object]:
    """Print the table of memory; returns the figures."""
    rows, figures = [], {}
    for kind, options in kinds.items():
        found = peaks(options, asked.ranks)
        for ours, peer in ((ours, peer) for ours, peer in PAIRS if peer in found):
            mine, theirs = (max(found[name], key=lambda each: each.above) for name in (ours, peer))
            sizes = [amounts.size(each) for each in (mine.state, mine.above, theirs.above)]
            rows.append((kind, peer, *sizes, f"{mine.above / theirs.above:.2f}"))
            figures[f"{kind}, {peer}"] = {
                "state_bytes": mine.state,
                "exact_bytes": [each.above for each in found[ours]],
                "stock_bytes": [each.above for each in found[peer]],
            }
    columns = [Column("lanes"), Column("peer"), Column("state", True), Column("exact", True), Column("stock", True)]
    print(f"the most memory of a rank above its state, {asked.ranks} ranks")
    print(table([*columns, Column("ratio", True)], rows, style=Style(False)))
    return {"ranks": asked.ranks, "figures": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence; a lane has four of them")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--worlds", type=int, default=3)
    parser.add_argument("--only", choices=("time", "memory"))
    asked = parser.parse_args()
    # NCCL wants a GPU for each rank; gloo on the CPU takes any number.
    device = "cuda" if torch.cuda.device_count() >= asked.ranks else "cpu"
    kinds = {
        f"{'bf16' if is_low else 'fp32'}, {plural(rounds, 'lane')} a rank": Options(
            asked.width, asked.layers, asked.length, rounds, asked.repeats, is_low
        )
        for is_low in (False, True)
        for rounds in (1, 4)
    }
    if asked.only != "memory":
        print(write_results(f"exact-{asked.ranks}x{BATCH * asked.length}", times(asked, kinds)))
    if asked.only != "time":
        on_device = {kind: replace(each, repeats=0, device=device) for kind, each in kinds.items()}
        print(write_results("exact_memory", memory(asked, on_device)))


if __name__ == "__main__":
    main()
