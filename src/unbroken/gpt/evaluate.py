"""The loss on val/, with the same bits on any number of ranks, and without any effect on the training.

val/ is read once, in order, in lanes of fixed shape that are distributed over the ranks like those of a step. Each lane
gives a sum and a count; they are added exactly (``math.fsum``), so the order of the ranks does not matter.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unbroken.data.lanes import RankLanes
from unbroken.data.stream import Stream
from unbroken.exact.sharded import shards_of
from unbroken.gpt.device import RankDevice
from unbroken.gpt.loss import IGNORED
from unbroken.gpt.model import GPT
from unbroken.state.rng import capture_rng, restore_rng, rng_devices


@dataclass(frozen=True)
class Evaluated:
    """The mean loss per token, and the number of tokens."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """``exp(loss)``."""
        return math.exp(self.loss) if self.loss < math.log(float(np.finfo(np.float64).max)) else math.inf


@dataclass(frozen=True)
class Evaluation:
    """An evaluation on a stream, with at most ``max_batches`` lanes over all ranks; None: all of val/."""

    stream: Stream
    lane: int
    max_batches: int | None
    place: RankDevice

    @property
    def lanes(self) -> int:
        """How many lanes an evaluation has."""
        lanes = -(-len(self.stream) // self.lane)
        return lanes if self.max_batches is None else min(lanes, self.max_batches)

    @property
    def _share(self) -> RankLanes:
        return RankLanes(self.lanes, self.place.world.size, self.place.world.rank)

    def __call__(self, model: GPT, computing: AbstractContextManager[None] | None = None) -> Evaluated:
        """Evaluate a model, inside the context ``computing`` if given. Collective."""
        with torch.no_grad(), undisturbed(model), computing or nullcontext():
            said = [self._run_lane(model, lane) for lane in self._mine()]
        # A rank without a lane in the last round repeated one, because the collectives of the others may need it.
        counted = said[: self._share.count]
        losses, tokens = torch.tensor(counted, dtype=torch.float64).reshape(-1, 2).T.tolist()
        everybody = self.place.world.all_gather((losses, tokens))
        total_tokens = math.fsum(count for _, counts in everybody for count in counts)
        total = math.fsum(loss for sums, _ in everybody for loss in sums)
        return Evaluated(total / total_tokens if total_tokens else math.nan, int(total_tokens))

    def _mine(self) -> Iterator[int]:
        for round_number in range(self._share.rounds):
            lane = self._share.lane(round_number)
            yield self.lanes - 1 if lane is None else lane

    def _run_lane(self, model: GPT, lane: int) -> tuple[float, float]:
        tokens, doc_ids, labels = self._read(lane)
        found = model(tokens, doc_ids, labels=labels)
        return float(found.total), float(found.tokens)

    def _read(self, lane: int) -> tuple[Tensor, Tensor, Tensor]:
        asked = np.arange(lane * self.lane, (lane + 1) * self.lane)
        last = len(self.stream) - 1
        rows = self.stream.read(np.minimum(asked, last))
        # The last lane is padded with masked rows: another shape would trigger a recompilation.
        labels = np.where((asked > last)[:, None], IGNORED, rows.labels)
        arrays = (rows.tokens, rows.doc_ids, labels)
        tokens, doc_ids, targets = (torch.from_numpy(each).to(self.place.device) for each in arrays)
        return tokens, doc_ids, targets


@contextmanager
def undisturbed(model: GPT) -> Iterator[None]:
    """Inside, the model is in evaluation mode; afterwards mode, RNG state and shards are restored."""
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
