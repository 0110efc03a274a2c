"""What it costs that every sequence is verified as it is read: of the loader, and of a training step on this CPU.

    python -m bench.data_check [--tokens 20000000] [--batches 20000] [--repeats 9] [--steps 1]

Loader: CPU time per token of ``data.check: read`` beside ``quick``, interleaved, in the sequences and batches of each
config, no workers. Step: CPU time per token of the trainer's own model and optimizer (forward, backward, clip, AdamW),
one thread. The cost of a step is the loader's difference for its tokens. First opening: CPU time to take the
checksums, once per data folder.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.data import make_corpus
from bench.measure import interleaved, write_results
from unbroken.config import Config
from unbroken.config.presets import preset
from unbroken.data.corpus.catalogue import open_corpus
from unbroken.data.loader import Loader
from unbroken.data.stream import Stream
from unbroken.gpt.build import initialize
from unbroken.gpt.model import GPT
from unbroken.gpt.optimizer import make_optimizer
from unbroken.report.style import Style
from unbroken.report.table import Column, table

VOCAB = 50_304


@dataclass(frozen=True)
class Shape:
    """One config to be measured; ``lane`` sequences of ``length`` tokens make a step."""

    name: str
    config: Config
    lane: int
    length: int


def shapes() -> list[Shape]:
    """The two configs; sequences of the larger one are short, for a step of seconds on a CPU."""
    tiny, small = preset("tiny"), preset("small")
    return [
        Shape("tiny", tiny, tiny.training.per_device_batch_size, tiny.data.max_length),
        Shape("small (124 M)", small, 1, 512),
    ]


def loading(root: Path, shape: Shape, batches: int, *, check_reads: bool) -> Callable[[], float]:
    """Measures CPU nanoseconds per token of a loader."""
    stream = Stream(open_corpus(root), max_length=shape.length, seed=1, epochs=None, check_reads=check_reads)

    def measured() -> float:
        iterator = iter(Loader(stream, global_batch_size=shape.lane))
        next(iterator)
        start, tokens = time.process_time(), 0
        for _ in range(batches):
            tokens += next(iterator).tokens.numel()
        return (time.process_time() - start) / tokens * 1e9

    return measured


def stepping(shape: Shape, steps: int) -> Callable[[], float]:
    """Measures CPU nanoseconds per token of a training step."""
    vocab_size = shape.config.model.vocab_size or VOCAB
    model = GPT(shape.config.model, vocab_size)
    initialize(model, torch.Generator().manual_seed(0))
    optimizer = make_optimizer(model, shape.config.optimizer)
    tokens = torch.randint(0, vocab_size, (shape.lane, shape.length))

    def measured() -> float:
        start = time.process_time()
        for _ in range(steps):
            found = model(tokens, labels=tokens)
            (found.total / found.tokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return (time.process_time() - start) / (steps * tokens.numel()) * 1e9

    return measured


def first_opening(root: Path, tokens: int) -> float:
    """CPU nanoseconds per token to take the checksums of data that was never opened so; its plan is there."""
    corpus = open_corpus(root)
    Stream(corpus, max_length=2048, seed=1, check_reads=False)
    start = time.process_time()
    Stream(corpus, max_length=2048, seed=1)
    return (time.process_time() - start) / tokens * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--batches", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, figures = [], {}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "data"
        make_corpus(root, options.tokens)
        opening = first_opening(root, options.tokens)
        for shape in shapes():
            contestants = {
                "quick": loading(root, shape, options.batches, check_reads=False),
                "read": loading(root, shape, options.batches, check_reads=True),
            }
            found = interleaved(contestants, options.repeats)
            found |= interleaved({"step": stepping(shape, options.steps)}, 3)
            quick, read, step = (found[name].median for name in ("quick", "read", "step"))
            share = max(read - quick, 0.0) / step
            figures[shape.name] = {
                "ns_per_token": {name: each.values for name, each in found.items()},
                "loader_ratio": quick / read,
                "share_of_step": share,
            }
            rows.append(
                (shape.name, f"{quick:.2f}", f"{read:.2f}", f"{quick / read:.2f}", f"{step:,.0f}", f"{share:.4%}")
            )
    columns = [Column(name, True) for name in ("quick, ns/token", "read", "loader ratio", "step", "of a step")]
    print(table([Column("config"), *columns], rows, style=Style(False)))
    print(f"first opening: {opening:.2f} ns/token")
    print(write_results("data_check", {"figures": figures, "first_opening_ns_per_token": opening}))


if __name__ == "__main__":
    main()
