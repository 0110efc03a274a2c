"""A checkpoint manager of torchtitan's shape: its public methods, its folders, and the calls of torch that it makes.

torchtitan itself is not installed here. ``UnbrokenCheckpoints`` is the class of docs/dcp.md on top of it.
"""

import enum
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from unbroken.frameworks import dcp as unbroken_dcp

PAGE = Path(__file__).resolve().parents[2] / "docs" / "dcp.md"


class AsyncMode(enum.Enum):
    DISABLED = "disabled"
    ASYNC = "async"


class CheckpointManager:
    """Saves into ``step-N`` and loads the newest folder that has an index."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        folder: str
        async_mode: str = "disabled"

    def __init__(self, config: Config, *, states: dict[str, Any]) -> None:
        self.folder, self.states = config.folder, states
        self.async_mode = AsyncMode(config.async_mode)
        self.pg = dist.new_group(backend="gloo") if self.async_mode is AsyncMode.ASYNC else None
        self.save_future: Any = None

    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, async_mode: AsyncMode, *rest: object) -> object:
        if async_mode is AsyncMode.ASYNC:
            return dcp.async_save(state_dict, checkpoint_id=checkpoint_id, process_group=self.pg)
        return dcp.save(state_dict, checkpoint_id=checkpoint_id)

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        dcp.load(state_dict, checkpoint_id=checkpoint_id)
        self.states["model"].load_state_dict(state_dict)

    def save(self, step: int) -> None:
        if self.save_future is not None:
            self.save_future.result()
            self.save_future = None
        name = f"{self.folder}/step-{step}"
        done = self.dcp_save(self._flat(), name, self.async_mode)
        self.save_future = done if self.async_mode is AsyncMode.ASYNC else None

    def load(self) -> int:
        found = [int(path.parent.name[5:]) for path in Path(self.folder).glob("step-*/.metadata")]
        if found:
            self.dcp_load(self._flat(), f"{self.folder}/step-{max(found)}", False, False)
        return max(found, default=0)

    def close(self) -> None:
        if self.save_future is not None:
            self.save_future.result()
        self._close()

    def _close(self) -> None:
        """Nothing is open."""

    def _flat(self) -> dict[str, Any]:
        """The weights by their names beside the other states, as torchtitan saves them."""
        others = {name: state for name, state in self.states.items() if name != "model"}
        return {**others, **self.states["model"].state_dict()}


def class_of_page() -> Any:  # noqa: ANN401
    """``UnbrokenCheckpoints``, as docs/dcp.md has it."""
    found = re.search(r"^```python\n(class UnbrokenCheckpoints.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    names: dict[str, Any] = {
        "AsyncMode": AsyncMode,
        "CheckpointManager": CheckpointManager,
        "dataclass": dataclass,
        "dcp": dcp,
        "unbroken_dcp": unbroken_dcp,
    }
    exec(found[1], names)
    return names["UnbrokenCheckpoints"]
