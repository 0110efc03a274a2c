"""What a rank does that reads a stream in a real world: its place comes from the process group."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.unit.data.streams import open_stream
from unbroken.data.exactly_once import Served
from unbroken.data.loader import Loader
from unbroken.errors import LanesUnfit
from unbroken.world import World


def read_steps(data: str, state: dict[str, Any] | None, global_batch: int, lane: int, steps: int) -> dict[str, Any]:
    """Some steps of one rank; tells which lanes it read, its state, and how the account stands."""
    loader = Loader(open_stream(Path(data), epochs=3), global_batch_size=global_batch, per_device_batch_size=lane)
    if state is not None:
        loader.load_state_dict(state)
    read = []
    for batch in loader:
        read.append((batch.step, batch.lane, list(batch.samples), batch.tokens.tolist()))
        if len(read) == steps * loader.lanes.per_step:
            break
    agrees = loader.settle_served(_summed(loader.served_share()))()["agrees"]
    return {"read": read, "state": json.loads(json.dumps(loader.state_dict())), "agrees": agrees}


def _summed(share: Served) -> Served:
    """The sum over all ranks, as integers that wrap around."""
    words = [share.samples, *(_signed(word) for word in (share.low, share.high))]
    samples, low, high = World.current().add_up(torch.tensor(words)).tolist()
    return Served(samples, low % 2**64, high % 2**64)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def refused(data: str) -> str:
    """What a rank is told where there are more ranks than lanes."""
    try:
        Loader(open_stream(Path(data)), global_batch_size=4, per_device_batch_size=2)
    except LanesUnfit as unfit:
        return f"{dist.get_rank()}: {unfit.complaint}"
    return "accepted"
