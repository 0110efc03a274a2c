"""A save planner of somebody's own, on two ranks: its choice is carried out, and the plan is made anew when it asks."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

import unbroken
from tests.unit.state.tiny import job, model, quietly, tiny
from unbroken.state.planners import Holders, Piece
from unbroken.store.directory import Store
from unbroken.testing.worlds import spawn


class LastRank:
    """All replicated tensors to the last rank that holds them, and a new plan after every save."""

    def writers(self, holders: Holders, load: Sequence[int]) -> Mapping[Piece, int]:
        return {piece: held[-1] for piece, held in holders.items()}

    def learn(self, written: Sequence[tuple[int, float]]) -> bool:
        assert len(written) == 2
        return True


def _saves(folder: str) -> None:
    torch.manual_seed(0)
    job(Path(folder), 4, quietly(planner=LastRank()), **tiny())


@pytest.mark.promise("M28")
def test_two_ranks_write_what_the_planner_gives_them(tmp_path: Path) -> None:
    ended = spawn(2, _saves, str(tmp_path / "run"))
    assert all(each.is_good for each in ended), ended
    store = Store(tmp_path / "run" / "checkpoints")
    sizes = {part.name: part.digest.size_bytes for part in store.read_manifest("final").parts}
    written = {name: size for name, size in sizes.items() if name.endswith(".distcp")}
    assert written["state/__1_0.distcp"] > 4 * written.get("state/__0_0.distcp", 0)
    unbroken.load(tmp_path / "run", model=model(5))
