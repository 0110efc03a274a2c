"""What the demo does: the model it trains, and the jobs of its chain, each with the end it is to meet. Pure words."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from unbroken.prove.corpus import CODE, DOCSTRINGS
from unbroken.quoting.yaml import scalar
from unbroken.run.drill import Drill, Fault
from unbroken.store.names import scratch

STEPS: Final = 120
SAVE_STEPS: Final = 20
VOCABULARY: Final = 1024
VALIDATION: Final = "0.1"
# Two runs with their checkpoints, text, shards and logs, and as much again to spare.
NEEDED_BYTES: Final = 200_000_000

_LENGTH, _LANE, _LANES = 64, 2, 7
# A stop is looked for once a second: no machine may reach the last step in that time.
_SLOWED_S: Final = 0.02

End = Literal["killed", "stopped", "killed-saving", "completed"]


@dataclass(frozen=True)
class Act:
    """One job of the chain: its ranks and workers, how it is to end, and after which of its steps."""

    ranks: int
    workers: int
    end: End
    after: int = STEPS

    def was_to(self) -> str:
        """How it is to end, for a sentence."""
        return {
            "killed": "be killed in mid-step",
            "stopped": "stop when asked to",
            "killed-saving": "be killed while it saves",
            "completed": "reach the last step",
        }[self.end]

    def ending(self) -> str:
        """How it ended, for a table."""
        return {
            "killed": "SIGKILL in mid-step",
            "stopped": "asked to stop: it saved and ended",
            "killed-saving": "SIGKILL while it saved",
            "completed": "completed",
        }[self.end]

    def drill(self) -> Drill | None:
        """What is planted in the job itself."""
        if self.end == "killed-saving":
            # The second save of the job: the first one leaves a checkpoint that can be damaged afterwards.
            return Drill(faults=(Fault(at="parts", do="kill", when=2),))
        if self.end == "stopped":
            return Drill(faults=(Fault(at="edge", do="delay", seconds=_SLOWED_S),))
        return None


ALONE: Final = Act(ranks=1, workers=0, end="completed")
CHAIN: Final = (
    Act(ranks=2, workers=0, end="killed", after=33),
    Act(ranks=1, workers=0, end="stopped", after=45),
    Act(ranks=3, workers=0, end="killed-saving"),
    Act(ranks=2, workers=1, end="completed"),
)


@dataclass(frozen=True)
class Places:
    """The names in the demo's folder."""

    folder: Path

    @property
    def text(self) -> Path:
        """The corpus."""
        return self.folder / "text"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer that is learned from it."""
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
        """The run that is left alone."""
        return self.folder / "runs" / "alone"

    @property
    def chained(self) -> Path:
        """The run that is killed, stopped, resized and damaged."""
        return self.folder / "runs" / "chained"

    @property
    def drill(self) -> Path:
        """What is planted in the job at work."""
        return self.folder / "drill.json"

    @property
    def scratch(self) -> Path:
        """Where the config is written before it has its name."""
        return self.folder / scratch("demo", "run.yaml")

    def log(self, name: str) -> Path:
        """What one command said."""
        return self.folder / "logs" / f"{name}.log"

    def made(self) -> tuple[Path, ...]:
        """All that a demo makes in its folder, beside the lease that says whose it is."""
        names = ("text", "data", "runs", "logs", self.tokenizer.name, self.drill.name, self.config.name)
        return tuple(self.folder / name for name in names)


def config_text(places: Places) -> str:
    """The config: a GPT of some hundred thousand parameters, with dropout and a mixture that changes halfway."""
    phase_tokens = STEPS // 2 * _LANES * _LANE * _LENGTH
    return f"""\
# Written by `unbroken demo`. Seven lanes a step: no number of ranks above one divides them.
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
    """An environment in which a job is the demo's alone: on the CPU, with no other launcher's or scheduler's words."""
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
