import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed.fingerprint_world import known
from tests.patience import PATIENCE_S
from unbroken.state.fingerprint import fingerprints
from unbroken.world import World

ROOT = Path(__file__).resolve().parents[2]
Answers = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """The fingerprints of the whole tensors, from one process."""
    return fingerprints(known(), World(0, 1))


@pytest.fixture(scope="module", params=[2, 3, 4], ids="{} ranks".format)
def worlds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Answers]:
    """What each rank of a world says, by rank."""
    size: int = request.param
    folder = tmp_path_factory.mktemp(f"world-{size}")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    program = [sys.executable, "-m", "tests.distributed.fingerprint_world"]
    ranks = [
        subprocess.Popen(
            [*program, str(rank), str(size), str(folder / "rendezvous"), str(folder / f"answer-{rank}")],
            env=env,
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [rank.communicate(timeout=PATIENCE_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(said)
    return [json.loads((folder / f"answer-{rank}").read_text()) for rank in range(size)]


@pytest.mark.promise("X2")
def test_however_the_tensors_are_sharded_every_rank_says_what_one_process_says(
    worlds: list[Answers], expected: dict[str, str]
) -> None:
    for answers in worlds:
        for label, prints in answers.items():
            if label not in ("own", "flipped"):
                assert prints == {name: expected[name] for name in prints}, label
                assert len(prints) >= 2, label
    assert worlds[0]["plain"].keys() == worlds[0]["missing on one rank each"].keys() == expected.keys()
    assert len(worlds[0]) == (15 if len(worlds) == 4 else 8)


@pytest.mark.promise("X2")
def test_one_wrong_bit_on_one_rank_changes_that_tensor_for_all_and_no_other(
    worlds: list[Answers], expected: dict[str, str]
) -> None:
    for answers in worlds:
        wrong = {name for name, found in answers["flipped"].items() if found != expected[name]}
        assert wrong == {"matrix.torch.float32"}
        assert answers["flipped"] == worlds[0]["flipped"]


def test_what_one_rank_alone_has_is_known_to_all(worlds: list[Answers], expected: dict[str, str]) -> None:
    own = {f"ranks.{rank}.generator": torch.arange(rank + 3) for rank in range(len(worlds))}
    for answers in worlds:
        assert answers["own"] == {**expected, **fingerprints(own, World(0, 1))}
