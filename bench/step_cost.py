"""What a ``Run`` costs a loop per step: CPU time of a loop that logs one scalar tensor, with and without a run.

    python -m bench.step_cost [BLOCKS] [DEVICE]

Default settings, but for two that cost no step anything: no lines on the console, and no search for state that was not
passed to the run (each of the loops would find the other's optimizer). All loops run in one process, by turns, in
blocks of 200 steps, so that a busy machine changes all of them alike. Prints one line of JSON: the median microseconds
of CPU per step of each loop, without an optimizer and with a model of one weight and SGD, whose step a run counts; and
what the run adds, the median over blocks with its spread. Writes ``bench/results/step_cost.json``.
"""

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator

import torch
from torch import nn

import unbroken
from bench.measure import write_results

_STEPS_OF_A_BLOCK = 200
_WITHOUT_END = 10**12
Loop = Generator[None]


def bare(work: Callable[[], object]) -> Loop:
    for _ in range(_WITHOUT_END):
        work()
        yield


def held(work: Callable[[], object], value: torch.Tensor, directory: str, **objects: object) -> Loop:
    settings = unbroken.Settings(console=False, audit="off")
    with unbroken.Run(directory, settings=settings, **objects) as run:
        for _ in run.steps(_WITHOUT_END):
            work()
            run.log(loss=value)
            yield


def training(device: str) -> tuple[Callable[[], None], dict[str, object]]:
    """A step of SGD, and the objects of its run."""
    model = nn.Linear(1, 1, bias=False, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # By turns: a loop that uses the same one again keeps its gradients, which costs more.
    gradients = itertools.cycle([torch.zeros_like(model.weight) for _ in range(2)])

    def train() -> None:
        model.weight.grad = next(gradients)
        optimizer.step()

    return train, {"model": model, "optimizer": optimizer}


def cpu_us(loop: Loop) -> float:
    """CPU microseconds per step of one block."""
    began = time.process_time_ns()
    for _ in itertools.islice(loop, _STEPS_OF_A_BLOCK):
        pass
    return (time.process_time_ns() - began) / _STEPS_OF_A_BLOCK / 1000


def main() -> None:
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    value = torch.zeros((), device=device)
    trains, (trains_held, objects) = training(device)[0], training(device)
    with tempfile.TemporaryDirectory() as directory:
        loops = {
            "bare": bare(lambda: value.add_(1)),
            "run": held(lambda: value.add_(1), value, f"{directory}/run"),
            "bare_sgd": bare(trains),
            "run_sgd": held(trains_held, value, f"{directory}/sgd", **objects),
        }
        found: dict[str, list[float]] = {name: [] for name in loops}
        for number in range(blocks + 3):
            for name, loop in loops.items():
                took = cpu_us(loop)
                # The first blocks warm up.
                if number >= 3:
                    found[name].append(took)
        for loop in loops.values():
            # Ends the runs while their directory is there.
            loop.close()
    row: dict[str, object] = {"device": device, "blocks": blocks}
    row |= {f"{name}_us": round(statistics.median(each), 1) for name, each in found.items()}
    for name in ("", "_sgd"):
        added = [one - other for one, other in zip(found[f"run{name}"], found[f"bare{name}"], strict=True)]
        low, middle, high = (round(each, 1) for each in statistics.quantiles(added, n=4))
        row[f"added{name}_us"] = {"median": middle, "quartiles": [low, high]}
    print(json.dumps(row))
    print(write_results("step_cost" if device == "cpu" else f"step_cost-{device}", {**row, "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
