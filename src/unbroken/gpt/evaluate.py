"""The loss on val/, with the same bits on any number of ranks, and without a trace in the training that goes on.

val/ is read once, in its own order, in lanes of fixed shape that are dealt to the ranks like those of a step. Each lane
gives a sum and a count; they are added exactly (``math.fsum``), so the order in which ranks answer does not matter.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unbroken.data.stream import Stream
from unbroken.exact.sharded import shards_of
from unbroken.gpt.device import Place
from unbroken.gpt.loss import IGNORED
from unbroken.gpt.model import GPT
from unbroken.state.rng import capture_rng, restore_rng, rng_devices


@dataclass(frozen=True)
class Evaluated:
    """The mean loss of a token, over so many."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """Out of how many equally likely tokens the model would have to choose."""
        return math.exp(self.loss) if self.loss < math.log(float(np.finfo(np.float64).max)) else math.inf


@dataclass(frozen=True)
class Evaluation:
    """How a model is evaluated; ``max_batches`` lanes at most, over all ranks, None for all of val/."""

    stream: Stream
    lane: int
    max_batches: int | None
    place: Place

    @property
    def lanes(self) -> int:
        """How many lanes an evaluation has."""
        lanes = -(-len(self.stream) // self.lane)
        return lanes if self.max_batches is None else min(lanes, self.max_batches)

    def __call__(self, model: GPT, computing: AbstractContextManager[None] | None = None) -> Evaluated:
        """Evaluate a model, inside ``computing`` if its weights must be lowered for it. Collective."""
        with torch.no_grad(), undisturbed(model), computing or nullcontext():
            said = [self._run_lane(model, lane) for lane in self._mine()]
        # A rank without a lane in the last round computed one again, because the others may wait for it.
        counted = said[: len(range(self.place.world.rank, self.lanes, self.place.world.size))]
        losses, tokens = torch.tensor(counted, dtype=torch.float64).reshape(-1, 2).T.tolist()
        everybody = self.place.world.all_gather((losses, tokens))
        total_tokens = math.fsum(count for _, counts in everybody for count in counts)
        total = math.fsum(loss for sums, _ in everybody for loss in sums)
        return Evaluated(total / total_tokens if total_tokens else math.nan, int(total_tokens))

    def _mine(self) -> Iterator[int]:
        rank, size = self.place.world.rank, self.place.world.size
        for first in range(0, self.lanes, size):
            yield min(first + rank, self.lanes - 1)

    def _run_lane(self, model: GPT, lane: int) -> tuple[float, float]:
        tokens, doc_ids, labels = self._read(lane)
        found = model(tokens, doc_ids, labels=labels)
        return float(found.total), float(found.tokens)

    def _read(self, lane: int) -> tuple[Tensor, Tensor, Tensor]:
        asked = np.arange(lane * self.lane, (lane + 1) * self.lane)
        last = len(self.stream) - 1
        rows = self.stream.read(np.minimum(asked, last))
        # The last lane is filled up with rows that count for nothing: a shape of its own would be compiled anew.
        labels = np.where((asked > last)[:, None], IGNORED, rows.labels)
        arrays = (rows.tokens, rows.doc_ids, labels)
        tokens, doc_ids, targets = (torch.from_numpy(each).to(self.place.device) for each in arrays)
        return tokens, doc_ids, targets


@contextmanager
def undisturbed(model: GPT) -> Iterator[None]:
    """Inside, the model is in evaluation mode; afterwards mode, generators and shards are as they were."""
    devices = rng_devices()
    before, was_training = capture_rng(devices), model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
        for module in shards_of(model):
            # Without a backward pass FSDP2 leaves the last parameters it gathered whole.
            module.reshard()
        restore_rng(before, devices)
