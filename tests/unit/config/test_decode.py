"""Structure: all problems at once, each with its place and the nearest known name."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.config import CurriculumPhase, Resolved, from_preset, load, preset
from unbroken.config.commented import commented
from unbroken.config.decode import decode
from unbroken.config.guide import topics
from unbroken.config.reading import from_json
from unbroken.config.source import Mapping, parse
from unbroken.errors import ConfigError, ConfigInvalid, Problem, render

SOUND = "data: {path: tokens}\n"


def loaded(folder: Path, text: str, *overrides: str) -> Resolved:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load(path, overrides)


def problems(folder: Path, text: str, *overrides: str) -> list[Problem]:
    with pytest.raises(ConfigInvalid) as caught:
        loaded(folder, text, *overrides)
    return list(caught.value.problems)


def explained(folder: Path, text: str, *overrides: str) -> list[tuple[int | None, str, str | None]]:
    return [(problem.line, problem.field, problem.nearest) for problem in problems(folder, text, *overrides)]


def test_every_problem_is_reported_at_once_in_the_order_of_the_lines(tmp_path: Path) -> None:
    text = """\
modle: {}
model:
  n_embd: many
  n_heads: 3
  n_layer: 0
data:
  max_length: 128
optimizer:
  learning_rate: 3e-4
  warmup_steps: 2000
training:
  learning_rate: 1
"""
    assert explained(tmp_path, text, "training.sed=1") == [
        (1, "modle", "model"),
        (3, "model.n_embd", None),
        (4, "model.n_heads", "model.n_head"),
        (5, "model.n_layer", None),
        (7, "data.overlap_size", None),
        (10, "optimizer.warmup_steps", None),
        (12, "training.learning_rate", "optimizer.learning_rate"),
        (None, "data.path", None),
        (None, "training.sed", "training.seed"),
    ]


def test_a_field_at_the_top_level_is_reported_where_it_belongs(tmp_path: Path) -> None:
    assert explained(tmp_path, SOUND + "seed: 3\n") == [(2, "seed", "training.seed")]


def test_a_name_that_resembles_nothing_gets_no_suggestion_and_a_topic_that_exists(tmp_path: Path) -> None:
    found = problems(tmp_path, SOUND + "model: {zzzzzz: 1}\nqqqqqq: 1\n")
    assert [(problem.field, problem.nearest) for problem in found] == [("model.zzzzzz", None), ("qqqqqq", None)]
    assert "unbroken explain model" in render(ConfigInvalid(problems=tuple(found)))


def test_a_short_word_finds_its_field_and_a_section_in_common_makes_no_likeness(tmp_path: Path) -> None:
    nearest = [problem.nearest for problem in problems(tmp_path, SOUND + "optimizer: {lr: 1, wd: 1, zz: 1}\n")]
    assert nearest == ["optimizer.learning_rate", "optimizer.weight_decay", None]


def test_every_help_line_names_a_topic_that_exists(tmp_path: Path) -> None:
    texts = [
        "modle: {}\n",
        "model: {n_heads: 3}\n",
        "model: 3\n",
        "data: {curriculum: [{duration_tokens: 0, mix: {}, more: 1}, 3]}\n",
        "data: {path: a, path: b, curriculum: [{mix: {a: 1, a: 2}, mix: {}}]}\n",
        "data: {path: a}\ndata: {}\n",
        "data: {path: ''}\n",
    ]
    for text in texts:
        for problem in problems(tmp_path, text):
            assert problem.topic is None or problem.topic in topics()


def test_a_key_that_stands_twice_is_a_problem_on_each_level(tmp_path: Path) -> None:
    text = "model:\n  n_layer: 3\n  n_layer: 4\ndata:\n  path: a\ndata:\n  path: b\n"
    found = problems(tmp_path, text)
    assert [(problem.line, problem.field) for problem in found] == [(3, "model.n_layer"), (6, "data")]
    assert "first on line 2" in found[0].complaint


def test_an_empty_section_leaves_its_defaults(tmp_path: Path) -> None:
    assert loaded(tmp_path, SOUND + "training:\nmodel: {}\n").config.training.max_steps == 1000


@pytest.mark.parametrize("value", ["3", "[1]", "abc"])
def test_a_section_that_holds_no_fields_is_a_problem(value: str, tmp_path: Path) -> None:
    assert explained(tmp_path, SOUND + f"model: {value}\n") == [(2, "model", None)]


def test_a_scalar_field_that_holds_a_list_or_section_is_a_problem(tmp_path: Path) -> None:
    text = SOUND + "model:\n  n_layer: [1]\n  n_embd: {a: 1}\n"
    assert explained(tmp_path, text) == [(3, "model.n_layer", None), (4, "model.n_embd", None)]


def test_a_curriculum_keeps_its_phases_and_sorts_its_buckets(tmp_path: Path) -> None:
    text = """\
data:
  path: tokens
  curriculum:
    - duration_tokens: 5_000_000_000
      mix: {web: 0.8, on: 2, no: 0}
    - {duration_tokens: 1e9, mix: {code: 1}}
"""
    assert loaded(tmp_path, text).config.data.curriculum == (
        CurriculumPhase(5_000_000_000, (("no", 0.0), ("on", 2.0), ("web", 0.8))),
        CurriculumPhase(1_000_000_000, (("code", 1.0),)),
    )


@pytest.mark.parametrize(
    ("phase", "field", "complaint"),
    [
        ("3", "data.curriculum[0]", "must hold"),
        ("{mix: {a: 1}}", "data.curriculum[0].duration_tokens", "is missing"),
        ("{duration_tokens: 5}", "data.curriculum[0].mix", "is missing"),
        ("{duration_tokens: 0, mix: {a: 1}}", "data.curriculum[0].duration_tokens", "above 0"),
        ("{duration_tokens: 1.5, mix: {a: 1}}", "data.curriculum[0].duration_tokens", "whole number"),
        ("{duration_tokens: '5', mix: {a: 1}}", "data.curriculum[0].duration_tokens", "whole number"),
        ("{duration_tokens: 1e30, mix: {a: 1}}", "data.curriculum[0].duration_tokens", "write all its digits"),
        ("{duration_tokens: 5, mix: {}}", "data.curriculum[0].mix", "is empty"),
        ("{duration_tokens: 5, mix: 3}", "data.curriculum[0].mix", "must name buckets"),
        ("{duration_tokens: 5, mix: {a: -1, b: 2}}", "data.curriculum[0].mix.a", "at least 0"),
        ("{duration_tokens: 5, mix: {a: 0, b: 0}}", "data.curriculum[0].mix", "all are 0"),
        ("{duration_tokens: 5, mix: {a: .nan}}", "data.curriculum[0].mix.a", "finite"),
        ("{duration_tokens: 5, mix: {a: [1]}}", "data.curriculum[0].mix.a", "a number"),
        ("{duration_tokens: 5, mix: {a: 1, a: 2}}", "data.curriculum[0].mix.a", "twice"),
        ("{duration_tokens: 5, mix: {../b: 1}}", "data.curriculum[0].mix.../b", "folder"),
        ("{duration_tokens: 5, mix: {a: 1}, mixx: 3}", "data.curriculum[0].mixx", "not a field of a phase"),
    ],
)
def test_a_phase_that_is_wrong_is_recognized_by_its_place_in_the_list(
    phase: str, field: str, complaint: str, tmp_path: Path
) -> None:
    found = problems(tmp_path, f"data:\n  path: a\n  curriculum:\n    - {phase}\n")
    assert [(problem.line, problem.field) for problem in found] == [(4, field)]
    assert complaint in found[0].complaint


@pytest.mark.parametrize("value", ["[]", "3", "{a: 1}"])
def test_a_curriculum_that_is_no_list_of_phases_is_a_problem(value: str, tmp_path: Path) -> None:
    assert explained(tmp_path, f"data:\n  path: a\n  curriculum: {value}\n") == [(3, "data.curriculum", None)]


def test_every_value_knows_where_it_came_from(tmp_path: Path) -> None:
    resolved = loaded(tmp_path, SOUND + "model:\n  n_layer: 3\n", "--training.seed", "7")
    origins = {name: str(place) for name, place in resolved.origins.items()}
    assert origins["model.n_layer"] == f"{tmp_path / 'run.yaml'}:3"
    assert origins["training.seed"] == "command line"
    assert origins["model.n_embd"] == "default"
    assert resolved.config.training.seed == 7


def test_a_preset_is_named_as_the_origin_of_its_values() -> None:
    resolved = from_preset("tiny", ["model.n_layer=2"])
    assert str(resolved.origins["model.n_embd"]) == "preset tiny"
    assert str(resolved.origins["model.n_layer"]) == "command line"
    assert resolved.config.model.n_embd == preset("tiny").model.n_embd


def test_the_record_of_a_run_can_be_used_as_a_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(preset("tiny").to_json())
    assert load(path).config == preset("tiny")


def test_schema_and_digest_are_unknown_in_a_file_that_is_no_record(tmp_path: Path) -> None:
    assert explained(tmp_path, SOUND + "digest: x\n") == [(2, "digest", None)]


def test_a_name_or_value_that_is_endless_or_moves_the_cursor_takes_one_short_line(tmp_path: Path) -> None:
    text = f'{SOUND}"a\\e[2Jb\\n": 1\nmodel:\n  ? {"x" * 100_000}\n  : 1\n  n_layer: {"y" * 100_000}\n'
    found = problems(tmp_path, text)
    assert len(found) == 3
    for problem in found:
        assert str(problem).isprintable()
        assert len(str(problem)) < len(str(tmp_path)) + 250


@st.composite
def broken_files(draw: st.DrawFn) -> str:
    """A commented preset with some of its text cut out, doubled or replaced."""
    text = commented(preset("tiny"), "tiny")
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 30)))
        text = text[:start] + draw(st.text(max_size=8) | st.just(text[start:end] * 2)) + text[end:]
    return text


@settings(deadline=None)
@given(broken_files() | st.text() | st.text("{}[]:,-&*!|>'\"#%@` \n\tab0"))
def test_whatever_a_file_holds_it_is_a_config_or_an_error_of_ours(text: str) -> None:
    with contextlib.suppress(ConfigError):
        root = parse(text, "run.yaml")
        config = decode(root if isinstance(root, Mapping) else None).config
        assert from_json(config.to_json(), "config.json").config == config


def test_a_single_mistake_takes_at_most_eight_lines(tmp_path: Path) -> None:
    found = problems(tmp_path, SOUND + "model: {n_layers: 3}\n")
    assert len(render(ConfigInvalid(problems=tuple(found))).splitlines()) <= 8


def test_a_script_that_does_not_catch_it_shows_every_problem_and_what_helps(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        loaded(tmp_path, SOUND, "model.n_head=5", "training.max_steps=0")
    shown = str(caught.value)
    assert "model.n_head" in shown and "training.max_steps" in shown and "unbroken explain" in shown
