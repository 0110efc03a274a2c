"""Saving beside the training loop: a short stop to take the state, and a thread for everything slow.

At the step's edge the state is captured, fingerprinted and copied to host memory; one process without a GPU takes a
checksum there and the fingerprints of the copies later. Writing, digesting, syncing and committing happen in a thread
over a group of its own. At most one save is in flight. A save that fails is reported
at the end of the next step, leaves the last commit intact and lets training continue.
"""

import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from unbroken.errors import Bug, InternalError, PeerLost, RankFailed, UnbrokenError, WrittenDuringSave
from unbroken.quoting.log import logger
from unbroken.records.process import is_without_threads
from unbroken.state import payload
from unbroken.state.capture import Captured, capture
from unbroken.state.description import Describer
from unbroken.state.destination import Destination, LocalDestination
from unbroken.state.encode import Json
from unbroken.state.fingerprint import CountedBelow, combine, fingerprints
from unbroken.state.host_memory import asking_for_memory
from unbroken.state.items import Item, ModuleItem, OptimizerItem, State, present
from unbroken.state.naming import is_flat_sharded, parameter_names
from unbroken.state.pieces import copies_of, local_tensors
from unbroken.state.planners import DEFAULT, SavePlanner
from unbroken.state.stage import (
    Buffers,
    Staged,
    described_by,
    require_as_copied,
    require_as_fingerprinted,
    stage,
    staged_sums,
)
from unbroken.state.trainer_state import TRAINER_STATE, TrainerState, encode_counters, encode_rank, rank_part
from unbroken.store.commit import PartWriter, Record
from unbroken.store.directory import Store
from unbroken.store.keep import Policy
from unbroken.store.manifest import Part, Tensor
from unbroken.store.names import Begun, DraftName
from unbroken.world import World

_log = logger(__name__)


@dataclass(frozen=True)
class Request:
    """What is to be saved, beside the items' state.

    ``account`` is called by the first rank in the save thread, where it may take time: what the data has served.
    """

    step: int
    kind: str
    counters: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    account: Callable[[], Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Saved:
    """How a save ended; ``error`` is None and ``name`` is set if it was committed."""

    request: Request
    name: str | None
    size_bytes: int
    paused_s: float
    total_s: float
    removed: tuple[str, ...] = ()
    error: UnbrokenError | None = None
    account: Mapping[str, Any] | None = None
    held: tuple[str, ...] = ()


@dataclass(frozen=True)
class SaveContext:
    """The run that a saver saves: its store, its job, its policies.

    ``elsewhere`` is where the saves go if not to the store.
    """

    store: Store
    job: str
    policies: tuple[Policy, ...] = ()
    resume_target: str | None = None
    fence: Callable[[], None] | None = None
    is_live: Callable[[DraftName], bool] = lambda draft: True
    files_per_rank: int | None = None
    on_commit: Callable[[], None] = lambda: None
    planner: SavePlanner = DEFAULT
    elsewhere: Destination | None = None
    away: Callable[[], Collection[str]] = tuple

    @property
    def destination(self) -> Destination:
        """Where the saves go."""
        if self.elsewhere is not None:
            return self.elsewhere
        return LocalDestination(
            self.store, self.job, self.policies, self.resume_target, self.fence, self.is_live, self.away
        )


class Saver:
    """Saves the items of one run; made once per job, on every rank."""

    def __init__(
        self,
        items: Sequence[Item],
        world: World,
        context: SaveContext,
        *,
        allow_pickle: Collection[str] = (),
        shares_rng: bool = False,
        hyperparameters: Mapping[str, str] | None = None,
    ) -> None:
        self._items = list(items)
        self._world = world
        self._beside = world.beside()
        self._context, self._destination = context, context.destination
        self._allow_pickle = frozenset(allow_pickle)
        self._shares_generators = shares_rng
        self._hyperparameters = hyperparameters
        self._buffers = Buffers()
        self._plan: payload.SavePlan | None = None
        # On rank 0, which alone asks the planner: whether it has learned that another plan is better.
        self._plans_anew = False
        # What the ranks found out about each other's boxes; true as long as the plan is.
        self._counted_below = CountedBelow()
        # On rank 0: what the last save said of the places of all pieces.
        self._describer = Describer()
        self._thread: threading.Thread | None = None
        self._ended: Saved | None = None
        self._is_committing = False
        # Set once weights were written during a copy: from then on nothing is copied beside the next step.
        self._copies_at_once = False

    def prepare(self, *, most_bytes: int | None = None, has_stepped: bool = False) -> None:
        """Make the host memory for the first save ready beside the first steps, so that it need not wait for it.

        ``most_bytes`` bounds it; the first save makes what is left. Without a GPU it is made after the first step:
        before, gradients and optimizer state are still to come into the same memory, and what is taken from them could
        get the job killed.
        """
        size_bytes, device = expected_bytes(self._items, self._world.size)
        if most_bytes is not None:
            size_bytes = min(size_bytes, most_bytes)
        if (device is not None or has_stepped) and size_bytes >= _WORTH_PREPARING_BYTES:
            self._buffers.prepare(size_bytes, device)

    def start(self, request: Request, rng: Callable[[], State]) -> None:
        """Take the state now and save it behind; waits for a save that is still in flight. Collective.

        A state that cannot be taken now, because a value has come to need pickle or there is no memory for the copies,
        is a save that failed, on every rank; ``collect`` returns it.

        Raises:
            PeerLost: another rank is gone.
            Exception: an object's own error, a broken device, a bug: nothing that the next save could do better.
        """
        began = time.monotonic()
        self.wait()
        self._ended = self._thread = None
        try:
            self._thread = self._take(request, rng, began)
        except UnbrokenError as refused:
            if not _ends_the_save_only(refused):
                raise
            paused_s = time.monotonic() - began
            self._ended = Saved(request, None, 0, paused_s, paused_s, error=refused)

    def _take(self, request: Request, rng: Callable[[], State], began: float) -> threading.Thread | None:
        # On all ranks or on none, as everything that one rank alone may fail at.
        counters = self._world.all_or_none(lambda: encode_counters(request.counters))
        items = present(self._items)
        found = capture(
            items,
            rng,
            self._world,
            allow_pickle=self._allow_pickle,
            shares_rng=self._shares_generators,
        )
        planner, is_stale = self._context.planner, self._plans_anew
        plan = payload.plan_save(found.tensors, self._world, self._plan, planner=planner, is_stale=is_stale)
        if plan is not self._plan:
            self._plan, self._counted_below = plan, CountedBelow()
        is_checked = _is_alone_in_host_memory(self._world, found.tensors)
        described = None if is_checked else self._described(found, plan)
        inbox: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        copies: list[Staged] = []

        def begin_mine() -> threading.Thread:
            thread = threading.Thread(target=self._run, args=(inbox,), name="unbroken-save", daemon=True)
            if not is_without_threads():
                with asking_for_memory():
                    thread.start()
            # What is in host memory is copied before the loop continues.
            is_at_once = self._copies_at_once or is_checked
            until_step = () if is_at_once else changed_by_steps(self._items, found.tensors)
            copies.append(stage(plan, found.tensors, self._buffers, until_step=until_step, is_checked=is_checked))
            copies[0].guard([item.optimizer for item in self._items if isinstance(item, OptimizerItem)])
            return thread

        try:
            # The thread of a rank that has no copies would be waited for by all the others.
            thread = self._world.all_or_none(begin_mine)
        except BaseException:
            inbox.put(None)
            for staged in copies:
                # Nobody will write it: the next save needs the buffers.
                staged.release()
            raise
        paused_s = time.monotonic() - began
        sums = torch.zeros(len(plan.tensors), 2, dtype=torch.int64, device="cpu")
        inbox.put(_Work(request, items, counters, found, plan, copies[0], described, sums, began, paused_s))
        if is_without_threads():
            self._run(inbox)
            return None
        return thread

    def _described(self, found: Captured, plan: payload.SavePlan) -> dict[str, Tensor]:
        prints = fingerprints(found.tensors, self._world, own=found.own, below=self._counted_below)
        return {name: Tensor(planned.dtype, planned.shape, prints[name]) for name, planned in plan.tensors.items()}

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is in flight, at most so long."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    @property
    def is_committing(self) -> bool:
        """Whether this rank is making the checkpoint real, for which it needs no other rank any more."""
        return self._is_committing

    def collect(self) -> Saved | None:
        """How the last save ended, once; None while it runs and after it was collected."""
        if self._thread is not None and self._thread.is_alive():
            return None
        ended, self._ended, self._thread = self._ended, None, None
        return ended

    def close(self) -> None:
        """Give back the group, the buffers and the hooks; a save that is still in flight does so when it ends."""
        if self._thread is not None and self._thread.is_alive():
            threading.Thread(
                target=self._close_after, args=(self._thread,), name="unbroken-save-end", daemon=True
            ).start()
        else:
            self._give_back()

    def _close_after(self, thread: threading.Thread) -> None:
        thread.join()
        self._give_back()

    def _give_back(self) -> None:
        if self._beside is not self._world:
            self._beside.close()
        self._buffers.close()
        self._plan = None

    def _run(self, inbox: "queue.SimpleQueue[_Work | None]") -> None:
        work = inbox.get()
        if work is None:
            return
        try:
            done = self._write_and_commit(work)
            error: UnbrokenError | None = None
        except UnbrokenError as refused:
            done, error = _Committed(), refused
            # All ranks get this error, so that all copy the same way from now on.
            self._copies_at_once = self._copies_at_once or _is_written_during_save(refused)
        except Exception as surprise:  # noqa: BLE001 - the top of a thread: nothing above could report it
            done, error = _Committed(), Bug(cause=f"{type(surprise).__name__}: {surprise}")
            error.__cause__ = surprise
        total_s, size_bytes = done.total_s or time.monotonic() - work.began, work.plan.total_bytes
        self._ended = Saved(
            work.request,
            done.name,
            size_bytes,
            work.paused_s,
            total_s,
            done.removed,
            error,
            account=done.account,
            held=done.held,
        )

    def _write_and_commit(self, work: "_Work") -> "_Committed":
        world = self._beside
        try:
            begun = world.from_first(lambda: self._begin(work))
        except BaseException:
            # Nothing will be written: the next save needs the buffers.
            work.staged.release()
            raise
        draft = self._destination.draft(begun, coming_bytes=work.plan.total_bytes)
        committed: list[_Committed] = []

        def commit_once() -> _Committed:
            self._is_committing = True
            try:
                committed.append(self._commit(work, begun, draft, reports))
            finally:
                self._is_committing = False
            return committed[0]

        try:
            reports = world.gather_to_first(lambda: self._write(work, draft))
            # Over all ranks, and after none of them has failed: one that has would not take part.
            world.add_up(work.sums)
            return world.from_first(commit_once)
        except UnbrokenError:
            if committed:
                # A rank was lost before it learned of the commit: the checkpoint exists all the same.
                return committed[0]
            if world.is_first:
                self._give_up(draft)
            raise

    def _begin(self, work: "_Work") -> Begun:
        # Beside the tensors: index, metadata, manifest, the shared record, the directories, and one record a rank.
        others = 8 + self._world.size
        return self._destination.begin(
            work.request.step,
            work.request.kind,
            coming_bytes=work.plan.total_bytes,
            coming_files=len(work.plan.part_names(self._context.files_per_rank)) + others,
        )

    def _write(self, work: "_Work", draft: PartWriter) -> "_RankReport":
        try:
            work.staged.wait()
            with ThreadPoolExecutor(1, thread_name_prefix="unbroken-verify") as pool:
                checking = pool.submit(staged_sums, work.staged, work.plan, with_tied=work.described is None)
                began = time.monotonic()
                written = payload.write(work.staged, draft, self._world.rank, files=self._context.files_per_rank)
                took_s = time.monotonic() - began
                work.sums.copy_(checking.result())
            # Last: neither the fingerprints nor the files may be of copies that changed before they were read.
            require_as_copied(work.staged, work.request.step)
        finally:
            work.staged.release()
        part = rank_part(self._world.rank)
        mine = draft.write_part(part, [encode_rank(self._world.rank, work.captured.ranked)])
        return _RankReport(payload.WriteReport.of(written, work.plan.pieces), mine, took_s)

    def _commit(self, work: "_Work", begun: Begun, draft: PartWriter, reports: Sequence["_RankReport"]) -> "_Committed":
        context, request = self._context, work.request
        if (described := work.described) is None:
            described = described_by(work.plan, work.sums)
        else:
            require_as_fingerprinted(work.plan, described, work.sums, request.step)
        trainer = TrainerState(
            step=request.step,
            world_size=self._world.size,
            kinds={item.name: item.kind for item in work.items},
            values=work.captured.shared,
            per_rank=tuple(sorted(work.captured.ranked)),
            counters=work.counters,
            hyperparameters=self._hyperparameters,
        )
        parts = [part for each in reports for part in (*each.tensors.parts, each.record)]
        parts += self._describer.write(work.plan, [each.tensors for each in reports], draft)
        parts.append(draft.write_part(TRAINER_STATE, [trainer.encode()]))
        account = dict(request.account()) if request.account is not None else None
        served = {} if account is None else {"data": account}
        record = Record(
            kind=request.kind,
            saved_at_ns=time.time_ns(),
            tensors=described,
            metrics=request.metrics,
            fingerprint=combine({name: tensor.digest for name, tensor in described.items()}),
            metadata={"world_size": self._world.size, "torch": torch.__version__, **served, **request.metadata},
        )
        name = self._destination.commit(begun, plan=self._planned(work.plan), parts=parts, record=record)
        total_s = time.monotonic() - work.began
        bytes_by_rank = [sum(piece.size_bytes for piece in pieces) for pieces in work.plan.pieces_by_rank]
        times = [each.took_s for each in reports]
        self._plans_anew = context.planner.learn(list(zip(bytes_by_rank, times, strict=True)))
        removed, held = self._settle(name)
        context.on_commit()
        return _Committed(name, removed, account, held, total_s)

    def sweep_again(self, name: str) -> tuple[str, ...]:
        """Sweep what was held for a mirror and is mirrored now, behind the newest commit; returns what was swept."""
        return self._settle(name)[0]

    def _planned(self, plan: payload.SavePlan) -> list[str]:
        """Every part that must be there, known before anybody has reported one."""
        tensors = payload.planned_parts(plan, files=self._context.files_per_rank)
        return [*tensors, TRAINER_STATE, *map(rank_part, range(self._world.size))]

    def _settle(self, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What follows a commit; returns what was swept, and what is kept only until it is mirrored."""
        try:
            return self._destination.settle(name)
        except UnbrokenError as refused:
            # The checkpoint exists: to call the save failed would be untrue. The next one points and sweeps again.
            what = "updating `latest` or removing old checkpoints"
            _log.warning("%s is committed, but %s failed: %s", name, what, refused.message)
            return (), ()

    def _give_up(self, draft: PartWriter) -> None:
        try:
            draft.discard()
        except UnbrokenError:
            # What cannot be removed now is torn, and the next sweep removes it.
            return


@dataclass(frozen=True)
class _RankReport:
    """What one rank sends to rank 0: what it wrote of the tensors, and the part with its own record."""

    tensors: payload.WriteReport
    record: Part
    took_s: float


@dataclass(frozen=True)
class _Committed:
    """The result of a commit; empty where there was none."""

    name: str | None = None
    removed: tuple[str, ...] = ()
    account: Mapping[str, Any] | None = None
    held: tuple[str, ...] = ()
    # Until it was committed; old checkpoints are removed after that.
    total_s: float = 0.0


@dataclass(frozen=True)
class _Work:
    """A save on its way from the step's edge to its thread; ``sums`` is filled there, from the copies.

    ``described`` is None where the fingerprints are those of the copies, which are proven by checksums.
    """

    request: Request
    items: Sequence[Item]
    counters: Json
    captured: Captured
    plan: payload.SavePlan
    staged: Staged
    described: Mapping[str, Tensor] | None
    sums: torch.Tensor
    began: float
    paused_s: float


def _ends_the_save_only(refused: UnbrokenError) -> bool:
    """Whether training may continue after a state could not be taken; the same on all ranks."""
    cause = refused.cause if isinstance(refused, RankFailed) else refused
    # A bug, or an error of the user's own object, is not about this save; and a job that lost a rank cannot continue.
    return not isinstance(cause, InternalError | PeerLost)


def _is_written_during_save(refused: UnbrokenError) -> bool:
    cause = refused.cause if isinstance(refused, RankFailed) else refused
    return isinstance(cause, WrittenDuringSave)


def _is_alone_in_host_memory(world: World, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether checksums of the sources can stand for fingerprints at the edge, which take fifty times as long.

    Among several ranks the fingerprint at the edge also shows that all hold the same. On a GPU it is quicker than a
    checksum could be, and the copy is made later.
    """
    return world.size == 1 and all(local.is_cpu for tensor in tensors.values() for local in local_tensors(tensor))


# Less than this is made in no time.
_WORTH_PREPARING_BYTES: Final = 64 << 20


def expected_bytes(items: Sequence[Item], world_size: int) -> tuple[int, torch.device | None]:
    """About how much a save copies on this rank, and a GPU that it comes from: weights and the optimizers' state.

    What several ranks hold is taken to be shared out evenly. The plan of the save knows better, and needs all ranks.
    """
    total, device = 0, None
    for item in items:
        if isinstance(item, ModuleItem):
            found: Sequence[object] = [*item.module.parameters(), *item.module.buffers()]
        elif isinstance(item, OptimizerItem):
            states = item.optimizer.state.values()
            # An optimizer may keep values of its own beside those of its parameters.
            found = [value for state in states if isinstance(state, Mapping) for value in state.values()]
            # Before the first step there is none: two moments a parameter, or one.
            found = found or [p for group in item.optimizer.param_groups for p in group["params"]] * (
                2 if "betas" in item.optimizer.defaults else 1
            )
        else:
            continue
        is_flat = is_flat_sharded(item.module)
        for tensor in (each for each in found if isinstance(each, torch.Tensor)):
            copies = 1 if is_flat else copies_of(tensor, world_size)
            for local in local_tensors(tensor):
                total += local.nbytes // copies
                device = local.device if local.is_cuda else device
    return total, device


def changed_by_steps(items: Sequence[Item], names: Collection[str]) -> set[str]:
    """The tensors that only an optimizer's step changes: they can be copied beside the next forward and backward.

    Buffers, averages and users' own objects change whenever they like, so they are copied at once.
    """
    optimizers = [item for item in items if isinstance(item, OptimizerItem)]
    stepped = {id(p) for item in optimizers for group in item.optimizer.param_groups for p in group["params"]}
    found = {name for name in names for item in optimizers if name.startswith(f"{item.name}.state.")}
    for item in items:
        if isinstance(item, ModuleItem):
            called = parameter_names(item.module)
            found |= {f"{item.name}.{name}" for identity, name in called.items() if identity in stepped}
    return found & set(names)
