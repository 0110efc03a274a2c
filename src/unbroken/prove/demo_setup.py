"""The setup of the demo: its jobs, its config, and its folder.

Nothing is removed that a demo did not make, nor anything that another running demo uses.
"""

import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from unbroken.disk import NodeKind
from unbroken.errors import BadUsage, StorageFailed
from unbroken.errors.tree import quoted
from unbroken.files import LOCAL, Files
from unbroken.prove.demo_corpus import CODE, DOCSTRINGS
from unbroken.quoting import amounts
from unbroken.quoting.yaml import scalar
from unbroken.records.drill import Drill, Fault
from unbroken.records.lease import DIRECTORY as LEASES
from unbroken.records.lease import Holder, ProcessOf, acquire
from unbroken.store.names import scratch

# ---- jobs and config ----

STEPS: Final = 120
SAVE_STEPS: Final = 20
VOCABULARY: Final = 1024
VALIDATION: Final = "0.1"
# Two runs with their checkpoints, text, shards and logs, and as much again to spare.
NEEDED_BYTES: Final = 200_000_000

_LENGTH, _LANE, _LANES = 64, 2, 7
# Stop requests are polled once a second: no machine may reach the last step in that time.
_SLOWED_S: Final = 0.02

End = Literal["killed", "stopped", "killed-saving", "completed"]


@dataclass(frozen=True)
class DemoJob:
    """One job of the chain: ranks, workers, how it ends, and after which of its steps."""

    ranks: int
    workers: int
    end: End
    after: int = STEPS

    def expected(self) -> str:
        """Its planned end, for a sentence."""
        return {
            "killed": "be killed in mid-step",
            "stopped": "stop on request",
            "killed-saving": "be killed while it saves",
            "completed": "reach the last step",
        }[self.end]

    def ending(self) -> str:
        """How it ended, for a table."""
        return {
            "killed": "SIGKILL in mid-step",
            "stopped": "stopped on request: saved and exited",
            "killed-saving": "SIGKILL while it saved",
            "completed": "completed",
        }[self.end]

    def drill(self) -> Drill | None:
        """The drill inside the job."""
        if self.end == "killed-saving":
            # At the second save of the job: the first leaves a checkpoint to damage afterwards.
            return Drill(faults=(Fault(at="parts", do="kill", when=2),))
        if self.end == "stopped":
            return Drill(faults=(Fault(at="edge", do="delay", seconds=_SLOWED_S),))
        return None


ALONE: Final = DemoJob(ranks=1, workers=0, end="completed")
CHAIN: Final = (
    DemoJob(ranks=2, workers=0, end="killed", after=33),
    DemoJob(ranks=1, workers=0, end="stopped", after=45),
    DemoJob(ranks=3, workers=0, end="killed-saving"),
    DemoJob(ranks=2, workers=1, end="completed"),
)


@dataclass(frozen=True)
class DemoFolder:
    """The names in the demo's folder."""

    folder: Path

    @property
    def text(self) -> Path:
        """The corpus."""
        return self.folder / "text"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer trained on it."""
        return self.folder / "tokenizer.json"

    @property
    def data(self) -> Path:
        """The shards."""
        return self.folder / "data"

    @property
    def config(self) -> Path:
        """The config of both runs."""
        return self.folder / "run.yaml"

    @property
    def alone(self) -> Path:
        """The uninterrupted run."""
        return self.folder / "runs" / "alone"

    @property
    def chained(self) -> Path:
        """The run that is killed, stopped, resized and damaged."""
        return self.folder / "runs" / "chained"

    @property
    def drill(self) -> Path:
        """The drill of the current job."""
        return self.folder / "drill.json"

    @property
    def scratch(self) -> Path:
        """The temporary name of the config."""
        return self.folder / scratch("demo", "run.yaml")

    def log(self, name: str) -> Path:
        """The log of one command."""
        return self.folder / "logs" / f"{name}.log"

    def made(self) -> tuple[Path, ...]:
        """All that a demo makes in its folder, besides the lease."""
        names = ("text", "data", "runs", "logs", self.tokenizer.name, self.drill.name, self.config.name)
        return tuple(self.folder / name for name in names)


def config_text(places: DemoFolder) -> str:
    """The config: a GPT of some hundred thousand parameters, with dropout and a mixture that changes halfway."""
    phase_tokens = STEPS // 2 * _LANES * _LANE * _LENGTH
    return f"""\
# Written by `unbroken demo`. Seven lanes a step: no count of ranks above one divides them.
model:
  n_embd: 64
  n_layer: 2
  n_head: 2
  n_positions: {_LENGTH}
  dropout: 0.1
data:
  path: {scalar(str(places.data))}
  tokenizer: {scalar(str(places.tokenizer))}
  max_length: {_LENGTH}
  overlap_size: 8
  num_workers: 0
  curriculum:
    - {{duration_tokens: {phase_tokens}, mix: {{{CODE}: 0.8, {DOCSTRINGS}: 0.2}}}}
    - {{duration_tokens: {phase_tokens}, mix: {{{CODE}: 0.3, {DOCSTRINGS}: 0.7}}}}
optimizer:
  learning_rate: 5.0e-3
  warmup_steps: 10
training:
  output_dir: {scalar(str(places.chained))}
  max_steps: {STEPS}
  per_device_batch_size: {_LANE}
  global_batch_size: {_LANES * _LANE}
  save_steps: {SAVE_STEPS}
  eval_steps: 40
  max_eval_batches: 4
  logging_steps: 1
  mixed_precision: "no"
  gradient_checkpointing: false
  compile: false
"""


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the demo's jobs: on the CPU, without variables of other launchers or schedulers."""
    foreign = (
        "UNBROKEN_",
        "GPT_SIMPLE_",
        "SLURM_",
        "TORCHELASTIC_",
        "MASTER_",
        "LOCAL_",
        "GROUP_",
        "ROLE_",
        "PMI_",
        "OMPI_",
    )
    kept = {name: value for name, value in environ.items() if not name.startswith(foreign)}
    for name in ("RANK", "WORLD_SIZE"):
        kept.pop(name, None)
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


# ---- its folder ----

COMMAND: Final = "unbroken demo"


def fresh_folder() -> Path:
    """A new temporary folder, which is kept for inspection.

    Raises:
        StorageFailed: an I/O error.
    """
    try:
        return Path(tempfile.mkdtemp(prefix="unbroken-demo-"))
    except OSError as refusal:
        where = Path(refusal.filename or ".")
        raise StorageFailed(operation="create", path=where, cause=refusal.strerror or str(refusal)) from refusal


def prepare(
    folder: Path,
    *,
    holder: Holder,
    now_s: float,
    process_of: ProcessOf,
    files: Files = LOCAL,
) -> DemoFolder:
    """Prepare the demo's folder: a new or empty one, or that of an earlier demo, which is replaced.

    Args:
        folder: where to keep the demo.
        holder: who runs it.
        now_s: seconds since 1970.
        process_of: as ``lease.acquire`` takes it: whether another demo's process still lives.
        files: the storage.

    Raises:
        BadUsage: it is a file, or has other files in it.
        RunHeld: another demo is running in it.
        StorageFailed: an I/O error, or not enough disk space.
    """
    places = DemoFolder(folder.resolve())
    _require_own(places, folder, files)
    files.make_directory(places.folder)
    free_bytes = files.space(places.folder).free_bytes
    if free_bytes < NEEDED_BYTES:
        cause = f"it needs {amounts.size(NEEDED_BYTES)}, and {amounts.size(free_bytes)} are free"
        raise StorageFailed(operation="write the demo", path=places.folder, cause=cause)
    # Another running demo's files must not be removed below.
    acquire(places.folder, holder, token=secrets.token_hex(4), now_s=now_s, process_of=process_of, files=files)
    for path in places.made():
        # crash here: less of an earlier demo; the lease marks the folder as a demo's.
        files.remove_tree(path)
    # crash here: a folder with a lease and no config; the next demo uses it.
    files.replace(places.config, config_text(places).encode(), scratch=places.scratch.name, durable=False)
    return places


def _require_own(places: DemoFolder, asked: Path, files: Files) -> None:
    """Raise unless a folder is a demo's, empty or missing: nothing else is ever removed."""
    found = files.find(places.folder)
    if found is None:
        return
    if found.kind is not NodeKind.DIRECTORY:
        raise BadUsage(command=COMMAND, complaint=f"--dir is a file and not a folder: {asked}")
    names = {node.name for node in files.list_directory(places.folder)}
    others = names - {LEASES, places.scratch.name} - {path.name for path in places.made()}
    if others or (names and LEASES not in names):
        held = ", ".join(sorted(others or names)[:3])
        complaint = f"--dir contains other files ({held}); the demo needs a folder of its own: {asked}"
        raise BadUsage(command=COMMAND, complaint=complaint)


def called() -> str:
    """The shortest command that starts this program."""
    beside = Path(sys.executable).parent / "unbroken"
    found = shutil.which("unbroken")
    if found is not None and Path(found).resolve() == beside.resolve():
        return "unbroken"
    return quoted(beside) if beside.exists() else f"{quoted(sys.executable)} -m unbroken"
