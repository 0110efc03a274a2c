"""torchrun's failures: which rank the others follow from, and what is said of it."""

import pytest

from unbroken.launch.agent import Failure, first_of


@pytest.mark.parametrize(
    ("noticed", "rank", "code", "words"),
    [
        ([Failure(0, -15, 7), Failure(1, 3, 7)], 1, 3, "rank 1 exited with code 3"),
        ([Failure(0, 1, 7), Failure(1, -9, 7), Failure(2, -15, 8)], 1, 137, "rank 1 was killed by SIGKILL"),
        ([Failure(0, 1, 7), Failure(1, -9, 600)], 0, 1, "rank 0 exited with code 1"),
        ([Failure(0, -15, 7), Failure(1, -15, 7)], 0, 143, "rank 0 was killed by SIGTERM"),
        ([Failure(2, 5, 7), Failure(0, 6, 7)], 2, 5, "rank 2 exited with code 5"),
    ],
)
def test_what_torchrun_did_itself_is_never_the_cause(noticed: list[Failure], rank: int, code: int, words: str) -> None:
    first = first_of(noticed)
    assert (first.rank, first.exit_code, first.in_words()) == (rank, code, words)
