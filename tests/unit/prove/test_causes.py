"""Why two runs may differ: what a script's text suggests."""

from pathlib import Path

import pytest

from unbroken.prove.baseline import likely_causes, script_text

# All that is said of it is that its kernels are not pinned.
SEEDED = "torch.manual_seed(1)\n"


def causes_of(text: str, first_step: int | None = 5, **environ: str) -> str:
    return "\n".join(likely_causes(text, environ, first_step=first_step))


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("x = np.random.randn(3)", "numpy.random.seed"),
        ("if random.random() < 0.5: pass", "random.seed"),
        ("g = numpy.random.default_rng()", "without a seed"),
        ("torch.backends.cudnn.benchmark = True", "cudnn.benchmark"),
        ("loader = DataLoader(data, num_workers=4)", "workers"),
        ("seed = time.time()", "clock"),
        ("names = set(words)", "PYTHONHASHSEED"),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "TF32"),
    ],
)
def test_a_line_that_may_differ_from_run_to_run_is_named(line: str, word: str) -> None:
    assert word in causes_of(SEEDED + line)
    assert word not in causes_of(SEEDED)


@pytest.mark.parametrize(
    "line",
    [
        "np.random.seed(1); x = np.random.randn(3)",
        "random.seed(1); random.random()",
        "g = numpy.random.default_rng(4)",
        "DataLoader(data, num_workers=0)",
        "DataLoader(data, num_workers=2, generator=generator)",
    ],
)
def test_a_line_that_is_seeded_is_not_blamed(line: str) -> None:
    assert causes_of(SEEDED + line) == causes_of(SEEDED)


def test_a_missing_seed_is_reported_first() -> None:
    first, *_ = likely_causes("model = nn.Linear(1, 1)", {}, first_step=1)
    assert "torch.manual_seed" in first
    assert "exact.pin" in causes_of("torch.manual_seed(1)")
    assert "too late" in causes_of("torch.manual_seed(1)", first_step=1)
    assert "PYTHONHASHSEED" not in causes_of(SEEDED + "set(words)", PYTHONHASHSEED="0")


def test_without_a_script_to_read_the_usual_causes_are_named() -> None:
    for word in ("manual_seed", "exact.pin", "workers", "PYTHONHASHSEED"):
        assert word in causes_of("")


def test_the_script_is_the_first_python_file_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("here")
    assert script_text(["torchrun", "--nproc-per-node", "2", "train.py", "x.py"], tmp_path) == "here"
    assert script_text(["unbroken", "train", "run.yaml"], tmp_path) == ""
