"""How fast the fingerprint is beside a plain sum over the same bytes, on the CPU and on CUDA where there is one.

python -m bench.fingerprint [--repeats 5] [--megabytes 256]
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from bench.measure import interleaved, write_results
from unbroken.report.style import Style
from unbroken.report.table import Column, table
from unbroken.state.fingerprint import contribution
from unbroken.state.mixing import Keys, Passes, Places, words_of

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)


def rate(action: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> float:
    """Gigabytes a second of wall time."""
    wait_for(tensor)
    start = time.perf_counter()
    action(tensor)
    wait_for(tensor)
    return tensor.nbytes / (time.perf_counter() - start) / 1e9


def wait_for(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def hash_it(tensor: torch.Tensor) -> object:
    return contribution("w", tensor)


def hash_with_passes(tensor: torch.Tensor) -> None:
    words, _ = words_of(tensor)
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    Passes(tensor.device)(words, Places(0, (), False), Keys(1, 2), total)


def read_once(tensor: torch.Tensor) -> object:
    """The least that any function of all bytes must do."""
    return tensor.view(torch.int64).sum()


def objects(device: torch.device, size_bytes: int) -> dict[str, Callable[[], float]]:
    found: dict[str, Callable[[], float]] = {}
    for dtype in DTYPES:
        tensor = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, device=device).view(dtype)
        label = f"{device.type} {str(dtype).removeprefix('torch.')}"
        found[f"{label}, fingerprint"] = partial(rate, hash_it, tensor)
        if device.type == "cuda":
            found[f"{label}, passes"] = partial(rate, hash_with_passes, tensor)
    found[f"{device.type}, plain sum"] = partial(rate, read_once, tensor)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=256)
    options = parser.parse_args()
    measured = objects(torch.device("cpu"), options.megabytes << 20)
    machine = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        # Many times the caches of the device, so that the figure is its memory's.
        measured.update(objects(torch.device("cuda"), options.megabytes << 24))
        machine["cuda"] = torch.cuda.get_device_name()
    found = interleaved(measured, options.repeats)
    rows = [(name, f"{samples.median:.2f}", samples.spread) for name, samples in found.items()]
    print(table([Column("what"), Column("GB/s", True), Column("spread")], rows, style=Style(False)))
    figures = {name: {"gb_per_s": samples.values, "median": samples.median} for name, samples in found.items()}
    print(write_results("fingerprint", {"figures": figures, "machine": machine}))


if __name__ == "__main__":
    main()
