"""``unbroken plan`` on a run that has measured itself, on a config, on numbers alone, and on nonsense."""

import json
from pathlib import Path

import pytest
import torch

import unbroken as library
from tests.conftest import Tool


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of twelve steps that stopped after six, with a save every second step."""
    place = tmp_path_factory.mktemp("plan") / "run"
    with library.Run(place, settings=library.Settings(save_steps=2, audit="off"), model=torch.nn.Linear(1, 1)) as held:
        for step in held.steps(12):
            if step == 5:
                held.stop()
    return place


def test_a_run_is_planned_from_what_it_has_measured(unbroken: Tool, run: Path) -> None:
    results = json.loads(unbroken("plan", str(run), "--max-runtime", "3600", "--json").stdout)
    assert results["schema"] == "unbroken.plan/2"
    assert results["given"]["steps"] == 6
    assert results["given"]["step_s"] > 0
    assert results["given"]["save_s"] > 0
    assert results["plan"]["jobs"] == 1
    assert results["plan"]["training_s"] == 6 * results["given"]["step_s"]
    assert any("one failure a day" in each for each in results["assumptions"])


def test_an_option_wins_over_what_was_measured(unbroken: Tool, run: Path) -> None:
    results = json.loads(unbroken("plan", str(run), "--steps", "1000", "--step-time", "2", "--json").stdout)
    assert results["plan"]["training_s"] == 2_000


def test_a_config_adds_target_wall_time_and_what_its_own_cadence_would_cost(unbroken: Tool, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "data: {path: data, tokenizer: gpt2}\n"
        f"training: {{output_dir: {tmp_path / 'none'}, max_steps: 5000, max_runtime_seconds: 7200, save_steps: 10}}\n"
    )
    options = ("--step-time", "3", "--save-time", "20", "--mtbf", "40000")
    results = json.loads(unbroken("plan", str(config), *options, "--json").stdout)
    assert results["given"]["steps"] == 5_000
    assert results["given"]["walltime_s"] == 7_200
    assert results["plan"]["jobs"] == 3
    assert results["as_configured"]["interval_steps"] == 10
    assert results["as_configured"]["total_s"] > results["plan"]["total_s"]
    assert unbroken("plan", str(config), *options).returncode == 0


def test_a_config_that_never_ran_is_planned_from_its_parameters_and_this_disk(unbroken: Tool, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "model: {n_layer: 1, n_embd: 32, n_head: 2, n_positions: 64}\n"
        "data: {path: data, tokenizer: bytes, max_length: 64, overlap_size: 8}\n"
        f"training: {{output_dir: {tmp_path / 'runs' / 'none'}, max_steps: 500}}\n"
    )
    results = json.loads(unbroken("plan", str(config), "--max-runtime", "04:00:00", "--mtbf", "2d", "--json").stdout)
    assert (
        results["given"]["steps"] == 500
        and results["given"]["walltime_s"] == 14_400
        and results["given"]["mtbf_s"] == 172_800
    )
    assert results["given"]["step_s"] > 0 and results["given"]["save_s"] >= results["given"]["paused_s"] > 0
    said = " ".join(results["assumptions"])
    assert "step time" in said and f"measured in {tmp_path}" in said and "vocabulary of 384 tokens" in said
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.yaml"], "nothing is left of the measurement"
    bad = unbroken("plan", str(config), "--max-runtime", "4x")
    assert bad.returncode == 2 and "'4x'" in bad.stderr


def test_missing_and_wrong_settings_are_named_at_once_without_a_traceback(unbroken: Tool) -> None:
    bad = unbroken("plan", "--steps", "-1", "--mtbf", "nan")
    assert bad.returncode == 2
    assert bad.stderr.startswith("error[bad-plan]: cannot make a plan: 4 problems\n")
    for option in ("--steps", "--step-time", "--save-time", "--mtbf"):
        assert f"  {option} " in bad.stderr
    assert "--mtbf" in bad.stderr
    nowhere = unbroken("plan", "nowhere.yaml")
    assert nowhere.returncode == 2 and nowhere.stderr.startswith("error[path-missing]")
