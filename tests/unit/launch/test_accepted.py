"""Names that a person accepts: those that could differ, and for all others the nearest of these."""

from unittest import mock

import pytest
import torch

from unbroken import exact
from unbroken.config.document import all_fields
from unbroken.data.stream_record import GROW as GROW_OF_THE_DATA
from unbroken.errors import AcceptUnknown
from unbroken.gpt.arithmetic import FOLLOWING, ITEMS_FOLLOWING, Arithmetic
from unbroken.launch.accepted import ARITHMETIC, GROW, ITEMS, require_known

TENSORS = ("model.blocks.0.mlp.up.weight", "model.norm.weight")


def test_every_field_item_and_word_of_the_arithmetic_is_known() -> None:
    require_known([*all_fields(), *ARITHMETIC, *ITEMS, GROW])
    assert GROW == GROW_OF_THE_DATA
    assert set(ITEMS_FOLLOWING.values()) < set(ITEMS)


def test_the_words_of_the_arithmetic_are_those_that_a_job_records_on_a_cpu_and_on_a_gpu() -> None:
    reducer = exact.Reducer(torch.nn.Linear(2, 2), lanes=1, seed=1)
    names: set[str] = set()
    with mock.patch.multiple(torch.cuda, get_device_name=lambda _: "H200", get_device_capability=lambda _: (9, 0)):
        for device in ("cpu", "cuda"):
            names |= Arithmetic(reducer, exact.Numerics(device), ()).state_dict().keys()
    assert names == set(ARITHMETIC)
    assert {name for following in FOLLOWING.values() for name in following} < names


@pytest.mark.parametrize(
    ("accept", "tensors", "nearest"),
    [
        (["optimizer.learning_rat"], TENSORS, "optimizer.learning_rate"),
        (["training.max_step"], None, "training.max_steps"),
        (["threds"], None, "threads"),
        (["model.blocks.0.mpl"], TENSORS, "model.blocks.0.mlp"),
        (["data.grown"], None, "data.grow"),
    ],
)
def test_a_name_that_means_nothing_is_refused_with_the_nearest_ones(
    accept: list[str], tensors: tuple[str, ...] | None, nearest: str
) -> None:
    with pytest.raises(AcceptUnknown) as caught:
        require_known([*accept, "torch"], tensors)
    [(name, near)] = caught.value.names
    assert [name] == accept and nearest in near


def test_a_tensor_or_all_below_a_name_is_known_once_the_tensors_are() -> None:
    below = ["model.blocks", "model.blocks.0.mlp", "model.norm.weight"]
    require_known(below, TENSORS)
    require_known([*below, "model.anything"], None)
    with pytest.raises(AcceptUnknown):
        require_known(["model.anything"], TENSORS)


def test_all_names_that_mean_nothing_are_reported_at_once() -> None:
    with pytest.raises(AcceptUnknown) as refused:
        require_known(["luck", "lanes", "fate", "luck"])
    assert [name for name, _ in refused.value.names] == ["luck", "fate"]
