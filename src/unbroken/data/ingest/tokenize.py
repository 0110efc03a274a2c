"""From a folder of text to folders of shards, resumable at every instant.

A tokenization writes a plan, tokenizes its units in any order with any number of workers, lists the shards and removes
the plan. A kill costs the units in flight. The same command again resumes, finds nothing left to do, or fails with the
differences.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unbroken.data.ingest.encoders import Encoder, ReferenceEncoder, TokenizerFile, find_tokenizer, load_encoder
from unbroken.data.ingest.fast_engine import ENGINE, EnginesDiffer, find_fast_engine, with_fast_engine
from unbroken.data.ingest.planning import new_plan, new_sources, recut, require_same_kind
from unbroken.data.ingest.publish import finish, require_present
from unbroken.data.ingest.request import TokenizeRequest
from unbroken.data.ingest.sources import SourceFiles, find_sources
from unbroken.data.ingest.tokenize_unit import UnitContext, tokenize_unit
from unbroken.data.ingest.work_folder import TokenizePlan, Totals, UnitRecord, WorkFolder
from unbroken.data.ingest.worker_pool import UnitTask, WorkerPool
from unbroken.data.packing.windows import require_bakeable
from unbroken.errors import NoTokens, TokenizeBusy
from unbroken.files import LOCAL, Files, storage_errors

Advance = Callable[[int], None]
Progress = Callable[[int], contextlib.AbstractContextManager[Advance]]
_GLANCE_S: Final = 0.05
_NO_HOLD: Final = -1
# File systems without locks: there the user must not start it twice at the same time.
_NO_LOCKS: Final = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@dataclass(frozen=True)
class TokenizeReport:
    """The result of a tokenization: totals of the shards, and what this call did."""

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
class _Resolved:
    """A request with its sources, tokenizer and work folder."""

    request: TokenizeRequest
    found: SourceFiles
    file: TokenizerFile
    encoder: Encoder
    work: WorkFolder

    @property
    def targets(self) -> tuple[str, ...]:
        """Every folder below the output that may get shards."""
        folders = dict.fromkeys(source.folder for source in self.found.sources)
        return tuple(target for folder in folders for target in self.context(self.encoder).targets(folder))

    def context(self, encoder: Encoder) -> UnitContext:
        """The settings common to all units."""
        request = self.request
        return UnitContext(
            files=self.work.files,
            input_dir=request.input_dir,
            output_dir=request.output_dir,
            options=request.options,
            encoder=encoder,
            command=request.command(),
            skip_bad=request.skip_bad,
        )


def tokenize(request: TokenizeRequest, *, progress: Progress | None = None, files: Files = LOCAL) -> TokenizeReport:
    """Tokenize a folder of documents, or resume an interrupted tokenization.

    ``progress`` is a context manager that gets the total bytes and yields a function to be called with bytes read.

    Raises:
        PathMissing: the input folder does not exist.
        NoTextFound: it holds no documents.
        NoTokens: no document has a token.
        TokenizerUnknown: there is no such tokenizer.
        NoEodToken: it has no EOD token.
        PackageMissing: the tokenizer or a format needs a package that is not installed.
        TokenizedDifferently: the existing shards were made with other options.
        ShardsExist: the output holds shards without a record.
        SourcesChanged: the documents changed since the shards were made.
        BadDocuments: documents cannot be read.
        SourceBroken: a file is truncated.
        ControlToken: text became a control token.
        DataDamaged: finished shards are missing.
        WorkerDied: a worker was killed.
        TokenizeBusy: another process tokenizes into the same folder.
        StorageFailed: an I/O error.
        ValueError: the window sizes are invalid.
    """
    if request.options.max_length is not None:
        require_bakeable(request.options.max_length, request.options.overlap_size or 0)
    file = find_tokenizer(request.tokenizer)
    asked = _Resolved(
        request=request,
        found=find_sources(request.input_dir),
        file=file,
        encoder=load_encoder(file, request.eod_token),
        work=WorkFolder(files, request.output_dir),
    )
    while (plan := _planned(asked)) is not None:
        # Only a local disk is shared with other processes.
        with _held(asked.work.plan_path, request) if files is LOCAL else contextlib.nullcontext(_NO_HOLD) as lock:
            # The previous holder may have written another plan: then it is read again.
            if lock is None or asked.work.plan() != plan:
                continue
            # A plan that was cut again is another file: it is locked again.
            if not recut(asked.work, asked.context(asked.encoder), plan, asked.found.sources, asked.work.finished()):
                return _carried_out(asked, plan, progress or _unseen, lock)
    finished = asked.work.finished()
    totals = finished.totals if finished else Totals()
    return TokenizeReport(totals, asked.found.unknown, "nothing was encoded")


def _planned(asked: _Resolved) -> TokenizePlan | None:
    """The plan, durably written; None if nothing is left to do."""
    work, request = asked.work, asked.request
    plan, finished = work.plan(), work.finished()
    kind = (request.options, asked.encoder.identity)
    for earlier in (plan, finished):
        if earlier is not None:
            require_same_kind(work.output, (earlier.options, earlier.tokenizer), kind)
    added = new_sources(
        work,
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
        require_present(work, finished, asked.targets)
        work.clear()
        return None
    plan = new_plan(work, kind, added, finished, eod_token=request.eod_token, targets=iter(asked.targets))
    command = request.command() + (" --add" if finished else "")
    # Processes on two hosts can have the same pid and share this folder.
    scratch = f".begin-{secrets.token_hex(8)}"
    work.begin(plan, tokenizer=asked.file.content, command=command, scratch=scratch)
    # Another process may have been first: its plan is used, if it matches the request.
    return _planned(asked)


def _carried_out(asked: _Resolved, plan: TokenizePlan, progress: Progress, lock: int) -> TokenizeReport:
    work = asked.work
    left = _pending(work, plan)
    with progress(sum(plan.units[number].size_bytes for number in left)) as advance:
        while pending := _pending(work, plan):
            try:
                _do(asked, plan, pending, advance, lock)
            except EnginesDiffer as difference:
                # After one wrong document the engine is not trusted: all its units are done again.
                work.drop_engine(plan, str(difference))
    records = [record for number in range(len(plan.units)) if (record := work.unit(plan, number)) is not None]
    engine = _engine_words(asked, records, work.dropped_engine(plan))
    _require_tokens(asked, records)
    finished = finish(work, plan, records, work.finished())
    shares = [share for number in left for share in records[number].shares]
    return TokenizeReport(
        totals=finished.totals,
        unknown=asked.found.unknown,
        engine=engine,
        new_tokens=sum(sum(share.tokens.values()) for share in shares),
        new_units=len(left),
        kept_units=len(plan.units) - len(left),
    )


def _require_tokens(asked: _Resolved, records: Sequence[UnitRecord]) -> None:
    """Raise if the data set would have no token; added files may have none."""
    has_tokens = any(shards for record in records for shards in record.shards.values())
    if has_tokens or asked.work.finished() is not None:
        return
    left_out: Counter[str] = Counter()
    for share in (share for record in records for share in record.shares):
        left_out.update(share.skipped)
    # The plan is removed too: the text has to change, and a plan is for one text.
    asked.work.clear()
    raise NoTokens(path=asked.request.input_dir, left_out=tuple(sorted(left_out.items())))


def _pending(work: WorkFolder, plan: TokenizePlan) -> list[int]:
    """The units to do: those without a record, and those of a dropped engine."""
    untrusted = (ENGINE,) if work.dropped_engine(plan) is not None else ()
    return [
        number
        for number in range(len(plan.units))
        if (record := work.unit(plan, number)) is None or record.engine in untrusted
    ]


def _do(asked: _Resolved, plan: TokenizePlan, pending: Sequence[int], advance: Advance, lock: int) -> None:
    work, request = asked.work, asked.request
    accelerate = request.accelerate and work.dropped_engine(plan) is None
    if not request.workers:
        context = asked.context(with_fast_engine(asked.encoder, asked.file.content) if accelerate else asked.encoder)
        for number in pending:
            work.record(plan, number, tokenize_unit(context, plan.units[number], advance))
        return
    settings = {
        "input_dir": str(request.input_dir),
        "output_dir": str(request.output_dir),
        "accelerate": accelerate,
        "command": request.command(),
        "skip_bad": request.skip_bad,
    }
    pool = WorkerPool(settings, count=request.workers, command=request.command(), inherited=(lock,))
    pool.run([UnitTask(number, str(plan.units[number])) for number in pending], advance)


def _engine_words(asked: _Resolved, records: Sequence[UnitRecord], dropped: str | None) -> str:
    content = asked.file.content
    if content is None or not isinstance(asked.encoder, ReferenceEncoder):
        return "built in"
    if not asked.request.accelerate:
        return "the reference, as requested"
    if dropped is not None:
        return f"the reference; {ENGINE} was dropped: {dropped}"
    if any(record.engine == ENGINE for record in records):
        return f"{ENGINE}, checked against the reference on samples of every shard"
    return f"the reference; {find_fast_engine(asked.encoder, content).reason}"


@contextlib.contextmanager
def _unseen(total_bytes: int) -> Iterator[Advance]:
    """No progress display."""
    yield lambda _: None


@contextlib.contextmanager
def _held(path: Path, request: TokenizeRequest) -> Iterator[int | None]:
    """Lock a plan against other processes; yields the lock, or None if another process finished it meanwhile.

    Workers inherit the lock: it is released when the last of them ends, however this process ends.
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
    # The previous holder may have removed it between our open and our lock.
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(handle)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)
