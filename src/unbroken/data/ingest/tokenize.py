"""From a folder of text to folders of shards, resumable at every instant, by any number of processes at once.

A tokenization writes a plan, tokenizes its units in any order with any number of processes and workers, names and lists
the shards and removes the plan. A kill costs the units in flight. The same command again takes part, resumes, finds
nothing left to do, or fails with the differences.
"""

import contextlib
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from unbroken.data.ingest.claims import Claims, Participant, PlanChanged, Say, joined, this_participant
from unbroken.data.ingest.encoders import Encoder, ReferenceEncoder, TokenizerFile, find_tokenizer, load_encoder
from unbroken.data.ingest.fast_engine import ENGINE, EnginesDiffer, find_fast_engine, with_fast_engine
from unbroken.data.ingest.planning import change_plan, new_plan, new_sources, recut, require_same_kind
from unbroken.data.ingest.publish import end, finish, name_shards, require_present
from unbroken.data.ingest.request import TokenizeRequest
from unbroken.data.ingest.sources import SourceFiles, find_sources
from unbroken.data.ingest.tokenize_unit import UnitContext, UnitDone, do_unit
from unbroken.data.ingest.work_folder import Finished, TokenizePlan, Totals, UnitRecord, WorkFolder
from unbroken.data.ingest.workbench import BenchSettings
from unbroken.data.ingest.worker_pool import Done, Take, UnitTask, WorkerPool
from unbroken.data.packing.windows import require_bakeable
from unbroken.errors import DataDamaged, NoTokens, StorageFailed, TokenizeBusy, UnbrokenError
from unbroken.files import LOCAL, Files

Advance = Callable[[int], None]
Progress = Callable[[int], contextlib.AbstractContextManager[Advance]]
# A shard that is missing again after its unit was done again: something removes files.
_MOST_REPAIRS: Final = 3


class UnitPool(Protocol):
    """Where the units are tokenized: processes of this machine, or an engine on many."""

    def run(self, take: Take, advance: Advance, done: Done) -> None:
        """Tokenize units until ``take`` gives none; ``done`` is told each."""


NewPool = Callable[[BenchSettings], UnitPool]


@dataclass(frozen=True)
class TokenizeReport:
    """The result of a tokenization: totals of the shards, and what this call did.

    Attributes:
        totals: documents, tokens, shards and bytes of the whole folder.
        unknown: files in the input folder that no format claims.
        engine: the tokenizer engine that was used.
        new_tokens: tokens that this call added.
        new_units: units that this process did.
        other_units: units that other processes did meanwhile.
        kept_units: units that were done before.
    """

    totals: Totals
    unknown: tuple[str, ...]
    engine: str
    new_tokens: int = 0
    new_units: int = 0
    other_units: int = 0
    kept_units: int = 0

    @property
    def is_new(self) -> bool:
        """Whether there was anything to do."""
        return self.new_units + self.other_units + self.kept_units > 0


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


@dataclass
class _Tally:
    """What this process has done, over all plans it took part in."""

    units: int = 0
    kept: int | None = None
    mine: set[int] = field(default_factory=set)
    tokens: int = 0
    engines: set[str] = field(default_factory=set)
    dropped: str | None = None
    guard: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, plan: TokenizePlan, pending: int) -> None:
        """Note how much is left when this process joins."""
        self.units, self.dropped = len(plan.units), plan.engine_dropped
        self.mine.clear()
        self.kept = self.units - pending if self.kept is None else min(self.kept, self.units - pending)

    def done(self, unit: UnitDone) -> None:
        """Count a unit of this process."""
        with self.guard:
            if unit.counts:
                self.mine.add(unit.number)
                self.tokens += unit.tokens
                self.engines.add(unit.engine)

    def report(self, asked: _Resolved, totals: Totals) -> TokenizeReport:
        """The report of this process."""
        kept = self.kept or 0
        others = max(0, self.units - kept - len(self.mine))
        engine = _engine_words(asked, self) if self.mine or self.dropped else "nothing was encoded"
        return TokenizeReport(totals, asked.found.unknown, engine, self.tokens, len(self.mine), others, kept)


def tokenize(
    request: TokenizeRequest,
    *,
    progress: Progress | None = None,
    files: Files = LOCAL,
    who: Participant | None = None,
    new_pool: NewPool | None = None,
    say: Say = lambda _: None,
) -> TokenizeReport:
    """Tokenize a folder of documents, resume an interrupted tokenization, or take part in one in progress.

    ``progress`` is a context manager that gets the total bytes and yields a function to be called with bytes read;
    ``say`` gets the few sentences for a person who waits.

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
        TokenizeBusy: other processes tokenize an earlier state of the text.
        TokenizeNotShared: a worker does not see the output folder.
        StorageFailed: an I/O error.
        ValueError: the window sizes are invalid.
    """
    if request.options.max_length is not None:
        require_bakeable(request.options.max_length, request.options.overlap_size or 0)
    file = find_tokenizer(request.tokenizer)
    encoder = load_encoder(file, request.eod_token)
    work = WorkFolder(files, request.output_dir)
    who = who or this_participant()
    tally = _Tally()
    while True:
        asked = _Resolved(request, find_sources(request.input_dir), file, encoder, work)
        plan = _planned(asked)
        if plan is None:
            finished = work.finished()
            return tally.report(asked, finished.totals if finished else Totals())
        # Another process may finish or replace the plan at any moment: then the records are read again.
        with contextlib.suppress(PlanChanged), joined(work, plan, who, say) as claims:
            finished = _taken_part(
                _Part(asked, plan, claims, tally, new_pool or _pool_of(request)), progress or _unseen
            )
            return tally.report(asked, finished.totals)


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
        work.tidy()
        return None
    plan = new_plan(work, kind, added, finished, eod_token=request.eod_token, targets=iter(asked.targets))
    command = request.command() + (" --add" if finished else "")
    # Processes on two hosts can have the same pid and share this folder.
    scratch = f".begin-{secrets.token_hex(8)}"
    try:
        work.begin(plan, tokenizer=asked.file.content, command=command, scratch=scratch)
    except StorageFailed:
        # Another process may have come and gone meanwhile, with the work folder.
        if work.finished() == finished:
            raise
    # Another process may have been first: its plan is used, if it matches the request.
    return _planned(asked)


@dataclass(frozen=True)
class _Part:
    """The part of this process in a plan."""

    asked: _Resolved
    plan: TokenizePlan
    claims: Claims
    tally: _Tally
    new_pool: NewPool | None

    def do(self, numbers: Callable[[], int | None], advance: Advance) -> None:
        """Tokenize units until there is no other.

        Raises:
            PlanChanged: the plan was replaced, because the fast engine differs.
            UnbrokenError: a unit cannot be done.
        """
        asked, plan = self.asked, self.plan
        accelerate = asked.request.accelerate and plan.engine_dropped is None
        try:
            if self.new_pool is None:
                encoder = with_fast_engine(asked.encoder, asked.file.content) if accelerate else asked.encoder
                context = asked.context(encoder)
                while (number := numbers()) is not None:
                    self.tally.done(do_unit(asked.work, plan, context, number, self.claims.name, advance))
                return

            def take() -> UnitTask | None:
                number = numbers()
                if number is None:
                    return None
                return UnitTask(number, str(plan.units[number]), plan.units[number].size_bytes)

            self.new_pool(self._settings(accelerate)).run(take, advance, self.tally.done)
        except EnginesDiffer as difference:
            self.drop_engine(str(difference))

    def _settings(self, accelerate: bool) -> BenchSettings:
        request = self.asked.request
        return BenchSettings(
            input_dir=str(request.input_dir),
            output_dir=str(request.output_dir),
            plan=self.plan.digest,
            accelerate=accelerate,
            command=request.command(),
            skip_bad=request.skip_bad,
            attempt=self.claims.name,
        )

    def drop_engine(self, reason: str) -> None:
        """Go on without the fast engine.

        After one wrong document it is not trusted: all its units are done again.

        Raises:
            PlanChanged: always; the plan is another one now.
        """
        self.change_plan(replace(self.plan, engine_dropped=reason))

    def change_plan(self, new: TokenizePlan) -> None:
        """Replace the plan.

        Raises:
            PlanChanged: always; the plan is another one now.
        """
        self.claims.require_current()
        change_plan(self.asked.work, self.plan, new, by=self.claims.name)
        raise PlanChanged


def _taken_part(part: _Part, progress: Progress) -> Finished:
    """Do units until all are done, by whomever, and finish.

    Raises:
        PlanChanged: another process has finished or replaced the plan.
        UnbrokenError: a unit cannot be done.
    """
    asked, plan, claims = part.asked, part.plan, part.claims
    before = asked.work.finished()
    is_over = before is not None and all(source.name in before.sources for source in plan.sources)
    try:
        if not is_over:
            _work(part, progress)
        claims.take_finish()
        records = [] if is_over else _sound_records(part)
    except UnbrokenError:
        # The work folder may have been removed under this process, because all is done.
        claims.require_plan()
        raise
    if not is_over:
        _require_tokens(asked, records)
    fence = claims.require_current
    try:
        if before is not None and is_over:
            # Killed between the final record and the removal of the plan.
            end(asked.work, asked.targets, fence=fence)
            return before
        return finish(asked.work, plan, records, before, asked.targets, by=claims.name, fence=fence)
    except StorageFailed:
        fence()
        raise


def _work(part: _Part, progress: Progress) -> None:
    """Do units, and wait for those of other processes, until every unit has a record.

    Raises:
        PlanChanged: another process has finished or replaced the plan.
        UnbrokenError: a unit cannot be done.
    """
    plan, claims = part.plan, part.claims
    _require_up_to_date(part)
    part.tally.begin(plan, len(claims.pending))
    with progress(sum(plan.units[number].size_bytes for number in claims.pending)) as advance:
        while True:
            for number in claims.news():
                advance(plan.units[number].size_bytes)
            if not claims.pending:
                return
            if (first := claims.take()) is not None:
                part.do(_given([first], claims.take), advance)
            else:
                claims.wait()


def _require_up_to_date(part: _Part) -> None:
    """Replace a plan whose files were repaired since.

    Raises:
        PlanChanged: it was replaced.
        TokenizeBusy: other processes work at it.
    """
    asked, plan = part.asked, part.plan
    new = recut(plan, asked.found.sources, asked.work.finished())
    if new != plan:
        if part.claims.others_alive(asked.request.patience_seconds):
            raise TokenizeBusy(output=asked.request.output_dir)
        part.change_plan(new)


def _given(numbers: Iterable[int], then: Callable[[], int | None] = lambda: None) -> Callable[[], int | None]:
    """Give some numbers, one per call from any thread, then what ``then`` gives."""
    waiting = deque(numbers)

    def give() -> int | None:
        try:
            return waiting.popleft()
        except IndexError:
            return then()

    return give


def _sound_records(part: _Part) -> list[UnitRecord]:
    """The records of all units, their shards under their names; a unit that was damaged since is done again.

    Raises:
        DataDamaged: something removes shards as they are made.
        UnbrokenError: a unit cannot be done again.
    """
    work, plan = part.asked.work, part.plan
    lost: list[int] = []
    for _ in range(_MOST_REPAIRS):
        found = [work.unit(plan, number) for number in range(len(plan.units))]
        records = [record for record in found if record is not None]
        part.claims.require_current()
        lost = [number for number, record in enumerate(found) if record is None] or name_shards(work, records)
        if not lost:
            return records
        for number in lost:
            work.forget(plan, number)
        part.do(_given(lost), lambda _: None)
    findings = tuple(f"{plan.units[number]}: its shards are missing again" for number in lost)
    raise DataDamaged(path=work.output, findings=findings)


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


def _pool_of(request: TokenizeRequest) -> NewPool | None:
    if not request.num_workers:
        return None
    return lambda settings: WorkerPool(settings.as_json(), count=request.num_workers, command=request.command())


def _engine_words(asked: _Resolved, tally: _Tally) -> str:
    content = asked.file.content
    if content is None or not isinstance(asked.encoder, ReferenceEncoder):
        return "built in"
    if not asked.request.accelerate:
        return "the reference, as requested"
    if tally.dropped is not None:
        return f"the reference; {ENGINE} was dropped: {tally.dropped}"
    if ENGINE in tally.engines:
        return f"{ENGINE}, checked against the reference on samples of every shard"
    return f"the reference; {find_fast_engine(asked.encoder, content).reason}"


@contextlib.contextmanager
def _unseen(total_bytes: int) -> Iterator[Advance]:
    """No progress display."""
    yield lambda _: None
