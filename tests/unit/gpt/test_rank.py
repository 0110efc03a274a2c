"""``python -m unbroken.gpt``: what a rank trains with."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import unbroken.gpt.train  # noqa: F401 -- where a rank looks for its function
from unbroken.config import Config, DataConfig
from unbroken.gpt import __main__ as rank
from unbroken.launch.run_config import passed_on
from unbroken.launch.start_clock import StartClock


@pytest.mark.promise("G23")
def test_a_rank_trains_with_the_config_that_its_launcher_has_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(data=DataConfig(path="data"))
    config = replace(config, training=replace(config.training, output_dir=str(tmp_path / "run"), seed=7))
    # Edited since: another seed, another run.
    (tmp_path / "run.yaml").write_text("data: {path: data}\ntraining: {output_dir: other, seed: 8}\n")
    trained: list[Config] = []

    def run_job(config: Config, clock: StartClock, *, accept: Sequence[str], force: bool) -> None:
        trained.append(config)

    monkeypatch.setattr(sys.modules["unbroken.gpt.train"], "run_job", run_job)
    monkeypatch.setattr(rank, "_speak", lambda *_, **__: None)
    for name, value in passed_on(config, "unbroken train").items():
        monkeypatch.setenv(name, value)
    assert rank.main(["--launched", str(tmp_path / "run.yaml"), "training.seed=9"]) == 0
    assert trained == [config]
    # Without a launcher's word the variable means nothing: a job started by hand inside another one.
    assert rank.main([str(tmp_path / "run.yaml"), "training.seed=9"]) == 0
    assert (trained[1].training.output_dir, trained[1].training.seed) == ("other", 9)
