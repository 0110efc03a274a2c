"""No command above the torch line opens a pickle: folders full of malicious ones stay bytes."""

import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

DRIVER = """
import sys
from unbroken.cli.main import main
code = main(sys.argv[1:])
loaded = sorted({"pickle", "_pickle", "torch", "numpy"} & sys.modules.keys())
sys.stderr.write("LOADED " + " ".join(loaded))
sys.exit(code)
"""
COMMANDS = [
    ["seal", "run/checkpoints", "--all"],
    ["seal", "run/checkpoints/checkpoint-5"],
    ["ls", "run"],
    ["show", "run", "--tensors"],
    ["show", "run/checkpoints/checkpoint-5/rng_state.pth"],
    ["verify", "run", "--full"],
    ["verify", "run", "--sampled"],
    ["diff", "run@5", "run@6"],
    ["pin", "run@5"],
    ["unpin", "run@5"],
    ["status", "run"],
    ["prune", "run", "--keep-last-k", "1", "--dry-run"],
    ["prune", "run", "--keep-last-k", "1"],
]


class Malicious:
    """Opened as a pickle, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """A run whose folders hold a malicious pickle under every name that tools unpickle."""
    bomb = pickle.dumps(Malicious(tmp_path / "PWNED"))
    for step in (5, 6):
        folder = tmp_path / "run" / "checkpoints" / f"checkpoint-{step}"
        (folder / "state").mkdir(parents=True)
        for name in ("state/.metadata", "rng_state.pth", "optimizer.bin", "training_args.bin", "random_states_0.pkl"):
            (folder / name).write_bytes(bomb + bytes([step]))
        for name in ("model.pt", "last.ckpt", "state/__0_0.distcp"):
            with zipfile.ZipFile(folder / name, "w") as archive:
                archive.writestr("archive/data.pkl", bomb)
        for name in ("model.safetensors", "trainer_state.json", "config.json"):
            (folder / name).write_bytes(bomb)
    return tmp_path


def test_the_trap_works_when_a_pickle_is_opened(trapped: Path) -> None:
    pickle.loads((trapped / "run/checkpoints/checkpoint-5/rng_state.pth").read_bytes())
    assert (trapped / "PWNED").exists()


def test_no_command_opens_a_pickle_or_even_loads_the_module(trapped: Path) -> None:
    for arguments in COMMANDS:
        command = [sys.executable, "-c", DRIVER, *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=trapped)
        assert ended.returncode in (0, 3), (arguments, ended.stderr)
        assert ended.stderr.endswith("LOADED "), (arguments, ended.stderr)
        assert not (trapped / "PWNED").exists(), arguments
    assert [path.name for path in (trapped / "run/checkpoints").glob("checkpoint-*")] == ["checkpoint-6"]
