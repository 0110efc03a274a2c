"""The public surface: importing it is cheap, its names resolve, and docs/api.md lists all of it."""

import inspect
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

import unbroken
from tools import api
from unbroken.config import DataConfig, TrainingConfig

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = [*api.LAYOUT, "unbroken.errors"]
# The trainer decides these itself, or a loop has no such thing.
TRAINER_ONLY = {
    *("per_device_batch_size", "gradient_accumulation_steps", "global_batch_size", "max_steps", "seed", "exact"),
    *("mixed_precision", "sharding", "gradient_checkpointing", "compile", "ema_decay", "eval_steps"),
    *("max_eval_batches", "output_dir", "wandb_project", "wandb_run_name"),
}
LOOP_ONLY = {
    *(
        "files_per_rank",
        "staging_memory_bytes",
        "planner",
        "allow_pickle",
        "force",
        "accept",
        "hyperparameters",
        "audit",
        "audit_ignore",
    ),
    *("shared_rng", "catch_signals", "non_finite_metrics", "console", "tracker_config", "tracker_run_name"),
}


def loaded_by(program: str) -> set[str]:
    """The modules a fresh interpreter has loaded after a program."""
    code = f"import json, sys; {program}; print(json.dumps(sorted(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(json.loads(ended.stdout))


def test_importing_the_library_loads_nothing_but_its_version() -> None:
    loaded = loaded_by("import unbroken; dir(unbroken)")
    assert {name for name in loaded if name.startswith("unbroken")} == {"unbroken", "unbroken.version"}
    assert not {"torch", "numpy", "yaml"} & loaded


@pytest.mark.parametrize("program", ["import unbroken; unbroken.errors, unbroken.config", "import unbroken.loop.run"])
def test_no_framework_and_no_tracker_is_imported_before_it_is_asked_for(program: str) -> None:
    frameworks = {"transformers", "accelerate", "trl", "lightning", "pytorch_lightning", "deepspeed", "torchtitan"}
    data = {"torchdata", "datasets", "grain", "distributed", "pyarrow"}
    others = {"wandb", "trackio", "tensorboard", "mlflow", "obstore"}
    loaded = {name.partition(".")[0] for name in loaded_by(program)}
    assert not (frameworks | data | others) & loaded
    assert "unbroken.frameworks" not in loaded_by(program)


@pytest.mark.parametrize("name", ["config", "data", "errors", "frameworks", "gpt", "testing"])
def test_a_package_is_imported_when_it_is_first_used_and_without_torch(name: str) -> None:
    loaded = loaded_by(f"import unbroken; unbroken.{name}")
    assert f"unbroken.{name}" in loaded
    assert not {"torch", "numpy"} & loaded


def test_exact_needs_no_import_statement() -> None:
    assert "torch" in loaded_by("import unbroken; unbroken.exact.pin")


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_resolves_and_is_listed(package: str) -> None:
    module = pytest.importorskip(package, exc_type=ImportError)
    assert all(getattr(module, name) is not None for name in module.__all__)
    assert set(module.__all__) <= set(dir(module))
    assert list(module.__all__) == sorted(set(module.__all__), key=module.__all__.index)


@pytest.mark.parametrize("package", PUBLIC)
def test_an_unknown_name_is_an_attribute_error(package: str) -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        getattr(pytest.importorskip(package, exc_type=ImportError), "nonsense")  # noqa: B009 -- the type checker knows that it is missing


def test_a_setting_and_its_config_field_have_one_name() -> None:
    settings = {field.name for field in fields(unbroken.Settings)}
    config = {field.name for field in fields(TrainingConfig)}
    assert settings - config == LOOP_ONLY
    assert config - settings == TRAINER_ONLY


# What the parameters of `unbroken.data` mean and the config has another field for, or none: see decision 017.
DATA_ONLY = {
    "Loader": {"stream", "rank", "world_size"},
    "Stream": {"corpus", "phases", "on_exhausted", "eras", "check_reads", "files", "progress"},
    "SampleIterable": {"stream", "start", "rank", "world_size", "names"},
    "open_text_corpus": {"split", "text_field", "accelerate"},
}


@pytest.mark.parametrize("name", DATA_ONLY)
def test_a_parameter_of_the_data_api_has_the_name_of_its_config_field_or_that_of_torch(name: str) -> None:
    config = {field.name for section in (DataConfig, TrainingConfig) for field in fields(section)}
    torchs = set(inspect.signature(DataLoader).parameters)
    assert set(inspect.signature(getattr(unbroken.data, name)).parameters) - config - torchs == DATA_ONLY[name]


def test_the_page_is_current() -> None:
    command = [sys.executable, str(ROOT / "tools" / "api.py"), "--check"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "docs/api.md is current\n")


def test_the_page_shows_no_internal_name_and_explains_every_field() -> None:
    page = api.PAGE.read_text()
    assert re.findall(r"= (?:_[A-Z]\w*|LOCAL)\b|: (?:Files|FrameType|FrameworkRun)\b", page) == []
    tables = re.findall(r"^\| field .*meaning \|\n(?:\|.*\n)+", page, re.MULTILINE)
    assert [row for table in tables for row in table.splitlines() if row.endswith("|  |")] == []
    headings = re.findall(r"^## `(.+)`$", page, re.MULTILINE)
    anchors = {heading.replace(".", "") for heading in headings}
    assert anchors == set(re.findall(r"\]\(#(\w+)\)", page.partition(api.MARKER)[0]))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A small package laid out like ours."""
    source = tmp_path / "src" / "unbroken" / "exact"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text('"""Exact."""\nfrom unbroken.exact.a import pin\n__all__ = ["pin"]\n')
    (source / "a.py").write_text('def pin(device: str = "cpu", *, x: "int | None" = None) -> int:\n    """Pin it."""\n')
    return tmp_path


def test_a_signature_or_docstring_that_changes_changes_the_page(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "LAYOUT", {"unbroken.exact": {"": "pin"}})
    monkeypatch.setattr(api, "ERRORS", ())
    before = api.generated(copy)
    assert 'unbroken.exact.pin(device: str = "cpu", *, x: int | None = None) -> int' in before
    assert "Pin it." in before
    home = copy / "src" / "unbroken" / "exact" / "a.py"
    for old, new in (('"cpu"', '"cuda"'), ("Pin it.", "Pin all.")):
        home.write_text(home.read_text().replace(old, new))
        assert api.generated(copy) != before


@pytest.mark.parametrize(("layout", "words"), [("", "is public and not in LAYOUT"), ("pin on", "and not public")])
def test_a_name_that_page_and_package_disagree_about_is_named(
    copy: Path, monkeypatch: pytest.MonkeyPatch, layout: str, words: str
) -> None:
    monkeypatch.setattr(api, "LAYOUT", {"unbroken.exact": {"": layout}})
    assert [words in line for line in api.complaints(copy)] == [True]


def test_docstrings_become_markdown() -> None:
    text = "A ``name``::\n\n    code()\n\n    more()\n\nEnd."
    assert api.markdown(text) == "A `name`:\n\n```python\ncode()\n```\n\n```python\nmore()\n```\n\nEnd."
