"""From a folder of text to folders of shards, resumable at every instant.

A tokenization is begun (a plan is put down), its units are done in any order by any number of workers, and it is
finished (shards are listed, the plan goes). A kill costs the units in flight. The same command goes on, says that
nothing is left to do, or refuses, naming what is different.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from unbroken.data.ingest.accelerate import ENGINE, EnginesDiffer, accelerated, faster
from unbroken.data.ingest.begin import new_plan, new_sources, recut, require_same_kind
from unbroken.data.ingest.encoders import Encoder, ReferenceEncoder, TokenizerFile, find_tokenizer, load_encoder
from unbroken.data.ingest.finish import finish, require_present
from unbroken.data.ingest.sources import Found, find_sources
from unbroken.data.ingest.unit_work import Terms, do_unit
from unbroken.data.ingest.workbench import Options, Plan, Totals, UnitRecord, Workbench
from unbroken.data.ingest.workers import Crew, Job
from unbroken.data.packing.windows import require_bakeable
from unbroken.errors import NoTokens, TokenizeBusy
from unbroken.errors.tree import quoted
from unbroken.files import LOCAL, Files, storage_errors

Advance = Callable[[int], None]
Progress = Callable[[int], contextlib.AbstractContextManager[Advance]]
PATIENCE_S: Final = 10.0
_GLANCE_S: Final = 0.05
_DEFAULTS: Final = Options()
_NO_HOLD: Final = -1
# File systems that know no locks: there people must not start it twice at the same time.
_NO_LOCKS: Final = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@dataclass(frozen=True)
class Request:
    """What is to be tokenized, into what, how.

    Attributes:
        workers: how many processes; 0 does the work in this one.
        accelerate: use a faster engine where there is one.
        skip_bad: count documents that cannot be read instead of refusing them.
        add: tokenize files that came after the shards were finished.
        patience_s: how long to wait for another process that tokenizes into the same folder.
    """

    input_dir: Path
    output_dir: Path
    tokenizer: str
    options: Options = _DEFAULTS
    eod_token: str | None = None
    workers: int = 0
    accelerate: bool = True
    skip_bad: bool = False
    add: bool = False
    patience_s: float = PATIENCE_S

    def command(self) -> str:
        """The command line that asks for the same shards."""
        told = {
            "input-dir": self.input_dir,
            "output-dir": self.output_dir,
            "tokenizer-path": self.tokenizer,
            "eod-token": self.eod_token,
        }
        told |= {
            each.name.replace("_", "-"): getattr(self.options, each.name)
            for each in fields(Options)
            if getattr(self.options, each.name) != getattr(_DEFAULTS, each.name)
        }
        words = [f"--{name} {quoted(str(value))}" for name, value in told.items() if value is not None]
        words += ["--bake-windows"] if self.options.max_length else []
        words += ["--probabilistic-overlap"] if self.options.overlap_probability else []
        return " ".join(["unbroken tokenize", *words])


@dataclass(frozen=True)
class Report:
    """How a tokenization ended: what is in the shards now, and what this start of it did."""

    totals: Totals
    unknown: tuple[str, ...]
    engine: str
    new_tokens: int = 0
    new_units: int = 0
    kept_units: int = 0

    @property
    def is_new(self) -> bool:
        """Whether there was anything to do."""
        return self.new_units + self.kept_units > 0


@dataclass(frozen=True)
class _Asked:
    """A request with what it names looked up."""

    request: Request
    found: Found
    file: TokenizerFile
    encoder: Encoder
    bench: Workbench

    @property
    def targets(self) -> tuple[str, ...]:
        """Every folder below the output that shards may go to."""
        folders = dict.fromkeys(source.folder for source in self.found.sources)
        return tuple(target for folder in folders for target in self.terms(self.encoder).targets(folder))

    def terms(self, encoder: Encoder) -> Terms:
        """What all units have in common."""
        request = self.request
        return Terms(
            files=self.bench.files,
            input_dir=request.input_dir,
            output_dir=request.output_dir,
            options=request.options,
            encoder=encoder,
            command=request.command(),
            skip_bad=request.skip_bad,
        )


def tokenize(request: Request, *, progress: Progress | None = None, files: Files = LOCAL) -> Report:
    """Tokenize a folder of documents, or go on where an earlier start was cut short.

    ``progress`` is given the bytes there are to read and yields what is told the bytes that were read.

    Raises:
        PathMissing: there is no input folder.
        NoTextFound: it holds nothing to read.
        NoTokens: it was read, and no document has a token.
        TokenizerUnknown: there is no such tokenizer.
        NoEodToken: it has no token that ends a document.
        PackageMissing: the tokenizer or a format needs a package that is not installed.
        TokenizedDifferently: shards here were made with other options.
        ShardsExist: shards here are not recorded.
        SourcesChanged: the documents are not those that the shards were made from.
        BadDocuments: documents cannot be read.
        SourceBroken: a file ends too early.
        ControlToken: text became a control token.
        DataDamaged: shards that were finished are not there any more.
        WorkerDied: a worker was killed.
        TokenizeBusy: another process is at it.
        StorageFailed: the system refused.
        ValueError: windows that cannot be cut or written.
    """
    if request.options.max_length is not None:
        require_bakeable(request.options.max_length, request.options.overlap_size or 0)
    file = find_tokenizer(request.tokenizer)
    asked = _Asked(
        request=request,
        found=find_sources(request.input_dir),
        file=file,
        encoder=load_encoder(file, request.eod_token),
        bench=Workbench(files, request.output_dir),
    )
    while (plan := _planned(asked)) is not None:
        # Only the machine's own disk is shared with other processes.
        with _held(asked.bench.plan_path, request) if files is LOCAL else contextlib.nullcontext(_NO_HOLD) as lock:
            # Whoever held it before may have put another plan there: then it is looked at anew.
            if lock is None or asked.bench.plan() != plan:
                continue
            # A plan that was cut anew is another file: it is held anew.
            if not recut(asked.bench, asked.terms(asked.encoder), plan, asked.found.sources, asked.bench.finished()):
                return _carried_out(asked, plan, progress or _unseen, lock)
    finished = asked.bench.finished()
    totals = finished.totals if finished else Totals()
    return Report(totals, asked.found.unknown, "nothing was encoded")


def _planned(asked: _Asked) -> Plan | None:
    """What is to be done, put down durably; None if nothing is left to do."""
    bench, request = asked.bench, asked.request
    plan, finished = bench.plan(), bench.finished()
    kind = (request.options, asked.encoder.identity)
    for earlier in (plan, finished):
        if earlier is not None:
            require_same_kind(bench.output, (earlier.options, earlier.tokenizer), kind)
    added = new_sources(
        bench,
        request.input_dir,
        asked.found.sources,
        finished=finished,
        plan=plan,
        may_add=request.add,
        command=request.command(),
    )
    if plan is not None:
        return plan
    if finished is not None and not added:
        require_present(bench, finished, asked.targets)
        bench.clear()
        return None
    plan = new_plan(bench, kind, added, finished, eod_token=request.eod_token, targets=iter(asked.targets))
    command = request.command() + (" --add" if finished else "")
    # Processes on two hosts can have one number, and share this folder.
    scratch = f".begin-{secrets.token_hex(8)}"
    bench.begin(plan, tokenizer=asked.file.content, command=command, scratch=scratch)
    # Another process may have been first: what stands there is what is done, if it is what was asked for.
    return _planned(asked)


def _carried_out(asked: _Asked, plan: Plan, progress: Progress, lock: int) -> Report:
    bench = asked.bench
    left = _pending(bench, plan)
    with progress(sum(plan.units[number].size_bytes for number in left)) as advance:
        while pending := _pending(bench, plan):
            try:
                _do(asked, plan, pending, advance, lock)
            except EnginesDiffer as difference:
                # One wrong document, and nothing this engine gave is trusted: all its units are done again.
                bench.drop_engine(plan, str(difference))
    records = [record for number in range(len(plan.units)) if (record := bench.unit(plan, number)) is not None]
    engine = _engine_words(asked, records, bench.dropped_engine(plan))
    _require_tokens(asked, records)
    finished = finish(bench, plan, records, bench.finished())
    shares = [share for number in left for share in records[number].shares]
    return Report(
        totals=finished.totals,
        unknown=asked.found.unknown,
        engine=engine,
        new_tokens=sum(sum(share.tokens.values()) for share in shares),
        new_units=len(left),
        kept_units=len(plan.units) - len(left),
    )


def _require_tokens(asked: _Asked, records: Sequence[UnitRecord]) -> None:
    """Refuse to finish a data set without a token; one that has some may be given files that add none."""
    has_tokens = any(shards for record in records for shards in record.shards.values())
    if has_tokens or asked.bench.finished() is not None:
        return
    left_out: Counter[str] = Counter()
    for share in (share for record in records for share in record.shares):
        left_out.update(share.skipped)
    # The plan goes too: the text is to change, and a plan is of one text.
    asked.bench.clear()
    raise NoTokens(path=asked.request.input_dir, left_out=tuple(sorted(left_out.items())))


def _pending(bench: Workbench, plan: Plan) -> list[int]:
    """The units that are to be done: those without a record, and what a dropped engine made."""
    untrusted = (ENGINE,) if bench.dropped_engine(plan) is not None else ()
    return [
        number
        for number in range(len(plan.units))
        if (record := bench.unit(plan, number)) is None or record.engine in untrusted
    ]


def _do(asked: _Asked, plan: Plan, pending: Sequence[int], advance: Advance, lock: int) -> None:
    bench, request = asked.bench, asked.request
    accelerate = request.accelerate and bench.dropped_engine(plan) is None
    if not request.workers:
        terms = asked.terms(faster(asked.encoder, asked.file.content) if accelerate else asked.encoder)
        for number in pending:
            bench.record(plan, number, do_unit(terms, plan.units[number], advance))
        return
    told_first = {
        "input_dir": str(request.input_dir),
        "output_dir": str(request.output_dir),
        "accelerate": accelerate,
        "command": request.command(),
        "skip_bad": request.skip_bad,
    }
    crew = Crew(told_first, count=request.workers, command=request.command(), inherited=(lock,))
    crew.run([Job(number, str(plan.units[number])) for number in pending], advance)


def _engine_words(asked: _Asked, records: Sequence[UnitRecord], dropped: str | None) -> str:
    content = asked.file.content
    if content is None or not isinstance(asked.encoder, ReferenceEncoder):
        return "built in"
    if not asked.request.accelerate:
        return "the reference, as asked"
    if dropped is not None:
        return f"the reference; {ENGINE} was dropped: {dropped}"
    if any(record.engine == ENGINE for record in records):
        return f"{ENGINE}, compared with the reference on samples of every shard"
    return f"the reference; {accelerated(asked.encoder, content).reason}"


@contextlib.contextmanager
def _unseen(total_bytes: int) -> Iterator[Advance]:
    """Nobody is looking."""
    yield lambda _: None


@contextlib.contextmanager
def _held(path: Path, request: Request) -> Iterator[int | None]:
    """Hold a plan against other processes; yields what holds it, or None if somebody finished it meanwhile.

    Workers inherit the hold: it ends with the last of them, however this process ends.
    """
    give_up_at = time.monotonic() + request.patience_s
    while path.exists():
        with storage_errors("open", path):
            file = path.open("rb")
        with file:
            is_mine = _lock(file.fileno(), path)
            if is_mine and _is_same(file.fileno(), path):
                yield file.fileno()
                return
        if not is_mine and time.monotonic() > give_up_at:
            raise TokenizeBusy(output=request.output_dir)
        time.sleep(_GLANCE_S)
    yield None


def _lock(handle: int, path: Path) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as refusal:
        if refusal.errno in _NO_LOCKS:
            return True
        with storage_errors("lock", path):
            raise
    return True


def _is_same(handle: int, path: Path) -> bool:
    # Whoever held it before may have taken it away between our open and our lock.
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(handle)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)
