"""The position in the data, for any loader.

A loader with a state_dict of its own is saved by it; the generators it was given are kept beside that, since it draws
later epochs from them and may not count all that it drew. Any other loader is replayed: the generators as they were
when its epoch began are kept, the loader's own among them, so that making its iterator again draws the same order, and
the batches already served are drawn and dropped. That is exact for a loader that draws its order when its iterator is
made, as torch's does, and costs the time of those batches. A ``Positioned`` loader, such as ``unbroken.data.Loader``,
says one position for all ranks: nothing is kept beside it. ``loaders`` knows what each kind of loader needs.
"""

import copy
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast, runtime_checkable

from unbroken import torch_private
from unbroken.errors import DataEnded, NotAnItem
from unbroken.quoting.log import logger
from unbroken.state.between_epochs import Remembered
from unbroken.state.items import Stateful
from unbroken.state.loaders import (
    adapted,
    carry_worker_rng,
    remarks,
    renew,
    rngs_of,
    says_all,
    told_epochs,
    worker_count,
)
from unbroken.state.pipelines import identity_of
from unbroken.state.rng import (
    capture_rng,
    comparable,
    restore_rng,
    rng_devices,
    rng_state,
    set_rng_state,
)
from unbroken.state.torchdata_nodes import NodeLoader
from unbroken.state.wrappers import is_wrapped_loader

_log = logger(__name__)
T = TypeVar("T")


@runtime_checkable
class Positioned(Stateful, Protocol):
    """A loader whose batches are a function of one position, the same on every rank and valid on any number of them.

    What it has really served is added up over the ranks at each checkpoint and compared with what the function says.
    """

    notices: list[str]

    def accept(self, names: Collection[str]) -> None:
        """Take the differences that the user accepts, before a state is loaded."""

    def ended(self) -> str | None:
        """Why no further step can be served; None while one can. All ranks say the same at the same step."""

    def served_share(self) -> Any:  # noqa: ANN401 - whatever it adds up
        """What this rank has served since the ranks last added up; shares are added by ``+``."""

    def settle_served(self, total: Any) -> Callable[[], dict[str, Any]]:  # noqa: ANN401
        """Take the sum of all ranks' shares as settled.

        What is returned may be called later and in another thread: it compares all that was served up to now with what
        the function says, and tells ``samples``, ``digest`` and ``agrees``.
        """

    def settled_state(self, state: dict[str, Any], shares: Sequence[Any]) -> dict[str, Any]:
        """A state with the shares of all ranks, as ``as_json`` gave them, taken into its account.

        Raises:
            ValueError: a share is no account.
        """


# A killed process closes its connections before the system reports that it has ended.
_DIES_WITHIN_S = 1.0
_LOADERS_OWN = "loader"
# A step that starts so many epochs is an endless loop.
_ODD_EPOCHS = 3
_OWN = "generators"
_WORKERS = "workers"
_IDENTITY = "identity"
_START = "start"
_REMEMBERED = "remembered"
# What is not the state of a global generator in what is kept of an epoch's begin.
_BESIDE = (_LOADERS_OWN, _START, _REMEMBERED)


def require_loader(loader: object) -> Iterable[Any]:
    """The same object, as something to iterate.

    Raises:
        NotAnItem: it cannot be iterated.
    """
    if isinstance(loader, str | bytes | Mapping) or not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise NotAnItem(name="data", type_name=type(loader).__name__, lacks="a way to be iterated")
    return cast("Iterable[Any]", loader)


@dataclass(frozen=True)
class Mark:
    """A position of a loader that is replayed."""

    epoch: int
    served: int
    began: dict[str, Any] | None
    drawn: int


class Cursor(Generic[T]):
    """An endless iterator over a loader, epoch after epoch, that knows its position."""

    def __init__(self, loader: Iterable[T]) -> None:
        self.loader: Iterable[T] = adapted(loader)
        # The loader, if it has one position for all ranks; asked for at every edge, and a protocol answers slowly.
        self.positioned = self.loader if isinstance(self.loader, Positioned) else None
        self.epoch = 0
        self.served = 0
        # Batches served by this object, in all epochs: what a loop has drawn, whatever the position is.
        self.drawn = 0
        self._epochs_in_step = 0
        self._mark: Mark | None = None
        self._iterator: Iterator[T] | None = None
        self._began: dict[str, Any] | None = None
        self._is_stopping: Callable[[], bool] = lambda: False
        # The loader's own generators when the iterator was made.
        self._drawn: list[object] = []
        self.is_stateful = says_all(self.loader)
        # Taken now: a pipeline that is iterated changes.
        self._identity = None if self.positioned is not None else identity_of(self.loader)
        # The position that was loaded, until a batch is drawn: some loaders restore theirs only then.
        self._loaded: dict[str, Any] | None = None
        self._workers_before: int | None = None
        self._missing: list[str] = []
        if self.is_stateful:
            carry_worker_rng(self.loader)
        else:
            self._remembered = Remembered(self.loader)

    @property
    def notices(self) -> list[str]:
        """Warnings about the loader when a run is entered."""
        found = remarks(self.loader, is_replayed=not self.is_stateful)
        before, now = self._workers_before, worker_count(self.loader)
        if before is not None and now is not None and before != now:
            found.append(
                f"num_workers was {before} and is {now}: not exact if the dataset draws random numbers or is iterable"
            )
        found += [f"not exact: {each} was changed by the epochs before, and is not here" for each in self._missing]
        return found

    @property
    def only_ranks(self) -> int | None:
        """The only number of ranks that can take this loader's position; None where the loader says none."""
        return self._identity.ranks if self._identity is not None else None

    def __iter__(self) -> "Cursor[T]":
        return self

    def __next__(self) -> T:
        self._loaded = None
        for _ in range(2):
            if self._iterator is None:
                self._open()
            assert self._iterator is not None
            try:
                batch = self._next_batch()
            except StopIteration:
                self._iterator = None
                self.epoch += 1
                self.served = 0
                self._note_epoch()
                continue
            self.served += 1
            self.drawn += 1
            return batch
        # A loader without a single batch would spin for ever.
        raise DataEnded(epoch=self.epoch, served=0)

    def _next_batch(self) -> T:
        assert self._iterator is not None
        try:
            return next(self._iterator)
        except (RuntimeError, OSError, EOFError):
            # A batch whose worker is gone shows as a broken connection too.
            if not self._is_stopping() or not self._has_lost_workers():
                raise
            # The signal that stops the run killed workers too, and the step that is under way needs this batch: other
            # workers find it as a resume would, and the loop gets to the end of its step, where it stops.
            self._replace_workers()
            return next(self._iterator)

    def use_workers_of_run(self, is_stopping: Callable[[], bool]) -> None:
        """Restart the loader's workers, so that they ignore stop signals; says whether such a signal came."""
        self._is_stopping = is_stopping
        if getattr(self.loader, "persistent_workers", False):
            self._drop_workers()

    def _has_lost_workers(self) -> bool:
        workers = torch_private.workers_of(self._iterator)
        until_s = time.monotonic() + _DIES_WITHIN_S
        while all(worker.is_alive() for worker in workers) and time.monotonic() < until_s:
            time.sleep(0.01)
        return not all(worker.is_alive() for worker in workers)

    def _replace_workers(self) -> None:
        held = capture_rng(rng_devices())
        state = self.state_dict()
        self._drop_workers()
        self.load_state_dict(state)
        # Finding the place drew from them.
        restore_rng(held)

    def _drop_workers(self) -> None:
        """End the loader's workers, also those that it keeps from epoch to epoch."""
        self._iterator = None
        torch_private.end_workers(self.loader)

    def _open(self) -> None:
        self._set_epoch()
        if not self.is_stateful:
            renew(self.loader)
            self._began = {**capture_rng(), _LOADERS_OWN: states_of(self.loader)}
            if changed := self._remembered.changed():
                self._began[_REMEMBERED] = changed
        self._iterator = iter(self.loader)
        if self._began is not None and isinstance(self.loader, NodeLoader):
            # Its samplers count epochs by themselves.
            self._began[_START] = self.loader.state_dict()
        self._drawn = states_of(self.loader)

    def close(self) -> None:
        """Drop the iterator, and with it the workers that it has; the place is kept."""
        self._iterator = None
        self._is_stopping = lambda: False

    def _set_epoch(self) -> None:
        """Tell the epoch to whatever draws its order by it, or the order would be the same in every one."""
        # Accelerate's and Fabric's loaders count epochs by themselves, from 0 in every process.
        if is_wrapped_loader(self.loader) and hasattr(self.loader, "_num_iter_calls"):
            self.loader._num_iter_calls = self.epoch
        for each in told_epochs(self.loader):
            each.set_epoch(self.epoch)

    def _note_epoch(self) -> None:
        self._epochs_in_step += 1
        if self._epochs_in_step == _ODD_EPOCHS:
            _log.warning(
                "run.data has begun epoch %s within one step: it has no end, so `for batch in run.data` never ends. "
                "Draw what a step needs: batch = next(run.data)",
                self.epoch,
            )

    def __len__(self) -> int:
        return len(cast("Sized", self.loader))

    def step_begins(self) -> None:
        """A step begins: what is drawn from now on is its own."""
        self._epochs_in_step = 0

    def mark(self) -> "Mark | None":
        """The position now, for ``stand_at``; None for a loader that keeps its own state."""
        return None if self.is_stateful else Mark(self.epoch, self.served, self._began, self.drawn)

    def stand_at(self, mark: "Mark") -> None:
        """From now on say the position of a mark: the batches drawn since then belong to a step that was given up."""
        self._mark = mark

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        if self.positioned is not None:
            # Batches served differ by rank where the ranks do not divide the lanes; the position does not.
            return {"loader": self.positioned.state_dict()}
        if self._mark is not None:
            return {"epoch": self._mark.epoch, "served": self._mark.served, "began": self._mark.began}
        if self._loaded is not None:
            return self._loaded
        state: dict[str, Any] = {"epoch": self.epoch, "served": self.served}
        if (workers := worker_count(self.loader)) is not None:
            state[_WORKERS] = workers
        if self._identity is not None and (identity := self._identity.as_state()):
            state[_IDENTITY] = identity
        if self.is_stateful:
            state["loader"] = self.loader.state_dict()  # type: ignore[attr-defined]
            if (own := states_of(self.loader)) and self._stands_at(own):
                state[_OWN] = own
        else:
            state["began"] = self._began
        return state

    def _stands_at(self, own: list[object]) -> bool:
        """Whether the loader's generators are where the batches served have brought them.

        With workers, indexes are drawn ahead of what is served: a sampler that draws as it goes is then ahead too.
        """
        if getattr(self.loader, "num_workers", 0) == 0:
            return True
        return [comparable(each) for each in own] == [comparable(each) for each in self._drawn]

    def changes(self, state: object) -> list[str]:
        """What the position of a checkpoint depends on and is different here."""
        saved = state.get(_IDENTITY) if isinstance(state, dict) else None
        return self._identity.changes(saved) if self._identity is not None and isinstance(saved, dict) else []

    def complaint(self, state: object) -> str | None:
        """Why this loader cannot take the position of the checkpoint's loader; None where it can."""
        if not isinstance(state, dict):
            return "its state in the checkpoint is not that of a loader"
        here = type(getattr(self.loader, "pipeline", self.loader)).__name__
        if "loader" in state and not self.is_stateful:
            return (
                "the checkpoint's loader saved its own state, with state_dict and load_state_dict; "
                f"the {here} here has none"
            )
        if "loader" in state and "epoch" not in state and self.positioned is None:
            return f"the checkpoint's loader has one position for all ranks; the {here} here does not"
        if self.is_stateful and "loader" not in state and state.get("began") is not None:
            return (
                "the checkpoint's loader had no state and is replayed from the start of its epoch; "
                f"the {here} here saves its own state"
            )
        # torchdata and Grain raise it, with a traceback.
        before, now = state.get(_WORKERS), worker_count(self.loader)
        if self.is_stateful and before is not None and now is not None and before != now:
            return (
                f"num_workers was {before} in the checkpoint and is {now}; a {here} resumes only with the same number"
            )
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand there again, with the iterator made; the generators are left as making it left them.

        Raises:
            DataEnded: the loader has fewer batches now than it had served.
        """
        self._iterator = self._mark = self._loaded = None
        if self.positioned is not None:
            # Without one, nothing has been served yet.
            if "loader" in state:
                self.positioned.load_state_dict(state["loader"])
            self._iterator = iter(self.loader)
            return
        self.epoch, self.served = state["epoch"], state["served"]
        self._workers_before = state.get(_WORKERS)
        if "loader" in state:
            self._loaded = copy.deepcopy(state)
            # Before its state: a loader of the script's may go to the start of the epoch that it is told.
            self._set_epoch()
            self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
            self._iterator = iter(self.loader)
            # Behind the iterator, which draws while it finds its place.
            self._drawn = state.get(_OWN, [])
            if self._drawn:
                set_states(self.loader, self._drawn)
            return
        self._began = state["began"]
        if self._began is None:
            return
        self._set_epoch()
        renew(self.loader)
        self._missing = self._remembered.take(self._began.get(_REMEMBERED, []))
        restore_rng({name: held for name, held in self._began.items() if name not in _BESIDE})
        set_states(self.loader, self._began[_LOADERS_OWN])
        if isinstance(self.loader, NodeLoader):
            self.loader.load_state_dict(self._began[_START])
        self._iterator = iter(self.loader)
        for done in range(self.served):
            try:
                next(self._iterator)
            except StopIteration:
                raise DataEnded(epoch=self.epoch, served=self.served, found=done) from None


def states_of(loader: object) -> list[object]:
    """The states of a loader's own generators."""
    return [rng_state(rng) for rng in rngs_of(loader)]


def set_states(loader: object, states: Sequence[object]) -> None:
    """Put a loader's own generators where they were; an earlier version kept those of the samplers only."""
    for rng, held in zip(rngs_of(loader), states, strict=False):
        set_rng_state(rng, held)
