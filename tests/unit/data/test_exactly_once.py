"""The account of served samples: what it notices, and that it never changes its meaning."""

import json

import numpy as np
import pytest
from numpy.typing import NDArray

from unbroken.data.exactly_once import Served, add_up, expected, identify


def _identities(samples: NDArray[np.int64]) -> NDArray[np.uint64]:
    keys = np.array([11, 12], np.uint64)[samples % 2]
    return identify(samples, keys, samples // 2)


def _account(*samples: int) -> Served:
    return add_up(_identities(np.array(samples, np.int64)))


def test_the_sum_does_not_depend_on_who_served_what_in_which_order() -> None:
    shares = [_account(4, 0), _account(), _account(3, 1, 2)]
    total = sum(shares, Served())
    assert total == _account(0, 1, 2, 3, 4) == expected(_identities, 0, 5)


@pytest.mark.parametrize("served", [(0, 1, 2, 3), (0, 1, 2, 3, 3), (0, 1, 2, 3, 5), (0, 1, 2, 4, 4)])
def test_a_sample_left_out_served_twice_or_taken_for_another_is_noticed(served: tuple[int, ...]) -> None:
    assert _account(*served).digest != expected(_identities, 0, 5).digest


def test_another_bucket_group_or_sequence_under_the_same_number_is_noticed() -> None:
    sample, key, sequence = np.array([7], np.int64), np.array([1], np.uint64), np.array([3], np.int64)
    plain = identify(sample, key, sequence).tolist()
    assert identify(sample, key + np.uint64(1), sequence).tolist() != plain
    assert identify(sample, key, sequence + 1).tolist() != plain
    assert identify(sample + 1, key, sequence).tolist() != plain
    # The two words are two accounts, not one written twice.
    assert plain[0][0] != plain[0][1]


def test_a_sum_over_many_blocks_is_the_sum_of_its_parts() -> None:
    whole = expected(_identities, 0, 40_000)
    assert whole.samples == 40_000
    assert expected(_identities, 0, 17) + expected(_identities, 17, 40_000) == whole


def test_an_account_is_the_same_for_ever() -> None:
    assert _account(0, 1, 2**40).as_json() == GOLDEN


GOLDEN = {"samples": 3, "digest": "3aa97857e294509678a05cecb0b3b1b7"}


def test_an_account_is_read_back_from_json() -> None:
    account = _account(5, 6)
    assert Served.from_json(json.loads(json.dumps(account.as_json()))) == account


@pytest.mark.parametrize(
    "value", [None, {}, {"samples": 1}, {"samples": -1, "digest": "0" * 32}, {"samples": 1, "digest": "x" * 32},
              {"samples": True, "digest": "0" * 32}, {"samples": 1, "digest": "0" * 31}]
)  # fmt: skip
def test_a_malformed_sum_of_samples_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="not a sum of served samples"):
        Served.from_json(value)
