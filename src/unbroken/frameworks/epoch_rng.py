"""The RNG states with which an epoch began, as a file of each rank in a checkpoint.

Samplers and loader workers get their seeds when the iterator of an epoch is made. A resume inside the epoch makes it
again.
"""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def rng_name(rank: int) -> str:
    """The file of a rank in a checkpoint."""
    return f"unbroken_rng_{rank}.pt"


def packed(rng: Mapping[str, Any]) -> bytes:
    """RNG states as bytes that torch loads without unpickling anything but numbers."""
    stream = io.BytesIO()
    torch.save({name: None if state is None else _plain(state) for name, state in rng.items()}, stream)
    return stream.getvalue()


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    numpy = state.get("numpy")
    if numpy is None:
        return dict(state)
    key = [int(each) for each in numpy["state"]["key"]]
    return {**state, "numpy": json.dumps({**numpy, "state": {**numpy["state"], "key": key}})}


def read_rng(folder: Path, rank: int) -> Mapping[str, Any] | None:
    """The RNG states of a rank; None for a checkpoint that was saved without unbroken."""
    path = folder / rng_name(rank)
    return unpacked(path.read_bytes()) if path.exists() else None


def unpacked(data: bytes) -> dict[str, Any]:
    """RNG states as ``packed`` made them bytes."""
    found = torch.load(io.BytesIO(data), weights_only=True)
    return {name: None if state is None else _unpacked(state) for name, state in found.items()}


def _unpacked(state: Mapping[str, Any]) -> dict[str, Any]:
    if "numpy" not in state:
        return dict(state)
    import numpy as np

    held = json.loads(state["numpy"])
    held["state"]["key"] = np.array(held["state"]["key"], dtype=np.uint32)
    return {**state, "numpy": held}
