"""What a ``Run`` costs a loop per step: CPU seconds of a loop that logs one scalar tensor, with and without a run.

    python -m bench.step_cost [STEPS] [DEVICE]

Default settings; the first step is counted, the save at the end is not. Prints one line of JSON per round: microseconds
of CPU per step, of a loop without an optimizer, and of one with a model of one weight and SGD, whose step a run counts.
"""

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn

import unbroken


def bare(steps: int, work: Callable[[], object]) -> float:
    began = time.process_time()
    for _ in range(steps):
        work()
    return time.process_time() - began


def held(steps: int, value: torch.Tensor, work: Callable[[], object], directory: str, **objects: object) -> float:
    settings = unbroken.Settings(console=False, audit="off")
    with unbroken.Run(directory, settings=settings, **objects) as run:
        began = ended = time.process_time()
        for step in run.steps(steps):
            work()
            run.log(loss=value)
            if step == steps - 1:
                ended = time.process_time()
        return ended - began


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    for number in range(3):
        value = torch.zeros((), device=device)
        model = nn.Linear(1, 1, bias=False, device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # By turns: a loop that uses the same one again keeps its gradients, which costs more.
        gradients = itertools.cycle([torch.zeros_like(model.weight) for _ in range(2)])

        def add(value: torch.Tensor = value) -> None:
            value.add_(1)

        def train(
            model: nn.Linear = model,
            optimizer: torch.optim.Optimizer = optimizer,
            gradients: Iterator[torch.Tensor] = gradients,
        ) -> None:
            model.weight.grad = next(gradients)
            optimizer.step()

        row: dict[str, object] = {"round": number, "device": device, "steps": steps}
        with tempfile.TemporaryDirectory() as directory:
            row["bare_us"] = bare(steps, add) / steps * 1e6
            row["run_us"] = held(steps, value, add, f"{directory}/run") / steps * 1e6
            row["bare_sgd_us"] = bare(steps, train) / steps * 1e6
            trained = held(steps, value, train, f"{directory}/sgd", model=model, optimizer=optimizer)
            row["run_sgd_us"] = trained / steps * 1e6
        print(json.dumps({key: round(each, 1) if isinstance(each, float) else each for key, each in row.items()}))


if __name__ == "__main__":
    main()
