"""A save that fails is told and left behind; only the last one of a job, which none follows, ends it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.state.tiny import bits, job, quietly, tiny
from unbroken import Run
from unbroken.errors import NeedsPickle, NoMemory, NotAnItem, TensorUnsupported, UnbrokenError
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.state.host_memory import asking_for_memory
from unbroken.state.index import Box
from unbroken.state.planners import Piece
from unbroken.state.stage import Buffers


class Note:
    """An object that holds whatever it is given."""

    def __init__(self) -> None:
        self.value: object = None

    def state_dict(self) -> dict[str, object]:
        if isinstance(self.value, Exception):
            raise self.value
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.value = state["value"]


def train(run: Path, total: int, odd: object = None, at_step: int = 4) -> dict[str, bytes]:
    """A job whose note holds something odd at the edge of one step."""
    note, objects = Note(), tiny()

    def body(_: Run, step: int) -> None:
        note.value = odd if step + 1 == at_step else step

    torch.manual_seed(5)
    job(run, total, body=body, note=note, **objects)
    return bits(objects["model"])


def journalled(run: Path) -> list[tuple[Any, ...]]:
    failed = read_history(Layout(run)).of_kind("save-failed")
    return [(fact.values["step"], fact.values["rank"], fact.values["cause"]) for fact in failed]


def committed(run: Path) -> list[int | None]:
    return [fact.whole("step") for fact in read_history(Layout(run)).of_kind("commit")]


@pytest.mark.parametrize(
    ("odd", "kind"),
    [(object(), "needs-pickle"), (torch.eye(2).to_sparse(), "tensor-unsupported")],
    ids=["an object", "a sparse tensor"],
)
def test_a_value_that_cannot_be_saved_at_one_step_costs_that_save_and_nothing_else(
    tmp_path: Path, odd: object, kind: str
) -> None:
    assert train(tmp_path / "run", 8, odd) == train(tmp_path / "whole", 8)
    assert journalled(tmp_path / "run") == [(4, 0, kind)]
    assert committed(tmp_path / "run") == [2, 6, 8]


def test_the_last_save_of_a_job_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NeedsPickle):
        train(tmp_path / "run", 4, object())
    assert committed(tmp_path / "run") == [2]
    assert (Layout(tmp_path / "run").checkpoints / "latest").readlink() == Path("checkpoint-2")


def test_an_error_of_an_objects_own_is_no_failed_save(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="of its own"):
        train(tmp_path / "run", 8, LookupError("of its own"))
    assert journalled(tmp_path / "run") == []


def test_a_host_without_memory_costs_the_save_and_the_next_one_finds_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, asked = Buffers._arena_sizes, list[int]()

    def too_many(buffers: Buffers, size_bytes: int) -> list[int]:
        asked.append(size_bytes)
        return [1 << 60] if len(asked) == 2 else sizes(buffers, size_bytes)

    monkeypatch.setattr(Buffers, "_arena_sizes", too_many)
    found = train(tmp_path / "run", 8)
    assert journalled(tmp_path / "run") == [(4, 0, "no-memory")]
    assert committed(tmp_path / "run") == [2, 6, 8]
    monkeypatch.undo()
    assert found == train(tmp_path / "whole", 8)


@pytest.mark.parametrize(
    ("error", "is_shortage"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ZeroDivisionError("out of memory"), False),
    ],
)
def test_only_the_want_of_memory_is_called_so(error: Exception, is_shortage: bool) -> None:
    with pytest.raises(NoMemory if is_shortage else type(error)) as raised, asking_for_memory(1 << 20):
        raise error
    assert isinstance(raised.value, UnbrokenError) is is_shortage


def test_the_allocators_own_refusal_is_the_want_of_memory() -> None:
    with pytest.raises(NoMemory):
        Buffers(arena_bytes=1 << 60).take((Piece("w", "uint8", Box((0,), (1 << 60,))),), None)


@pytest.mark.parametrize("place", ["buffer", "object"])
def test_a_tensor_that_no_save_could_hold_is_refused_before_the_first_step(tmp_path: Path, place: str) -> None:
    sparse = torch.eye(2).to_sparse()
    objects: dict[str, Any] = tiny()
    if place == "buffer":
        module = nn.Linear(2, 2)
        module.register_buffer("codes", sparse)
        objects["odd"] = module
    else:
        objects["odd"] = Note()
        objects["odd"].value = sparse
    with pytest.raises(TensorUnsupported), Run(tmp_path / "run", settings=quietly(), **objects):
        pass


def test_a_lazy_layer_is_refused_at_entry_and_taken_once_it_has_a_shape(tmp_path: Path) -> None:
    lazy = nn.LazyLinear(2)
    with pytest.raises(NotAnItem, check=lambda refused: (refused.name, refused.type_name) == ("lazy", "LazyLinear")):
        job(tmp_path / "run", 2, lazy=lazy)
    lazy(torch.ones(1, 3))
    job(tmp_path / "run", 2, lazy=lazy)
    assert committed(tmp_path / "run") == [2]
