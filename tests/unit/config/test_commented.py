"""What ``init`` writes decodes to what it was made from, for us and for any YAML reader."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from tests.unit.config.strategies import YAML_TEXT, configs
from unbroken.config import PRESETS, Config, load, preset
from unbroken.config.commented import as_yaml, commented
from unbroken.config.decode import decode
from unbroken.config.document import all_fields
from unbroken.config.source import Mapping, parse


def read_back(text: str) -> Config:
    root = parse(text, "run.yaml")
    assert isinstance(root, Mapping)
    return decode(root).config


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_comes_back_exactly_from_its_commented_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(commented(preset(name), name), encoding="utf-8")
    assert load(path).config == preset(name)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(configs(YAML_TEXT))
def test_any_config_comes_back_exactly_from_its_commented_file(config: Config) -> None:
    assert read_back(commented(config, "any")) == config


@pytest.mark.parametrize("name", PRESETS)
def test_every_field_stands_in_the_file_with_a_comment_within_the_width(name: str) -> None:
    lines = commented(preset(name), name).splitlines()
    assert max(map(len, lines)) <= 120
    for field in all_fields().values():
        written = [i for i, line in enumerate(lines) if line.removeprefix("  # ").strip().startswith(f"{field.name}:")]
        assert len(written) == 1, field.dotted
        line = lines[written[0]]
        assert "# " in line.removeprefix("  # ") or lines[written[0] - 1].startswith("  # "), field.dotted


def test_commented_lines_decode_when_they_are_enabled() -> None:
    lines = commented(preset("small"), "small").splitlines()
    # Checkpoints straight in an object store do not go with a mirror of local ones.
    names = {field.name for field in all_fields().values()} - {"checkpoints"}

    def taken_in(line: str) -> str:
        bare = line.removeprefix("  # ")
        return f"  {bare}" if line.startswith("  # ") and bare.partition(":")[0] in names else line

    config = read_back("\n".join(map(taken_in, lines)))
    assert config.training.keep_best == "val_loss:min"
    assert config.data.curriculum is not None


@pytest.mark.parametrize("name", PRESETS)
def test_another_yaml_reader_sees_the_same_texts_and_switches(name: str) -> None:
    values = preset(name).values()
    for section, found in yaml.safe_load(commented(preset(name), name)).items():
        for field, value in found.items():
            # Numbers such as 1e-5 are text to that reader; that is why ours reads by the field's type.
            if not isinstance(values[section][field], float):
                assert value == values[section][field]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1e-5, "1e-5"),
        (1e22, "1e22"),
        (0.0003, "0.0003"),
        (2048, "2048"),
        ("runs/a", "runs/a"),
        ("no", '"no"'),
        ("", '""'),
        ("a: b", '"a: b"'),
        ("é😀", '"é😀"'),
        ("\n\x07\U000e0001", '"\\u000a\\u0007\\U000e0001"'),
        ([{"mix": {"on": 1.0}}], '[{mix: {"on": 1.0}}]'),
    ],
)
def test_a_value_is_written_as_a_user_would(value: Any, text: str) -> None:  # noqa: ANN401
    assert as_yaml(value) == text


def test_the_presets_have_the_sizes_their_names_promise() -> None:
    vocabulary = {"tiny": 384, "small": 50304, "medium": 50304, "large": 50304}
    sizes = {name: preset(name).model.parameters(vocabulary[name]) / 1e6 for name in PRESETS}
    assert sizes["tiny"] == pytest.approx(1.1, rel=0.1)
    assert sizes["small"] == pytest.approx(125, rel=0.1)
    assert sizes["medium"] == pytest.approx(350, rel=0.1)
    assert sizes["large"] == pytest.approx(1300, rel=0.1)
