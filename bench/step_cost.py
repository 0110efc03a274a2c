"""What a ``Run`` costs a loop per step: CPU seconds of a loop that logs one scalar tensor, with and without a run.

    python -m bench.step_cost [STEPS] [DEVICE]

Default settings; the first step is counted. Prints one line of JSON per round: microseconds of CPU per step.
"""

import json
import sys
import tempfile
import time

import torch

import unbroken


def bare(steps: int, value: torch.Tensor) -> float:
    began = time.process_time()
    for _ in range(steps):
        value.add_(1)
    return time.process_time() - began


def held(steps: int, value: torch.Tensor, directory: str) -> float:
    with unbroken.Run(directory, settings=unbroken.Settings(console=False, audit="off")) as run:
        began = time.process_time()
        for _ in run.steps(steps):
            value.add_(1)
            run.log(loss=value)
        return time.process_time() - began


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    for number in range(3):
        value = torch.zeros((), device=device)
        with tempfile.TemporaryDirectory() as directory:
            plain_s, run_s = bare(steps, value), held(steps, value, f"{directory}/run")
        row = {"round": number, "device": device, "steps": steps}
        print(json.dumps({**row, "bare_us": plain_s / steps * 1e6, "run_us": run_s / steps * 1e6}))


if __name__ == "__main__":
    main()
