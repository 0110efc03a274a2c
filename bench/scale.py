"""What larger runs are predicted to pay: stall, durable time, restore and goodput, from constants that were measured.

    python -m bench.scale [--restart 300] [--write]

Nothing is measured here. The constants come from ``bench/results/`` (one H200 with default settings, and rank 0's work
for 512 ranks), the hardware and the failure rate from public reports; interval and goodput are computed by the model
behind ``unbroken plan``. ``--write`` puts the tables into ``docs/measured/scale.md``.
"""

import argparse
import json
import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.defaults import beside_writes
from bench.measure import RESULTS, write_results
from unbroken.records.goodput import Numbers, make_plan

PAGE = Path(__file__).resolve().parent.parent / "docs/measured/scale.md"
BEGIN, END = "<!-- made by bench.scale -->", "<!-- end -->"
DAY_S = 86_400.0

# ---- public figures ----

# The Llama 3 report: 419 unexpected interruptions in 54 days on 16,384 GPUs; storage that sustains 2 TB/s for a cluster
# of 24,576 GPUs; 400 TFLOP/s of a GPU on 16,384 of them, cut 8 ways by tensor and 16 by pipeline (table of 4D
# parallelism), with steps of 16 million tokens (section 3.4.1: from 2.87 trillion tokens on).
GPU_SECONDS_BETWEEN_FAILURES = 54 * DAY_S * 16_384 / 419
SHARED_BYTES_PER_S_OF_A_GPU = 2e12 / 24_576
FLOPS_OF_A_GPU = 400e12
# fp32 weights and two moments, as the measured loop has them.
BYTES_OF_A_PARAMETER = 12
# Weights, two moments and a step count of each.
TENSORS_OF_A_PARAMETER_TENSOR = 4
# Assumed: one exchange between hosts over TCP, hop by hop along a tree; and how many of them a save makes: votes,
# comparisons, gathers and sums.
HOP_S = 0.001
EXCHANGES_OF_A_SAVE = 16


@dataclass(frozen=True)
class Measured:
    """The constants of one GPU with default settings, and of rank 0 for one piece of a tensor."""

    state_bytes: float
    pause_s: float
    lost_share: float
    write_share: float
    read_share: float
    disk_write: float
    disk_read: float
    plan_piece_s: float
    describe_piece_s: float
    describe_again_piece_s: float
    decode_piece_s: float

    @classmethod
    def of(cls, defaults: dict[str, Any], messages: dict[str, Any]) -> "Measured":
        full, limit = defaults["full"], defaults["limit"]
        write = max(value for name, value in limit.items() if name.startswith("write")) * 1e9
        read = max(value for name, value in limit.items() if name.startswith("read")) * 1e9
        rates = [commit["bytes"] / commit["seconds"] for commit in full["commits"]]
        large = next(each for each in messages["large_worlds"] if each["is_sharded"])
        pieces = large["ranks"] * large["pieces_of_a_rank"]
        return cls(
            state_bytes=full["bytes"],
            pause_s=max(commit["paused_s"] for commit in full["commits"]),
            lost_share=beside_writes(full, full["commits"][0]["step"])[2],
            write_share=statistics.median(rates) / write,
            read_share=min(1.0, full["bytes"] / defaults["resumed"]["opened_s"] / read),
            disk_write=write,
            disk_read=read,
            plan_piece_s=large["rank_0_makes_the_plan_cpu_s"] / pieces,
            describe_piece_s=large["rank_0_describes_cpu_s_first_save"] / pieces,
            describe_again_piece_s=large["rank_0_describes_cpu_s_same_plan"] / pieces,
            decode_piece_s=large["index_decode_cpu_s"] / pieces,
        )


@dataclass(frozen=True)
class Case:
    """A training run: its size, its world, its layout and its step."""

    name: str
    parameters: float
    gpus: int
    parameter_tensors: int
    tokens_of_a_step: float
    # Over how many groups the layers are spread: a rank holds that share of the tensors.
    stages: int = 1
    is_shared: bool = True

    @property
    def state_bytes(self) -> float:
        return self.parameters * BYTES_OF_A_PARAMETER

    @property
    def pieces(self) -> float:
        """Every rank writes its shard of each tensor that it holds."""
        return self.gpus * self.parameter_tensors * TENSORS_OF_A_PARAMETER_TENSOR / self.stages

    @property
    def step_s(self) -> float:
        return 6 * self.parameters * self.tokens_of_a_step / (self.gpus * FLOPS_OF_A_GPU)


CASES = (
    Case("8 B on 8 GPUs, its local disk", 8e9, 8, 291, 1e6, is_shared=False),
    Case("70 B on 256 GPUs, FSDP", 70e9, 256, 723, 4e6),
    Case("405 B on 16,384 GPUs, 16 stages", 405e9, 16_384, 1_137, 16e6, stages=16),
    Case("the same, each tensor over all GPUs", 405e9, 16_384, 1_137, 16e6),
)


@dataclass(frozen=True)
class Prediction:
    """Seconds, and the share of the time in which steps advance the run."""

    stall_first_s: float
    stall_s: float
    durable_first_s: float
    durable_s: float
    restore_s: float
    mtbf_s: float
    interval_s: float
    lost_per_failure_s: float
    goodput: float


def storage(case: Case, measured: Measured) -> tuple[float, float]:
    """Bytes per second that the run's storage takes and gives."""
    if case.is_shared:
        rate = SHARED_BYTES_PER_S_OF_A_GPU * case.gpus
        return rate, rate
    return measured.disk_write, measured.disk_read


def predict(case: Case, measured: Measured, *, restart_s: float, failures: float = 1.0) -> Prediction:
    """One case: ``restart_s`` is until the new processes may read, ``failures`` a multiple of the public rate."""
    write, read = storage(case, measured)
    # Copies on the device are as long as the rank's share of the state; below what was measured nothing is promised.
    share = max(1.0, case.state_bytes / case.gpus / measured.state_bytes)
    talk_s = EXCHANGES_OF_A_SAVE * math.ceil(math.log2(case.gpus)) * HOP_S
    stall_s = measured.pause_s * share + talk_s
    durable_s = case.state_bytes / (measured.write_share * write) + measured.describe_again_piece_s * case.pieces
    restore_s = case.state_bytes / (measured.read_share * read) + measured.decode_piece_s * case.pieces
    mtbf_s = GPU_SECONDS_BETWEEN_FAILURES / case.gpus / failures
    plan_s = measured.plan_piece_s * case.pieces
    numbers = Numbers(
        steps=1_000_000,
        step_s=case.step_s,
        save_s=durable_s,
        # What a save costs the loop: its pause, and slower steps beside the write.
        paused_s=stall_s + measured.lost_share * durable_s,
        mtbf_s=mtbf_s,
        # Each job plans once, at its first save.
        restart_s=restart_s + restore_s + plan_s,
    )
    plan = make_plan(numbers, now_s=0.0)
    return Prediction(
        stall_first_s=stall_s + plan_s,
        stall_s=stall_s,
        durable_first_s=durable_s + (measured.describe_piece_s - measured.describe_again_piece_s) * case.pieces,
        durable_s=durable_s,
        restore_s=restore_s,
        mtbf_s=mtbf_s,
        interval_s=plan.interval_s,
        lost_per_failure_s=plan.lost_per_failure_s,
        goodput=1 - plan.lost_share,
    )


def measured_here() -> Measured:
    """The constants that are kept in ``bench/results``."""
    found = [json.loads((RESULTS / f"{name}.json").read_text()) for name in ("defaults-cuda", "messages")]
    return Measured.of(*found)


def duration(seconds: float) -> str:
    """A duration with two or three digits."""
    for unit, size in (("days", DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def tables(measured: Measured, restart_s: float) -> str:
    """The page's two tables: what is predicted, and how far it depends on what is assumed."""
    columns = ("run", "state", "stall", "durable", "stall, first save", "durable, first save", "restore")
    head: tuple[str, ...] = (*columns, "fails every", "saves every", "goodput")
    rows = [head, ("---",) * len(head)]
    for case in CASES:
        found = predict(case, measured, restart_s=restart_s)
        shown = [found.stall_s, found.durable_s, found.stall_first_s, found.durable_first_s]
        shown += [found.restore_s, found.mtbf_s, found.interval_s]
        rows.append(
            (case.name, f"{case.state_bytes / 1e12:.3g} TB", *map(duration, shown), f"{100 * found.goodput:.2f} %")
        )
    head = ("goodput if", *(case.name for case in CASES))
    others = [head, ("---",) * len(head)]
    for name, failures, seconds in (
        ("as above", 1.0, restart_s),
        ("a restart takes 1 min", 1.0, 60.0),
        ("a restart takes 20 min", 1.0, 1200.0),
        ("failures come 10 times as often", 10.0, restart_s),
    ):
        found_of = [predict(case, measured, restart_s=seconds, failures=failures).goodput for case in CASES]
        others.append((name, *(f"{100 * goodput:.2f} %" for goodput in found_of)))
    return "\n\n".join("\n".join(f"| {' | '.join(row)} |" for row in each) for each in (rows, others))


def with_tables(page: str, made: str) -> str:
    """The page with these tables between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--restart", type=float, default=300.0, help="seconds from a failure to the new processes")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/measured/scale.md")
    options = parser.parse_args()
    measured = measured_here()
    made = tables(measured, options.restart)
    print(made)
    if options.write:
        PAGE.write_text(with_tables(PAGE.read_text(), made))
        predicted = {case.name: asdict(predict(case, measured, restart_s=options.restart)) for case in CASES}
        facts = {"measured": asdict(measured), "predicted": predicted, "restart_s": options.restart}
        print(write_results("scale", facts))


if __name__ == "__main__":
    main()
