"""Numbers as people read them."""

import pytest

from unbroken.quoting import amounts


@pytest.mark.parametrize(("number", "words"), [(0, "0"), (999, "999"), (24_750, "24,750"), (-1_000, "-1,000")])
def test_counts_have_their_thousands_apart(number: int, words: str) -> None:
    assert amounts.count(number) == words


@pytest.mark.parametrize(("number", "words"), [(0, "0 parts"), (1, "1 part"), (2, "2 parts"), (1_000, "1,000 parts")])
def test_one_is_singular_and_all_else_plural(number: int, words: str) -> None:
    assert amounts.plural(number, "part") == words


@pytest.mark.parametrize(
    ("number_bytes", "words"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1_000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (6_100_000_000, "6.1 GB"),
        (10**15, "1.0 PB"),
        (10**18, "1000.0 PB"),
    ],
)
def test_sizes_are_decimal_and_never_read_a_thousand_of_a_smaller_unit(number_bytes: int, words: str) -> None:
    assert amounts.size(number_bytes) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0.0 s"),
        (0.44, "0.4 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (10, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (240, "4 min"),
        (241, "4 min 1 s"),
        (3_600, "1 h"),
        (90_600, "25 h 10 min"),
        (86_399.7, "24 h"),
        (172_799, "47 h 59 min"),
        (172_800, "2 d"),
        (200_000, "2 d 7 h"),
        (3_601, "1 h"),
        (-240, "-4 min"),
    ],
)
def test_durations_have_their_two_largest_units(seconds: float, words: str) -> None:
    assert amounts.duration(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5, "just now"),
        (0.5, "just now"),
        (1, "1 s ago"),
        (59.9, "59 s ago"),
        (240, "4 min ago"),
        (46_800, "13 h ago"),
        (100_000, "27 h ago"),
        (172_800, "2 d ago"),
    ],
)
def test_how_long_ago_is_one_unit_and_a_clock_behind_ours_reads_just_now(seconds: float, words: str) -> None:
    assert amounts.ago(seconds) == words


def test_a_long_list_is_cut_after_its_first_names() -> None:
    assert amounts.listed(["a", "b"], 2) == "a, b"
    assert amounts.listed([str(n) for n in range(1205)], 2) == "0, 1 and 1,203 more"
