"""What is said about fields is made from their declarations, and is complete."""

import subprocess
import sys
from pathlib import Path

from unbroken.config.document import SECTIONS, Config, all_fields
from unbroken.config.fields import ResumeClass
from unbroken.config.guide import explain, reference, topics

ROOT = Path(__file__).parents[3]


def test_the_topics_are_the_config_its_sections_and_all_fields() -> None:
    assert topics() == ["config", *SECTIONS, *all_fields()]
    assert len(topics()) == len(set(topics()))


def test_every_topic_is_explained_within_the_width_of_a_terminal() -> None:
    for topic in topics():
        text = explain(topic)
        assert text is not None, topic
        assert text.startswith(f"# {topic}\n"), topic
        assert max(map(len, text.splitlines())) <= 120, topic


def test_a_field_is_explained_with_meaning_type_bounds_default_and_resume_class() -> None:
    text = explain("optimizer.learning_rate")
    assert text is not None
    for part in ("Peak learning rate", "number", "above 0", "0.0003", "declared", "--accept"):
        assert part in text


def test_an_unknown_topic_has_no_explanation() -> None:
    assert explain("optimizer.lerning_rate") is None
    assert explain("") is None


def test_every_meaning_is_one_short_sentence_and_null_is_explained() -> None:
    for name, declared in all_fields().items():
        said = declared.declaration
        assert said.meaning.endswith("."), name
        assert len(said.meaning) <= 100, name
        assert declared.shape.optional == (said.null_means is not None), name
        assert declared.default is not None or said.example is not None, name


def test_what_changes_the_bits_of_a_run_is_never_free() -> None:
    free = {name for name, field in all_fields().items() if field.declaration.resume is ResumeClass.FREE}
    assert not {name for name in free if name.startswith(("model.", "optimizer."))}
    assert {"training.save_steps", "data.num_workers", "training.logging_steps"} <= free
    fixed = {name for name, field in all_fields().items() if field.declaration.resume is ResumeClass.FIXED}
    assert {"training.seed", "training.global_batch_size", "model.n_layer", "data.max_length"} <= fixed


def test_the_reference_page_is_what_the_declarations_say() -> None:
    page = ROOT / "docs" / "config.md"
    assert page.read_text(encoding="utf-8") == reference(), "python -m unbroken.config.guide > docs/config.md"


def test_the_reference_page_holds_every_field_and_default() -> None:
    rows = [line for line in reference().splitlines() if line.startswith("| `")]
    assert len(rows) == len(all_fields())
    assert any("`learning_rate`" in row and f"`{Config().optimizer.learning_rate}`" in row for row in rows)


def test_naming_fields_loads_no_parser_and_nothing_below_the_torch_line() -> None:
    code = "import sys, unbroken.config as c; c.ModelConfig(); print(*sorted(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(ended.stdout.split())
    assert "unbroken.config.sections" in loaded
    assert not {"yaml", "torch", "numpy", "difflib", "hashlib", "unbroken.config.decode"} & loaded
