"""The help and the typical outputs of every command, one golden file per command.

This is the one place where wording is asserted; other tests assert kinds, fields and exit codes. After a change of
wording, look at the difference and write the files anew::

    python -m tests.e2e.golden --write

Times, sizes, digests, paths and the like are replaced by words, so that the files are the same on every machine.
"""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import click
import torch

from tests.format.make_golden import GOLDEN as STORE
from tests.unit.prove.test_report import DIFFERS, EQUAL, chain, proof
from unbroken.cli.commands import COMMANDS, Entry
from unbroken.cli.group import ROOT, LazyGroup
from unbroken.cli.main import main
from unbroken.records.layout import Layout
from unbroken.records.metrics import MetricsWriter
from unbroken.report.style import Style

FOLDER: Final = Path(__file__).parent / "golden"
_SMALL: Final = (
    *("data.path=data", "data.max_length=32", "data.overlap_size=0", "data.tokenizer=bytes"),
    *("model.n_layer=1", "model.n_head=2", "model.n_embd=16", "model.vocab_size=257", "model.intermediate_size=32"),
    *("training.output_dir=runs/a", "training.max_steps=4", "training.save_steps=2", "training.eval_steps=2"),
    *(
        "optimizer.warmup_steps=1",
        "training.per_device_batch_size=2",
        "training.global_batch_size=2",
        "data.num_workers=0",
    ),
)
_TRAIN: Final = ("train", "config.yaml", *_SMALL)
_WINDOWS: Final = ("--max-length", "32", "--overlap-size", "0")
# Of a run whose step took 10 s.
_JOBS: Final = (
    *("validate", "config.yaml", "--no-data", "training.max_steps=200", "training.output_dir=runs/timed"),
    *("training.per_device_batch_size=2", "training.global_batch_size=2", "data.max_length=32"),
    "training.max_runtime_seconds=600",
)
_LARGE: Final = ("model.vocab_size=50304", "training.sharding=fsdp2", "training.mixed_precision=bf16")
_SHORT: Final = "data.curriculum=[{duration_tokens: 2560, mix: {default: 1}}]"
_SLURM: Final = ("slurm", "init", "--run-dir")

# What is called, in this order, in a fresh copy of the folder that `prepare` makes.
SCENES: Final[dict[str, Sequence[Sequence[str]]]] = {
    "": (["--version"], ["stauts"], ["ls", "--nope"]),
    "init": (["init", "-o", "new.yaml"], ["init", "-o", "config.yaml"], ["init", "-o", "s3://bucket/a"]),
    "validate": (
        ["validate", "config.yaml", *_SMALL],
        ["validate", "config.yaml", *_SMALL, _SHORT, "training.max_steps=100", "--allow-budget-mismatch"],
        ["validate", "config.yaml", *_SMALL, "training.max_steps=13"],
        ["validate", "config.yaml", "--no-data", "--world-size", "8", *_LARGE],
        [*_JOBS, "training.walltime_reserve_seconds=100"],
        [*_JOBS, "training.walltime_reserve_seconds=595"],
        [*_JOBS, "training.walltime_reserve_seconds=100", "training.output_dir=runs/new"],
        ["validate", "broken.yaml", "--training.sed=1"],
        ["validate", "config.yaml", "--wrld-size"],
    ),
    "doctor": (["doctor", "store", "--no-torch"], ["doctor", "nowhere", "--no-torch"], ["doctor", ""]),
    "tokenizer": (),
    "tokenizer train": (["tokenizer", "train", "text", "-o", "tokenizer.json", "--vocab-size", "300"],),
    "tokenize": (
        ["tokenize", "--input-dir", "text", "--output-dir", "new", "--tokenizer-path", "bytes", "--num-workers", "1"],
        ["tokenize", "--input-dir", "text", "--output-dir", "data", "--tokenizer-path", "bytes", "--num-workers", "1"],
    ),
    "data": (),
    "data inspect": (
        ["data", "inspect", "data"],
        ["data", "inspect", "unsealed"],
        ["data", "inspect", "nowhere"],
    ),
    "data stats": (["data", "stats", "data", *_WINDOWS],),
    "data show": (["data", "show", "0", "data", *_WINDOWS], ["data", "show", "0"]),
    "data verify": (["data", "verify", "data"],),
    "data seal": (["data", "seal", "data"],),
    "train": (
        ["train", "config.yaml", "data.path=nowhere"],
        ["train", "config.yaml", "--resume", "x", "--force"],
        ["train", "config.yaml", "--until-done", "--resume", "scratch"],
        ["train", "config.yaml", "--nproc-per-noed", "3"],
        [*_TRAIN, "model.n_embd=32", "optimizer.learning_rate=0.5"],
    ),
    "run": (["run"], ["run", "--nnodes", "2", "--", "train.py"], ["run", "--", "nowhere.py"]),
    "launch": (["launch", "--rdzv-id", "a", "--", "train.py"],),
    "slurm": (),
    "slurm init": (
        ["slurm", "init", "config.yaml", "--time", "04:00:00"],
        ["slurm", "init", "train.py"],
        ["slurm", "init"],
        [*_SLURM, "r", "--time", "1", "--walltime-reserve", "90", "--", "train.py"],
        [*_SLURM, "r", "--nodes", "4-1", "--output", "logs/%j.out", "--name", "a/b", "--", "train.py"],
        [*_SLURM, "", "--time", "", "--partition", "", "--output", "", "--", "train.py"],
        [*_SLURM, "r-%a", "--", "train.py"],
        [*_SLURM, "r", "--resume", "5", "--", "train.py"],
        ["slurm", "init", "config.yaml", "config.yaml"],
    ),
    "slurm submit": (["slurm", "submit", "nowhere.sbatch"], ["slurm", "submit", "."]),
    "slurm job": (["slurm", "job", "runs/a"], ["slurm", "job", "r", "--", "true"]),
    "kubernetes": (["kubernetes", "config.yaml", "--image", "team/train:1"], ["kubernetes", "config.yaml"]),
    "plan": (
        ["plan", "--steps", "1000", "--step-time", "1", "--save-time", "4", "--mtbf", "1h", "--max-runtime", "4h"],
        ["plan"],
    ),
    "status": (["status", "runs/a"], ["status", "store"], ["status", "nowhere"]),
    "stop": (["stop", "runs/a"],),
    "outcome": (["outcome", "runs/a"], ["outcome", "store"]),
    "release": (["release", "runs/a"],),
    "ls": (["ls", "runs/a"], ["ls", "store"], ["ls", "empty"]),
    "show": (["show", "store@50", "--tensors"],),
    "verify": (["verify", "store"], ["verify", "damaged@50", "--full"], ["verify", "runs/a", "--full"]),
    "diff": (["diff", "store@40", "store@40"], ["diff", "store@40", "store@50"]),
    "prune": (["prune", "store", "--keep-last-k", "2", "--dry-run"], ["prune", "store", "--keep-last-k", "2"]),
    "pin": (["pin", "store@50"], ["pin", "store@50"]),
    "unpin": (["unpin", "store@50"],),
    "seal": (["seal", "foreign/step-5"], ["seal", "foreign/step-5"], ["seal", "foreign"], ["seal", "s3://b/a"]),
    "mirror": (
        ["mirror", "store", "--to", "file:///tmp/golden-mirror", "--dry-run"],
        ["mirror", "store"],
        ["mirror", "store", "--to", "ftp://host/a"],
        ["mirror", "store", "--to", ""],
    ),
    "fetch": (["fetch", "store"], ["fetch", "s3://bucket/a"]),
    "import": (
        ["import", "theirs", "runs/imported"],
        ["import", "theirs/model_000007.pt", "runs/b", "--require-kind", "dcp"],
        ["import", "foreign", "runs/c"],
    ),
    "evaluate": (["evaluate", "runs/a", "--device", "cpu"],),
    "generate": (
        ["generate", "runs/a", "--prompt", "a", "--max-new-tokens", "3", "--device", "cpu", "--output", "out.jsonl"],
        ["generate", "runs/a"],
    ),
    "batch-generate": (
        ["batch-generate", "runs/a", "--input", "prompts.jsonl", "--dry-run"],
        ["batch-generate", "runs/a", "--input", "broken.jsonl", "--dry-run"],
        ["batch-generate", "runs/a", "--input", "prompts.jsonl", "--output", "prompts.jsonl"],
    ),
    "export": (
        ["export", "runs/a", "-o", "model.safetensors"],
        ["export", "runs/a", "-o", "model.safetensors"],
        ["export", "runs/a", "-o", "llama"],
        ["export", "runs/a", "-o", "empty", "--force"],
        ["export", "runs/a", "-o", "empty/checkpoints"],
        ["export", "runs/a", "-o", "text.pt", "--force"],
        ["export", "runs/a", "-o", "train.py", "--format", "huggingface"],
    ),
    "prove": (["prove"], ["prove", "--faults", "flood", "--", "python", "train.py"]),
    "explain": (["explain", "lr"],),
    "completion": (["completion", "tcsh"],),
}

# What a command prints after minutes of work, from results that are made up.
_PLAIN: Final = Style(color=False)
REPORTS: Final[dict[str, Sequence[str]]] = {
    "prove": [proof(chain(comparison)).text(_PLAIN) for comparison in (EQUAL, DIFFERS)],
}

_VOLATILE: Final = (
    (r"\b\d+ (?:s|min|h|d) ago\b|\bjust now\b", "AGO"),
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", "TIME"),
    (r"\b(?:sha256|xxh3|xxh128|blake2b|blake3|mix|crc32c)[:-][0-9a-f]{8,}\b|\b[0-9a-f]{16,}\b", "DIGEST"),
    (r"\b[\d.]+ (?:bytes|kB|MB|GB|TB|PB)\b", "SIZE"),
    (r"(?m)^(ok +python +).*$", r"\1VERSION on SYSTEM"),
    (r"(?m)^(?:ok|note) +file system +(?:.|\n )*?(?=\n\S)", "ok       file system  TYPE, mounted at PLACE"),
    (r"\b[\d,]+ inodes\b", "N inodes"),
    (r"direct I/O +(?:works|not supported.*)", "direct I/O  DIRECT"),
    (r"\b(?:no problems, )?\d notes?$", "no problems"),
    (r"\btook +[\d.]+ m?s, [\d,-]+ tokens/s", "took  TIME, N tokens/s"),
    (r"\bin [\d.]+ m?s\b", "in TIME"),
    (r"(first step of job \d+ done after) .*", r"\1 TIME (LONGEST PARTS)"),
    (r"(?m)^(val_loss|perplexity) .*$", r"\1  NUMBER"),
    (r"\bloss [\d.]+", "loss NUMBER"),
    (r"\bprocess \d+", "process PID"),
    (r"\bjob (\d+) on [^,]+,", r"job \1 on HOST,"),
    (r"unbroken \d+\.\d+\S*", "unbroken VERSION"),
    (r"engine +\S.*", "engine  ENGINE"),
)


def prepare(folder: Path) -> None:
    """Fill a folder with what the scenes use: a store, data, and a run of four steps."""
    shutil.copytree(STORE, folder / "store", symlinks=True)
    shutil.copytree(STORE, folder / "damaged", symlinks=True)
    part = folder / "damaged/checkpoints/checkpoint-50/state/__0_0.distcp"
    part.write_bytes(bytes([part.read_bytes()[0] ^ 1]) + part.read_bytes()[1:])
    for name, text in _FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "empty/checkpoints").mkdir(parents=True)
    (folder / "theirs").mkdir()
    torch.save({"weight": torch.zeros(2)}, folder / "theirs/model_000007.pt")
    metrics = MetricsWriter(Layout(folder / "runs/timed"), 1, start=0)
    for step in (1, 2):
        metrics.write(step, {"tokens_per_s": 6.4})
    metrics.close()
    with contextlib.chdir(folder):
        _require(["init", "--preset", "tiny", "-o", "config.yaml"])
        split = ["--val-fraction", "0.4", "--tokenizer-path", "bytes", "--num-workers", "1"]
        _require(["tokenize", "--input-dir", "text", "--output-dir", "data", *split])
        shutil.copytree("data", "unsealed", ignore=shutil.ignore_patterns("shards.json", ".unbroken"))
        command = [sys.executable, "-m", "unbroken", *_TRAIN]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
        if ended.returncode != 0:
            raise AssertionError(ended.stderr)


_FILES: Final = {
    "broken.yaml": "model:\n  n_heads: 3\n  n_layer: 0\ndata:\n  path: a\n",
    "broken.jsonl": '{"prompt": "b", "generation": {"gredy": true}}\n{"promt": "c"}\n',
    "text.pt/notes.txt": "mine",
    "text/a.jsonl": "".join(f'{{"text": "document {n} of a small corpus, long enough"}}\n' for n in range(40)),
    "foreign/step-5/model.pt": "weights",
    "prompts.jsonl": '{"prompt": "a"}\n',
    "train.py": "",
}


def _require(arguments: Sequence[str]) -> None:
    code, said = call(arguments)
    if code != 0:
        raise AssertionError(said)


def call(arguments: Sequence[str]) -> tuple[int, str]:
    """Exit code and output of one call in this process, in the working directory."""
    out = io.StringIO()
    argv, sys.argv = sys.argv, ["unbroken", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = main(arguments)
    finally:
        sys.argv = argv
    return code, out.getvalue()


def stable(text: str, folder: Path) -> str:
    """A text without what differs from machine to machine, its columns no wider than two spaces."""
    text = text.replace(str(folder), "/DIR").replace(sys.executable, "PYTHON")
    for pattern, word in _VOLATILE:
        text = re.sub(pattern, word, text)
    lines = (re.sub(r"(?<=\S) {2,}", "  ", line).rstrip() for line in text.splitlines())
    return "\n".join(lines)


def names() -> Iterator[str]:
    """Every command as it is typed, also those of groups; the first is ``unbroken`` itself."""
    yield ""
    for name in COMMANDS:
        yield name
        command = ROOT.get_command(_context(), name)
        if isinstance(command, LazyGroup):
            table: dict[str, Entry] = command.table
            yield from (f"{name} {inner}" for inner in table)


def _context() -> click.Context:
    return click.Context(ROOT)


def golden(name: str, template: Path, folder: Path) -> str:
    """The golden text of one command; ``folder`` is a new folder for its scenes, a copy of ``template``."""
    shutil.copytree(template, folder, symlinks=True)
    with contextlib.chdir(folder), fixed_surroundings():
        pieces = [_shown([*name.split(), "--help"], call([*name.split(), "--help"])[1].rstrip(), 0)]
        for arguments in SCENES.get(name, ()):
            code, said = call(arguments)
            pieces.append(_shown(arguments, stable(said, folder), code))
        pieces += [stable(report, folder) for report in REPORTS.get(name, ())]
    return "\n\n".join(pieces) + "\n"


def _shown(arguments: Sequence[str], said: str, code: int) -> str:
    return f"$ unbroken {' '.join(arguments)}\n{said}\n[exit code {code}]"


def path_of(name: str) -> Path:
    """The golden file of a command."""
    return FOLDER / f"{name.replace(' ', '-') or 'unbroken'}.txt"


@contextlib.contextmanager
def fixed_surroundings() -> Iterator[None]:
    """80 columns, no colour, and a clock that sleeping moves on: nobody waits for a lease to expire."""
    before = dict(os.environ)
    now, clock = [time.monotonic()], (time.sleep, time.monotonic)
    os.environ |= {"COLUMNS": "80", "NO_COLOR": "1", "SLURM_JOB_ID": ""}

    def sleep(seconds: float, /) -> None:
        now[0] += seconds

    time.sleep, time.monotonic = sleep, lambda: now[0]  # type: ignore[assignment]
    try:
        yield
    finally:
        time.sleep, time.monotonic = clock
        os.environ.clear()
        os.environ.update(before)


def write(folder: Path) -> None:
    """Write every golden file into a folder."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as root:
        template = Path(root, "template")
        template.mkdir()
        prepare(template)
        for name in names():
            (folder / path_of(name).name).write_text(golden(name, template, Path(root, path_of(name).stem)))


if __name__ == "__main__":
    if sys.argv[1:2] != ["--write"] or len(sys.argv) > 3:
        sys.exit("usage: python -m tests.e2e.golden --write [FOLDER]")
    write(Path(sys.argv[2]) if sys.argv[2:] else FOLDER)
