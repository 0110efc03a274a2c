"""The JSON parts of a checkpoint: exact, and an error where something is missing."""

import json
import math

import pytest
import torch

from unbroken.errors import NeedsPickle
from unbroken.state.index import INDEX_PART
from unbroken.state.trainer_state import TrainerState, decode_counters, encode_counters, encode_rank, rank_part
from unbroken.store.fields import Malformed
from unbroken.store.names import OWN_PARTS


def test_counters_are_exact() -> None:
    counters = {"best": math.inf, "zero": -0.0, "big": 1 << 80, "name": "ü", "nested": {"a": (1, 2.5)}, "none": None}
    text = json.dumps(encode_counters(counters), allow_nan=False)
    found = decode_counters(json.loads(text))
    assert found == counters
    assert math.copysign(1.0, found["zero"]) == -1.0
    assert list(found) == list(counters)


def test_a_tensor_among_the_counters_is_refused_by_name() -> None:
    with pytest.raises(NeedsPickle) as refused:
        encode_counters({"best": torch.ones(1)})
    assert refused.value.path == "counters.best"


@pytest.mark.parametrize("wrong", [3, [1], {"tensor": "model.weight"}, {"no-such-tag": 1}])
def test_what_are_no_counters_is_malformed(wrong: object) -> None:
    with pytest.raises(Malformed):
        decode_counters(wrong)  # type: ignore[arg-type]


def test_records_are_canonical_json() -> None:
    state = TrainerState(3, 1, {"b": "object", "a": "module"}, {"a": 1}, ("b",), encode_counters({}))
    assert (
        state.encode() == TrainerState(3, 1, {"a": "module", "b": "object"}, {"a": 1}, ("b",), state.counters).encode()
    )
    assert json.loads(encode_rank(2, {"x": 1})) == {"schema": "unbroken.rank-state/2", "rank": 2, "values": {"x": 1}}
    assert rank_part(12) == "ranks/rank-00012.json"


def test_the_parts_by_which_a_checkpoint_of_ours_is_known_are_those_that_a_save_writes() -> None:
    assert (INDEX_PART, rank_part(0)) == OWN_PARTS
