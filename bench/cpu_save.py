"""What a save through ``unbroken.Run`` costs a loop on a CPU, beside ``memcpy`` and ``torch.save`` of the same bytes.

    python -m bench.cpu_save [--megabytes 402] [--saves 6] [--threads 1] [--thread-beside]

CPU seconds of the training thread at the edge of a step, with default settings except how often a save is due; every
save counts, the first of the job included. ``memcpy`` and ``torch.save`` (to the same disk, not synced) are taken
between the saves, in the same thread, when no save is in flight; ``memcpy`` once as cold as a save finds the memory,
then twice again. At the first two saves a run also looks for objects that were not passed to it. ``--thread-beside``
keeps another thread alive, as progress bars and trackers do: then checksums are taken in a pass of their own.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import unbroken
from bench.measure import write_results

WIDTH = 1024
# Steps between two saves.
STEPS = 6


def cpu_s(action: Callable[[], object]) -> float:
    began = time.thread_time()
    action()
    return time.thread_time() - began


def copy(sources: Sequence[npt.NDArray[np.uint8]], target: npt.NDArray[np.uint8]) -> None:
    position = 0
    for source in sources:
        np.copyto(target[position : position + source.size], source)
        position += source.size


def model_of(megabytes: int) -> nn.Module:
    """Three times its weights are saved: with AdamW's two moments."""
    layers = max(1, round(megabytes * 1e6 / 3 / (4 * WIDTH * WIDTH)))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def measure(megabytes: int, saves: int, root: Path) -> dict[str, list[float]]:
    model = model_of(megabytes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    target = np.ones(12 * sum(each.numel() for each in model.parameters()) + (1 << 20), dtype=np.uint8)
    found: dict[str, list[float]] = {"pause": [], "step": [], "memcpy": [], "memcpy again": [], "torch.save": []}

    def measure_peers() -> None:
        tensors = [*model.parameters(), *(v for each in optimizer.state.values() for v in each.values())]
        sources = [each.detach().reshape(-1).view(torch.uint8).numpy() for each in tensors]
        found["memcpy"].append(cpu_s(lambda: copy(sources, target)))
        found["memcpy again"] += [cpu_s(lambda: copy(sources, target)) for _ in range(2)]
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        found["torch.save"].append(cpu_s(lambda: torch.save(state, root / "peer.pt")))

    settings = unbroken.Settings(save_steps=STEPS, console=False, keep_last_k=1)
    with unbroken.Run(root / "run", settings=settings, model=model, optimizer=optimizer) as run:
        at_edge = 0.0
        for step in run.steps(STEPS * saves + 1):
            if step:
                found["step" if step % STEPS else "pause"].append(time.thread_time() - at_edge)
            if step and step % STEPS == 0:
                # No save is in flight while the peers are measured.
                run._open.opened.saver.wait()
                measure_peers()
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1e-3)
            optimizer.step()
            run.log(loss=1.0)
            if step < STEPS:
                # Steps of a usual length, for what is made ready beside them.
                time.sleep(1.5)
            at_edge = time.thread_time()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=402)
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--thread-beside", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.thread_beside:
        threading.Thread(target=threading.Event().wait, name="beside", daemon=True).start()
    with tempfile.TemporaryDirectory() as root:
        found = measure(options.megabytes, options.saves, Path(root))
    for what, samples in found.items():
        rows = {"median_ms": statistics.median(samples) * 1e3, "least_ms": min(samples) * 1e3}
        print(json.dumps({"what": what, **rows, "most_ms": max(samples) * 1e3, "n": len(samples)}))
    for peer in ("memcpy", "torch.save"):
        ratios = [pause / other for pause, other in zip(found["pause"], found[peer], strict=True)]
        print(json.dumps({"pause over": peer, "first two": ratios[:2], "later, median": statistics.median(ratios[2:])}))
    print(write_results("cpu_save", {"cpu_s": found, "megabytes": options.megabytes, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
