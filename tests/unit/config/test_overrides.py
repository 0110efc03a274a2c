"""Overrides from the command line, in their three spellings."""

from pathlib import Path

import pytest

from unbroken.config import CurriculumPhase, load
from unbroken.config.overrides import take_apart
from unbroken.errors import ConfigInvalid


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("data: {path: tokens}\n")
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        ["--optimizer.learning_rate", "1e-4"],
        ["--optimizer.learning_rate=1e-4"],
        ["optimizer.learning_rate=1e-4"],
        ["--optimizer.learning-rate", "1e-4"],
        ["optimizer.learning_rate=5", "--optimizer.learning_rate", "1e-4"],
    ],
    ids=" ".join,
)
def test_all_spellings_mean_the_same_and_the_last_one_wins(arguments: list[str], run_yaml: Path) -> None:
    assert load(run_yaml, arguments).config.optimizer.learning_rate == 1e-4


def test_arguments_that_are_no_overrides_are_handed_back() -> None:
    taken = take_apart(["run.yaml", "model.n_layer=3", "--strict", "--data.path", "a=b", "x.yaml=3.yaml"])
    assert taken.rest == ("run.yaml", "--strict", "x.yaml=3.yaml")
    assert [name.text for name, _ in taken.overrides] == ["model.n_layer", "data.path"]


def test_a_value_may_hold_an_equals_sign_begin_with_a_dash_or_be_called_null(run_yaml: Path) -> None:
    overrides = ["--data.path=a=b", "--training.output_dir", "null", "--training.wandb_project", "null"]
    config = load(run_yaml, overrides).config
    assert config.data.path == "a=b"
    assert config.training.output_dir == "null"
    assert config.training.wandb_project is None
    with pytest.raises(ConfigInvalid, check=lambda each: len(each.problems) == 1):
        load(run_yaml, ["--training.seed", "-3"])


def test_a_curriculum_can_be_given_on_the_command_line(run_yaml: Path) -> None:
    override = "data.curriculum=[{duration_tokens: 1e9, mix: {on: 1}}]"
    assert load(run_yaml, [override]).config.data.curriculum == (CurriculumPhase(10**9, (("on", 1.0),)),)
    assert load(run_yaml, [override, "data.curriculum=null"]).config.data.curriculum is None


@pytest.mark.parametrize(
    ("arguments", "field", "complaint"),
    [
        (["--training.seed"], "training.seed", "has no value"),
        (["--training.seed", "--data.path", "x"], "training.seed", "has no value"),
        (["training.seed="], "training.seed", "has no value"),
        (["data.curriculum=[{"], "data.curriculum", "cannot be read"),
        (["data.curriculum=[3]"], "data.curriculum[0]", "must hold"),
        (["data.curriculum=[{duration_tokens: 5, mix: {a: no}}]"], "data.curriculum[0].mix.a", "must be a number"),
        (["traning.seed=3"], "traning.seed", "there is no section traning"),
        (["--model.=3"], "model.", "is not a field"),
        (["--a.b.c", "3"], "a.b.c", "is not a field"),
        (["stray"], "stray", "is not an override"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_override_is_reported_as_from_the_command_line(
    arguments: list[str], field: str, complaint: str, run_yaml: Path
) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        load(run_yaml, arguments)
    (found,) = caught.value.problems
    assert (found.source, found.line, found.field) == ("command line", None, field)
    assert complaint in found.complaint


@pytest.mark.parametrize(
    "arguments",
    [
        ["run.yaml", "--data.tokenizer", "run.yaml", "training.seed=1"],
        ["--data.tokenizer", "run.yaml", "training.seed=1", "run.yaml"],
    ],
    ids=["before", "behind"],
)
def test_an_override_whose_value_is_the_path_of_the_config_is_kept(arguments: list[str]) -> None:
    taken = take_apart(arguments)
    assert taken.rest == ("run.yaml",)
    words = taken.written
    assert take_apart(words).overrides == taken.overrides and take_apart(words).rest == ()
