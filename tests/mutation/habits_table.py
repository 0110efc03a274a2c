"""The mutations of a stranger's habits: one section per row U1 to U17."""

from tests.mutation.table import Mutation, one

_PROVEN = "tests/unit/data/test_proven.py::"

HABITS: tuple[Mutation, ...] = (
    # ---- U1 ----
    # ---- U2 ----
    # ---- U3 ----
    # ---- U4 ----
    # ---- U5 ----
    # ---- U6 ----
    # ---- U7 ----
    # ---- U8 ----
    # ---- U9 ----
    # ---- U10 ----
    # ---- U11 ----
    one(
        "a stream does not verify what it reads unless asked",
        "data/stream.py",
        "        check_reads: bool = True,\n",
        "        check_reads: bool = False,\n",
        f"{_PROVEN}test_a_loop_does_not_get_damaged_data",
    ),
    one(
        "the trainer does not verify what it reads unless asked",
        "config/data.py",
        '        "read",\n        "Verify',
        '        "quick",\n        "Verify',
        f"{_PROVEN}test_the_trainer_ends_at_damaged_data",
    ),
    one(
        "checksums taken of shards that are not what they are listed as",
        "data/proven.py",
        "        self._require_listed([number for number in numbers if number not in self._proven])\n",
        "",
        f"{_PROVEN}test_damage_from_before_the_first_read_is_found",
    ),
    # ---- U12 ----
    # ---- U13 ----
    # ---- U14 ----
    # ---- U15 ----
    # ---- U16 ----
    # ---- U17 ----
)
