import pytest
import torch

from tests.distributed.fingerprint_world import answers, known
from unbroken.state.fingerprint import fingerprints
from unbroken.testing.worlds import logs, spawn
from unbroken.world import World

Answers = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """The fingerprints of the whole tensors, from one process."""
    return fingerprints(known(), World(0, 1))


@pytest.fixture(scope="module", params=[2, 3, 4], ids="{} ranks".format)
def worlds(request: pytest.FixtureRequest) -> list[Answers]:
    """What each rank of a world says, by rank."""
    ended = spawn(request.param, answers)
    assert all(each.is_good for each in ended), logs(ended)
    return [each.value for each in ended]


@pytest.mark.promise("X2")
def test_however_the_tensors_are_sharded_every_rank_says_what_one_process_says(
    worlds: list[Answers], expected: dict[str, str]
) -> None:
    for results in worlds:
        for label, prints in results.items():
            if label not in ("own", "flipped"):
                assert prints == {name: expected[name] for name in prints}, label
                assert len(prints) >= 2, label
    assert worlds[0]["plain"].keys() == worlds[0]["missing on one rank each"].keys() == expected.keys()
    assert len(worlds[0]) == (15 if len(worlds) == 4 else 8)


@pytest.mark.promise("X2")
def test_one_wrong_bit_on_one_rank_changes_that_tensor_for_all_and_no_other(
    worlds: list[Answers], expected: dict[str, str]
) -> None:
    for results in worlds:
        wrong = {name for name, found in results["flipped"].items() if found != expected[name]}
        assert wrong == {"matrix.torch.float32"}
        assert results["flipped"] == worlds[0]["flipped"]


def test_what_one_rank_alone_has_is_known_to_all(worlds: list[Answers], expected: dict[str, str]) -> None:
    own = {f"ranks.{rank}.generator": torch.arange(rank + 3) for rank in range(len(worlds))}
    for results in worlds:
        assert results["own"] == {**expected, **fingerprints(own, World(0, 1))}
