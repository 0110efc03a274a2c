"""``init`` and ``validate`` as processes: what they print, what they write, how they end."""

import json
import os
from pathlib import Path

import pytest
import yaml

from tests.conftest import Tool
from unbroken.config import PRESETS, load, preset
from unbroken.records.layout import Layout
from unbroken.records.metrics import MetricsWriter


@pytest.mark.parametrize("name", PRESETS)
def test_init_writes_a_file_that_validate_finds_sound(name: str, unbroken: Tool, tmp_path: Path) -> None:
    written = unbroken("init", "--preset", name, "-o", "run.yaml")
    assert written.returncode == 0
    assert load(tmp_path / "run.yaml").config == preset(name)
    checked = unbroken("validate", "run.yaml", "--no-data")
    assert checked.returncode == 0
    assert checked.stdout.startswith("valid")
    assert checked.stderr == ""


def test_init_prints_to_standard_output_by_default_and_leaves_no_file(unbroken: Tool, tmp_path: Path) -> None:
    ended = unbroken("init", "--preset", "tiny")
    assert ended.returncode == 0
    assert yaml.safe_load(ended.stdout)["optimizer"]["learning_rate"] == 0.001
    assert ended.stdout == unbroken("init", "--preset", "tiny", "-o", "-").stdout
    assert list(tmp_path.iterdir()) == []


def test_init_replaces_a_file_only_by_force_and_leaves_nothing_beside_it(unbroken: Tool, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("mine")
    ended = unbroken("init", "-o", "run.yaml")
    assert ended.returncode == 2
    assert ended.stderr.startswith("error[would-overwrite]")
    assert (tmp_path / "run.yaml").read_text() == "mine"
    assert unbroken("init", "-o", "run.yaml", "--force").returncode == 0
    assert (tmp_path / "run.yaml").read_text() == unbroken("init").stdout
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["init", "-o", "."], "bad-usage"),
        (["init", "-o", ""], "bad-usage"),
        (["init", "-o", "nowhere/run.yaml"], "path-missing"),
        (["init", "--preset", "huge"], "bad-usage"),
        (["validate"], "bad-usage"),
        (["validate", "run.yaml", "other.yaml"], "bad-usage"),
        (["validate", "run.yaml", "--prnt-config"], "bad-usage"),
        (["validate", "missing.yaml"], "path-missing"),
        (["validate", "--config", "missing.yaml"], "path-missing"),
        (["validate", "."], "config-unreadable"),
        (["validate", "broken.yaml"], "config-unreadable"),
        (["validate", "binary.yaml"], "config-unreadable"),
        (["validate", "empty.yaml"], "config-unreadable"),
        (["validate", "run.yaml", "--optimizer.lerning_rate", "3"], "config-invalid"),
        (["validate", "run.yaml", "--optimizer.learning_rate"], "config-invalid"),
        (["validate", "run.yaml", "model.n_layer=many"], "config-invalid"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_users_mistake_is_one_short_error_with_exit_code_2(
    arguments: list[str], kind: str, unbroken: Tool, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text("data: {path: tokens}\n")
    (tmp_path / "broken.yaml").write_text("model: [\n")
    (tmp_path / "binary.yaml").write_bytes(bytes(range(256)))
    (tmp_path / "empty.yaml").write_text("")
    ended = unbroken(*arguments)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith(f"error[{kind}]: ")
    assert len(ended.stderr.splitlines()) <= 8
    assert "Traceback" not in ended.stderr


def test_validate_names_every_problem_with_its_line(unbroken: Tool, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model:\n  n_heads: 3\n  n_layer: 0\ndata:\n  path: a\n")
    ended = unbroken("validate", "run.yaml", "--training.sed=1", "--json")
    assert ended.returncode == 2
    found = [detail.split(": ")[0].split("  ") for detail in json.loads(ended.stdout)["details"]]
    assert found == [
        ["run.yaml:2", "model.n_heads"],
        ["run.yaml:3", "model.n_layer"],
        ["command line", "training.sed"],
    ]


def test_print_config_says_where_every_value_came_from(unbroken: Tool, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data:\n  path: tokens\n")
    ended = unbroken(
        "validate", "run.yaml", "--no-data", "--print-config", "--training.seed", "7", "optimizer.beta1=0.8"
    )
    rows = {line.split()[0]: line.split()[1:] for line in ended.stdout.splitlines() if line}
    assert rows["data.path"] == ["tokens", "run.yaml:2"]
    assert rows["training.seed"] == ["7", "command", "line"]
    assert rows["optimizer.beta1"] == ["0.8", "command", "line"]
    assert rows["training.max_steps"] == ["1000", "default"]
    assert rows["model.intermediate_size"] == ["null", "->", "2048", "(derived)", "default"]


def test_json_holds_one_document_with_values_origins_and_derived_numbers(unbroken: Tool, tmp_path: Path) -> None:
    unbroken("init", "--preset", "tiny", "-o", "run.yaml")
    ended = unbroken("validate", "--config", "run.yaml", "--no-data", "--json", "training.max_steps=50")
    found = json.loads(ended.stdout)
    assert found["schema"] == "unbroken.validate/3"
    assert found["parameters"] == preset("tiny").model.parameters(384)
    assert found["tokens_per_step_on_one_rank"] == 4 * 2 * 128
    assert found["fields"]["training.max_steps"] == {"value": 50, "from": "command line", "resume": "declared"}
    assert found["derived"]["optimizer.decay_steps"] == 30


def test_a_config_whose_data_is_not_there_is_refused_with_the_path(unbroken: Tool, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data: {path: does-not-exist}\n")
    ended = unbroken("validate", "run.yaml")
    assert ended.returncode == 4
    assert ended.stderr.startswith("error[data-missing]: ")
    assert "does-not-exist" in ended.stderr


def test_without_numpy_validate_checks_all_but_the_data(unbroken: Tool, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data: {path: tokens}\n")
    (tmp_path / "tokens").mkdir()
    # Found before anything else on the path: an interpreter that has no numpy.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Nothing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'numpy': raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Nothing())\n"
    )
    environ = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    ended = unbroken("validate", "run.yaml", "--json", env=environ)
    assert (ended.returncode, ended.stderr) == (0, "")
    found = json.loads(ended.stdout)
    assert found["is_sound"] and found["data"] is None
    assert "numpy" in unbroken("validate", "run.yaml", env=environ).stdout


@pytest.mark.promise("G22")
def test_validate_counts_the_memory_of_a_rank(unbroken: Tool, tmp_path: Path) -> None:
    unbroken("init", "--preset", "large", "-o", "run.yaml")
    words = ("validate", "run.yaml", "--no-data", "model.vocab_size=50304", "training.sharding=fsdp2")
    one, eight = (json.loads(unbroken(*words, "--world-size", str(ranks), "--json").stdout) for ranks in (1, 8))
    parameters = one["parameters"]
    assert one["memory"]["optimizer_bytes"] == 8 * parameters
    assert eight["memory"]["optimizer_bytes"] == parameters
    assert eight["memory"]["total_bytes"] < one["memory"]["total_bytes"] / 3
    assert eight["memory"]["activations_kept_bytes"] > 5 * eight["memory"]["activations_recomputed_bytes"]
    assert (eight["memory"]["sharding"], eight["memory"]["compute_bits"]) == ("fsdp2", 16)
    assert json.loads(unbroken("validate", "run.yaml", "--no-data", "--json").stdout)["memory"] is None


@pytest.mark.promise("G22")
def test_validate_plans_the_wall_time_by_what_the_run_has_measured(unbroken: Tool, tmp_path: Path) -> None:
    unbroken("init", "--preset", "tiny", "-o", "run.yaml")
    words = ("validate", "run.yaml", "--no-data", "training.max_runtime_seconds=600")
    assert json.loads(unbroken(*words[:-1], "--json").stdout)["walltime"] is None
    fresh = json.loads(unbroken(*words, "training.walltime_reserve_seconds=100", "--json").stdout)["walltime"]
    assert (fresh["walltime_s"], fresh["reserve_s"], fresh["usable_s"]) == (600, 100, 500)
    assert (fresh["step_s"], fresh["step_s_for_one_job"]) == (None, 2.5)
    metrics = MetricsWriter(Layout(tmp_path / "runs" / "tiny"), 1, start=0)
    for step in (1, 2):
        metrics.write(step, {"loss": 5.0, "tokens_per_s": 102.4})
    metrics.close()
    planned = json.loads(unbroken(*words, "training.walltime_reserve_seconds=100", "--json").stdout)["walltime"]
    assert planned["step_s"] == 10.0
    assert (planned["steps_done"], planned["steps_left"]) == (2, 198)
    assert (planned["steps_per_job"], planned["jobs"]) == (50, 4)
    hopeless = unbroken(*words, "training.walltime_reserve_seconds=595", "--json").stdout
    assert (json.loads(hopeless)["walltime"]["steps_per_job"], json.loads(hopeless)["walltime"]["jobs"]) == (0, None)
