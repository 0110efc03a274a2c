"""Tokenize as tasks of an engine: Dask, or whatever else has the interface of ``concurrent.futures.Executor``.

The process that calls takes part in the tokenization like any other (``claims.py``): it claims units, and each unit is
one task. The engine decides where a task runs, and runs it again elsewhere if its worker dies. A task that runs twice,
even at the same time, is harmless. Why this interface and which engines: docs/decisions/026.
"""

import secrets
import threading
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import asdict, dataclass, replace
from typing import Final

from unbroken.data.ingest.claims import Say
from unbroken.data.ingest.fast_engine import EnginesDiffer
from unbroken.data.ingest.request import TokenizeRequest
from unbroken.data.ingest.tokenize import Advance, Progress, TokenizeReport, tokenize
from unbroken.data.ingest.tokenize_unit import UnitDone
from unbroken.data.ingest.workbench import Bench, BenchSettings, open_bench
from unbroken.data.ingest.worker_pool import Done, Message, Take, UnitTask, done_from_json, error_to_json
from unbroken.errors import UnbrokenError

# Enough for some hundred workers, and few enough that other processes find units to claim.
_IN_FLIGHT: Final = 512


def tokenize_with(
    executor: Executor,
    request: TokenizeRequest,
    *,
    in_flight: int = _IN_FLIGHT,
    progress: Progress | None = None,
    say: Say = lambda _: None,
) -> TokenizeReport:
    """Tokenize with the workers of an engine, each unit a task; the files are those of ``unbroken tokenize``.

    With Dask, ``executor`` is ``client.get_executor(pure=False)``. Input and output must be on storage that all workers
    share, under the same paths.

    Args:
        executor: where the tasks run.
        request: what to tokenize; its ``num_workers`` is not used.
        in_flight: the most tasks at a time.
        progress: as for ``tokenize``.
        say: as for ``tokenize``.

    Raises:
        UnbrokenError: as ``tokenize``. Errors of the engine itself are raised as they are.
    """
    request = replace(request, input_dir=request.input_dir.absolute(), output_dir=request.output_dir.absolute())

    def new_pool(settings: BenchSettings) -> _EnginePool:
        return _EnginePool(executor, settings.as_json(), in_flight)

    return tokenize(request, progress=progress, new_pool=new_pool, say=say)


@dataclass(frozen=True)
class _EnginePool:
    """An engine as a pool of workers for units."""

    executor: Executor
    settings: Message
    in_flight: int

    def run(self, take: Take, advance: Advance, done: Done) -> None:
        """Tokenize units until ``take`` gives none.

        Raises:
            EnginesDiffer: the fast engine gave other ids than the reference.
            UnbrokenError: an error of a worker.
        """
        waiting: dict[Future[Message], UnitTask] = {}
        try:
            while True:
                while len(waiting) < self.in_flight and (task := take()) is not None:
                    waiting[self.executor.submit(do_in_engine, self.settings, task.number)] = task
                if not waiting:
                    return
                finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in finished:
                    task = waiting.pop(future)
                    done(done_from_json(future.result()))
                    advance(task.size_bytes)
        finally:
            for future in waiting:
                future.cancel()


_of_thread: Final = threading.local()


def do_in_engine(settings: Message, number: int) -> Message:
    """One task: tokenize a unit and record it; the answer is as that of a worker process."""
    try:
        bench = _bench(BenchSettings.from_json(settings))
        return {"done": asdict(_done_before(bench, number) or bench.do(number, attempt=_new_attempt(bench)))}
    except EnginesDiffer as difference:
        return {"differ": str(difference)}
    except UnbrokenError as error:
        return {"error": error_to_json(error)}


def _new_attempt(bench: Bench) -> str:
    # The engine may run a task twice at the same time, if it takes a worker for dead.
    return f"{bench.attempt}-{secrets.token_hex(4)}"


def _done_before(bench: Bench, number: int) -> UnitDone | None:
    """What an earlier run of the same task has done, whose worker died before it could tell."""
    record = bench.work.unit(bench.plan, number)
    if record is None:
        return None
    return UnitDone(number, record.tokens, record.engine, record.attempt.startswith(f"{bench.attempt}-"))


def _bench(settings: BenchSettings) -> Bench:
    """The plan and its tokenizer, opened once per thread: whether an encoder may be shared is up to its library."""
    kept: tuple[BenchSettings, Bench] | None = getattr(_of_thread, "kept", None)
    if kept is None or kept[0] != settings:
        kept = settings, open_bench(settings)
        _of_thread.kept = kept
    return kept[1]
