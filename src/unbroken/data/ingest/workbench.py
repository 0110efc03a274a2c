"""Tokenizer, readers and writers of a worker process: opened once, used for many units of a plan."""

import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unbroken.data.ingest.encoders import Encoder, TokenizerFile, load_encoder
from unbroken.data.ingest.fast_engine import with_fast_engine
from unbroken.data.ingest.tokenize_unit import UnitContext, UnitDone, do_unit
from unbroken.data.ingest.work_folder import TokenizePlan, WorkFolder
from unbroken.errors import ShardDamaged, TokenizeNotShared
from unbroken.files import LOCAL


@dataclass(frozen=True)
class BenchSettings:
    """The settings of a process that does units; ``attempt`` is the name of who has claimed them, ``plan`` a digest."""

    input_dir: str
    output_dir: str
    plan: str
    accelerate: bool
    command: str
    skip_bad: bool
    attempt: str

    def as_json(self) -> dict[str, Any]:
        """For another process."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "BenchSettings":
        """From another process."""
        return cls(**found)


@dataclass(frozen=True)
class Bench:
    """A plan, opened for work."""

    work: WorkFolder
    plan: TokenizePlan
    context: UnitContext
    attempt: str

    def do(self, number: int, advance: Callable[[int], None] = lambda _: None, *, attempt: str = "") -> UnitDone:
        """Tokenize a unit and record it.

        Raises:
            EnginesDiffer: the fast engine gave other ids than the reference.
            UnbrokenError: as ``tokenize_unit``.
        """
        return do_unit(self.work, self.plan, self.context, number, attempt or self.attempt, advance)


def open_bench(settings: BenchSettings) -> Bench:
    """Read the plan and its tokenizer.

    Raises:
        TokenizeNotShared: this process does not see the plan.
        TokenizerUnknown: the copy of the tokenizer is not a tokenizer.
        ShardDamaged: it differs from the tokenizer of the plan.
        StorageFailed: an I/O error.
    """
    work = WorkFolder(LOCAL, Path(settings.output_dir))
    plan = work.plan()
    if plan is None or plan.digest != settings.plan:
        raise TokenizeNotShared(output=work.output, host=socket.gethostname())
    context = UnitContext(
        files=LOCAL,
        input_dir=Path(settings.input_dir),
        output_dir=work.output,
        options=plan.options,
        encoder=_encoder_of(work, plan, accelerate=settings.accelerate),
        command=settings.command,
        skip_bad=settings.skip_bad,
    )
    return Bench(work, plan, context, settings.attempt)


def _encoder_of(work: WorkFolder, plan: TokenizePlan, *, accelerate: bool) -> Encoder:
    """The encoder of a plan, with the fast engine if wanted and available."""
    path = work.tokenizer_path(plan)
    content = None
    if work.files.find(path) is not None:
        content = work.files.read_bytes(path, limit_bytes=1 << 30)
    encoder = load_encoder(TokenizerFile(plan.tokenizer.name, content), plan.eod_token)
    if encoder.identity.digest != plan.tokenizer.digest:
        raise ShardDamaged(path=path, complaint="it is not the tokenizer of this tokenization")
    return with_fast_engine(encoder, content) if accelerate else encoder
