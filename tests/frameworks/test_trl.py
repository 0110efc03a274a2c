"""TRL's ``SFTTrainer`` as a run: it inherits from the Trainer of Transformers, and resumes to the same bits."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from tests.frameworks.forking import Jobs, forking, resumed_from

KILL, TERM = int(signal.SIGKILL), int(signal.SIGTERM)
# An epoch has 10 batches, or 5 if the sentences are packed.
CASES: dict[str, dict[str, Any]] = {
    "packed": {"packing": True},
    "padded": {},
    "padded by workers": {"dataloader_num_workers": 2},
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with forking(tmp_path_factory.mktemp("jobs"), "tests.frameworks.sft_trainings") as started:
        yield started


@pytest.mark.promise("C9")
@pytest.mark.parametrize("name", CASES)
def test_sft_killed_and_stopped_inside_an_epoch_ends_in_the_same_bits(jobs: Jobs, tmp_path: Path, name: str) -> None:
    arguments = CASES[name]
    whole = jobs.run(tmp_path / "whole", plain=True, arguments=arguments)
    run = tmp_path / "run"
    assert jobs.run(run, arguments=arguments, interrupts=[{"step": 15, "number": KILL}]).code == -KILL
    stopped = jobs.run(run, arguments=arguments, interrupts=[{"step": 17, "number": TERM}])
    assert stopped.result is not None and stopped.result["is_stopped"], stopped.said
    resumed = jobs.run(run, arguments=arguments)
    assert resumed_from(run) == [0, 12, stopped.result["step"]]
    assert resumed.result is not None and resumed.result["step"] == 24, resumed.said
    assert resumed.digest == whole.digest, resumed.said
