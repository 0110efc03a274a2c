"""The record of a config that an older version wrote: what it does not know takes its default, and that is named."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from unbroken.config import Config, DataConfig, ModelConfig, TrainingConfig, load
from unbroken.config.document import SECTIONS, all_fields, digest_of
from unbroken.config.reading import from_json
from unbroken.errors import ConfigInvalid

# Values that are no defaults, so that what is read and what is filled in can be told apart.
STARTED = Config(
    model=ModelConfig(vocab_size=100, n_layer=3), data=DataConfig(path="data"), training=TrainingConfig(seed=7)
)


def record(change: Callable[[dict[str, Any]], None]) -> str:
    """A record as another version would have written it, with the digest of what stands in it."""
    document = json.loads(STARTED.to_json())
    change(document)
    document["digest"] = digest_of({name: document[name] for name in SECTIONS if name in document})
    return json.dumps(document)


def _without(name: str, document: dict[str, Any]) -> None:
    section, _, field = name.partition(".")
    del document[section][field]


@pytest.mark.promise("M20")
def test_a_record_without_one_field_loads_with_its_default_and_names_it() -> None:
    for name in all_fields().keys() - {"data.path"}:
        resolved = from_json(record(partial(_without, name)), "config.json")
        assert resolved.defaulted == (name,)
        assert resolved.config.value(name) == Config().value(name), name
        others = set(all_fields()) - {name}
        assert all(resolved.config.value(each) == STARTED.value(each) for each in others), name


@pytest.mark.promise("M20")
def test_a_record_without_several_fields_and_a_whole_section_names_them_all() -> None:
    def older(document: dict[str, Any]) -> None:
        del document["training"]["non_finite"], document["training"]["seed"], document["optimizer"]

    resolved = from_json(record(older), "config.json")
    optimizer = [name for name in all_fields() if name.startswith("optimizer.")]
    assert sorted(resolved.defaulted) == sorted([*optimizer, "training.non_finite", "training.seed"])
    assert resolved.config == replace(STARTED, training=replace(STARTED.training, seed=TrainingConfig().seed))


def test_a_record_of_this_version_and_an_override_leave_nothing_to_a_default(tmp_path: Path) -> None:
    assert from_json(STARTED.to_json(), "config.json").defaulted == ()
    path = tmp_path / "older.json"
    path.write_text(record(lambda document: document["training"].pop("seed")))
    assert load(path).defaulted == ("training.seed",)
    assert load(path, ["training.seed=42"]).defaulted == ()


@pytest.mark.promise("M20")
@pytest.mark.parametrize(
    ("section", "field", "value", "complaint"),
    [
        ("training", "non_finite", "ignore", '"ignore"'),
        ("training", "seed", "random", '"random"'),
        ("model", "n_layer", None, "is null"),
    ],
)
def test_a_value_that_this_version_does_not_know_is_refused_with_its_field(
    section: str, field: str, value: object, complaint: str
) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        from_json(record(lambda document: document[section].update({field: value})), "config.json")
    (problem,) = refused.value.problems
    assert problem.field == f"{section}.{field}" and complaint in problem.complaint


@pytest.mark.promise("M20")
def test_a_rule_about_what_every_job_chooses_again_does_not_lock_a_run_that_was_begun_without_it() -> None:
    text = record(lambda document: document["training"].update(keep_best="accuracy:max"))
    assert from_json(text, "config.json").config.training.keep_best == "accuracy:max"
    with pytest.raises(ConfigInvalid, check=lambda each: len(each.problems) == 1):
        from_json(record(lambda document: document["model"].update(n_head=5)), "config.json")


@pytest.mark.promise("M20")
def test_a_field_of_a_newer_version_is_refused_and_not_dropped() -> None:
    with pytest.raises(ConfigInvalid) as refused:
        from_json(record(lambda document: document["model"].update(gate="sigmoid")), "config.json")
    assert [problem.field for problem in refused.value.problems] == ["model.gate"]
