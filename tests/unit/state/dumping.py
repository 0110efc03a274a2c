"""Dumps for tests, made the way a rank makes them, with tensors of which a resume could lose something."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from unbroken.files import Files
from unbroken.state.adopt import AdoptTarget, adopt
from unbroken.state.dump import Dumped, DumpOwner, dump
from unbroken.state.items import Item, make_items
from unbroken.state.rng import capture_rng
from unbroken.store.directory import Store
from unbroken.store.dump_copies import copy_dump
from unbroken.store.dumps import Area, DumpChoice, Pointer, choose_dumps, look, point, read_pointers
from unbroken.world import World

ALONE = World(0, 1)
RUN = Path("/run")
AREA = Area("run-1a2b3c4d", Path("/scratch"), Path("/shared"))
JOB = "j0001_0123abcd"
HOST = "node-1/0f0f0f0f"


class Tied(nn.Module):
    """Two names for one tensor, an empty one, and one that is no float."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.last = nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("seen", torch.tensor([step]))
        self.register_buffer("none", torch.empty(0, 2))
        with torch.no_grad():
            self.first.weight.fill_(float(step))


class Note:
    """A user's own object with a tensor in it."""

    def __init__(self, step: int) -> None:
        self.value = torch.full((5,), float(step))

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value, "best": 0.5}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value = state["value"]


def items_at(step: int) -> list[Item]:
    """What a run is handed."""
    return make_items({"model": Tied(step), "note": Note(step)})


def dump_step(
    files: Files, step: int, *, area: Area = AREA, job: str = JOB, host: str = HOST, world: World = ALONE
) -> Dumped:
    """One rank's dump of a step."""
    assert area.local is not None
    return dump(
        items_at(step),
        capture_rng,
        world,
        area.store(area.local, world.rank, files),
        step=step,
        counters={"step": step},
        whose=DumpOwner(area.key, job, host),
        at_ns=step * 1_000_000_000,
    )


def dump_and_tell(files: Files, step: int) -> Pointer:
    """What a rank does in an emergency: dump, point, copy, point at the copy."""
    assert AREA.persistent is not None
    dumped = dump_step(files, step)
    pointer = Pointer(0, 1, step, JOB, HOST, str(dumped.store.path(dumped.name)))
    point(RUN, pointer, files)
    target = AREA.store(AREA.persistent, 0, files)
    copied = Pointer(**{**vars(pointer), "copy": str(target.path(copy_dump(dumped.store, dumped.name, target)))})
    point(RUN, copied, files)
    return copied


def choice(files: Files, *, host: str = HOST, area: Area = AREA, newest: int = -1) -> DumpChoice:
    """What one rank of a later job would resume from."""
    pointers = read_pointers(RUN, files)
    return choose_dumps([look(area, host, pointers, files)], pointers, is_newer=lambda dump_set: dump_set.step > newest)


def adopt_all(files: Files, found: DumpChoice, items: Sequence[Item] = ()) -> str:
    """Make the checkpoint."""
    assert found.dump_set is not None
    into = AdoptTarget(Store(RUN / "checkpoints", files), "j0002_0123abcd", 2, at_ns=99)
    return adopt(found.dump_set, found.copies, items, ALONE, into)
