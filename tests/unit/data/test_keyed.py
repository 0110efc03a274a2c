"""Keys and mixing never change their values."""

import numpy as np

from unbroken.data.order.keyed import mix64, subkey


def test_mixed_words_are_those_of_splitmix64() -> None:
    # The first three outputs of the published generator for seed 0 are its finaliser over multiples of the stride.
    strides = np.array([1, 2, 3], np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert [hex(word) for word in mix64(strides).tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


def test_mixing_leaves_its_input_alone_and_takes_the_largest_word() -> None:
    words = np.array([0, 1, 2**64 - 1], np.uint64)
    before = words.copy()
    assert mix64(words).tolist() == [0, 6238072747940578789, 13029008266876403067]
    assert (words == before).all()


def test_subkeys_never_change() -> None:
    assert subkey(0) == GOLDEN[0]
    assert subkey(42, "epoch", 3) == GOLDEN[1]
    assert subkey(-1, "é", 2**80) == GOLDEN[2]


def test_neither_the_kind_of_a_tag_nor_where_it_ends_is_ambiguous() -> None:
    keys = [subkey(1), subkey(1, ""), subkey(1, "1"), subkey(1, 1), subkey(1, 1, 1), subkey(1, 11), subkey(11, 1)]
    keys += [subkey(1, "ab", "c"), subkey(1, "a", "bc"), subkey(1, "abc"), subkey(1, "c", "ab"), subkey(1, "i1:1")]
    assert len(set(keys)) == len(keys)


def test_a_number_of_numpy_is_the_number_it_is() -> None:
    assert subkey(7, int(np.int64(5))) == subkey(7, 5)
    assert all(0 <= subkey(seed, "x") < 2**64 for seed in range(100))


GOLDEN = (9549033805879814570, 16493040176348325478, 17854776093446792156)
