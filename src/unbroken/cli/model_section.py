"""What ``validate`` says about the model of a config: how much memory a rank needs, how many jobs the run takes.

Both are counted, not tried: no device is looked at. How long a step takes is known where the run has made some.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from unbroken import amounts
from unbroken.config import Config
from unbroken.config.memory import compute_bytes, estimate
from unbroken.run.deadline import learned_reserve
from unbroken.run.journal import read_journal
from unbroken.run.layout import Layout
from unbroken.run.metrics import Stitched, read_metrics

SPEED: Final = "tokens_per_s"
_RECENT: Final = 50


def memory_facts(config: Config, world: int, vocabulary: int | None) -> dict[str, Any] | None:
    """Bytes on one rank; None where nobody says how many ids there are.

    Args:
        config: what is trained.
        world: the number of ranks.
        vocabulary: the ids of the tokenizer that made the data, where that is known.
    """
    rows = config.model.rows(vocabulary)
    if rows is None:
        return None
    found = estimate(config, rows, world)
    return {
        **{f"{name}_bytes": size for name, size in asdict(found).items()},
        "total_bytes": found.total,
        "world_size": world,
        "sharding": config.training.sharding,
        "vocab_size": rows,
        "compute_bits": 8 * compute_bytes(config),
    }


def memory_text(facts: Mapping[str, Any] | None, config: Config) -> str:
    """The same for a person."""
    if facts is None:
        return "memory   not estimated: model.vocab_size is null, and no data says how many ids there are"
    size = {name.removesuffix("_bytes"): amounts.size(facts[name]) for name in facts if name.endswith("_bytes")}
    ranks = amounts.plural(facts["world_size"], "rank")
    held = f"sharded over {ranks}" if facts["sharding"] == "fsdp2" and facts["world_size"] > 1 else f"whole on {ranks}"
    assumed = ", as on a GPU" if config.training.mixed_precision is None else ""
    checkpointed = config.training.gradient_checkpointing
    every = "" if checkpointed is True or not checkpointed else f" (one block in {checkpointed} recomputed)"
    kept = ("weights", "gradients", "optimizer", *(("average",) if facts["average_bytes"] else ()), "logits")
    states = ", ".join(f"{name} {size[name]}" for name in kept)
    both = f"{size['activations_recomputed']} with gradient_checkpointing, {size['activations_kept']} without"
    return "\n".join(
        [
            f"memory   {size['total']} a rank, {held}, computed in {facts['compute_bits']} bits{assumed}",
            f"         {states}",
            f"         activations {size['activations']}{every}; {both}",
        ]
    )


def walltime_facts(config: Config, world: int) -> dict[str, Any] | None:
    """How many jobs the run takes; None where no wall time is set.

    Raises:
        StorageFailed: the system refused to read the records of the run.
    """
    limit_s = config.training.max_runtime_seconds
    if limit_s is None:
        return None
    layout = Layout(Path(config.training.output_dir))
    measured = read_metrics(layout)
    reserve_s = learned_reserve(read_journal(layout), config.training.walltime_reserve_seconds).seconds(limit_s)
    usable_s = max(0.0, limit_s - reserve_s)
    done = max(measured.kept, default=0)
    left = max(0, config.training.max_steps - done)
    step_s = _step_s(measured, config.global_batch_size(world) * config.data.max_length)
    steps_per_job = None if step_s is None else int(usable_s / step_s)
    return {
        "job_s": limit_s,
        "reserve_s": reserve_s,
        "usable_s": usable_s,
        "steps_done": done,
        "steps_left": left,
        "step_s": step_s,
        "steps_per_job": steps_per_job,
        "jobs": math.ceil(left / steps_per_job) if steps_per_job else None,
        "step_s_for_one_job": usable_s / left if left else None,
    }


def _step_s(measured: Stitched, tokens_per_step: int) -> float | None:
    speeds = [value for _, value in measured.series(SPEED)[-_RECENT:] if value > 0]
    return tokens_per_step / statistics.median(speeds) if speeds else None


def walltime_text(facts: Mapping[str, Any]) -> str:
    """The same for a person."""
    job, reserve = amounts.duration(facts["job_s"]), amounts.duration(facts["reserve_s"])
    lines = [f"walltime {job} a job, which stops {reserve} before its end"]
    left = facts["steps_left"]
    if not left:
        return "\n".join([*lines, "         no step is left"])
    if facts["step_s"] is None:
        needed = _seconds(facts["step_s_for_one_job"])
        lines.append(
            f"         {amounts.plural(left, 'step')} in one job if a step takes {needed}, in two if twice as long"
        )
    elif not facts["steps_per_job"]:
        lines.append(f"         a step took {_seconds(facts['step_s'])}: no job would finish one")
    else:
        per_job = f"{amounts.plural(facts['steps_per_job'], 'step')} a job"
        jobs = f"{amounts.plural(facts['jobs'], 'job')} for the {amounts.count(left)} left"
        lines.append(f"         a step took {_seconds(facts['step_s'])}: {per_job}, {jobs}")
    return "\n".join(lines)


def _seconds(seconds: float) -> str:
    return amounts.duration(seconds) if seconds >= 1 else f"{1000 * seconds:.3g} ms"
