"""The batches of the Trainer of Transformers, and how a resume inside an epoch makes the next ones as they were.

The Trainer skips the batches that an epoch has had by their index, which is exact where making a batch draws no random
numbers. Where it does, two things are missing:

- In the main process the loader reads one batch ahead. The batch after a checkpoint was made with the RNG states from
  before its last step; those are noted at every read, and restored for that one batch.
- A loader worker draws for one batch after the other. The batches of the epoch are read again, and dropped.

Batches are read through ``Trainer.get_batch_samples``, which is called for every step and is replaced on this trainer.

The Trainer computes the place of a resume from its count of steps. That is wrong if an epoch had fewer batches than it
computes with: it takes the whole training for one epoch of a loader without a length, and a callback may end an epoch
by ``should_epoch_stop``. So the place is kept in such checkpoints, and ``Trainer._init_training_state``, which is
replaced too, says that one.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from accelerate import skip_first_batches  # type: ignore[import-untyped]
from accelerate.data_loader import (  # type: ignore[import-untyped]
    DataLoaderDispatcher,
    DataLoaderShard,
    SkipBatchSampler,
)
from torch.utils.data import IterableDataset, TensorDataset
from transformers import Trainer

from unbroken.frameworks.loader_pass import batch_count, packed_states, unpacked_states
from unbroken.quoting.log import logger
from unbroken.state.loaders import renew, rngs_of, worker_count
from unbroken.state.rng import capture_rng, restore_rng, rng_devices, rng_state, set_rng_state
from unbroken.world import is_first_process

_log = logger(__name__)
_READ: Final = "get_batch_samples"
_INIT: Final = "_init_training_state"
# In the file of RNG states: those before the batch that was read ahead, and the count of batches.
_AHEAD: Final = "ahead"
_BATCHES: Final = "batches"
# The epoch and the batches that were done in it, where they do not follow from the count of steps.
_PLACE: Final = "place"
# Collators that pad and copy, and draw nothing.
_FIXED_COLLATORS: Final = frozenset(
    {
        "default_data_collator",
        "DefaultDataCollator",
        "DataCollatorWithPadding",
        "DataCollatorForTokenClassification",
        "DataCollatorForMultipleChoice",
        "DataCollatorForSeq2Seq",
        "DataCollatorWithFlattening",
    }
)


@dataclass(frozen=True)
class _Drawn:
    """RNG states at one moment: the global ones, and those of generators in the data set and the collator."""

    rng: Mapping[str, Any]
    own: list[object]


class TrainerBatches:
    """Reads the batches of one job of a trainer.

    Args:
        trainer: whose ``get_batch_samples`` is replaced until ``close``.
        reread: read the batches of an interrupted epoch again where loader workers make them. None: unless the data
            set and the collator are known to draw no random numbers.
    """

    def __init__(self, trainer: Trainer, *, reread: bool | None) -> None:
        self._trainer, self._reread = trainer, reread
        self._own_methods = {name: vars(trainer).get(name) for name in (_READ, _INIT)}
        self._read = trainer.get_batch_samples
        self._init: Any = getattr(trainer, _INIT, None)
        vars(trainer)[_READ] = self._samples
        if self._init is not None:
            vars(trainer)[_INIT] = self._init_training_state
        # Where the Trainer starts: the checkpoint that was chosen, and the place that it has.
        self._chosen: tuple[Path, tuple[int, int]] | None = None
        # The epoch, whether its batches are all done, and whether an earlier one was shorter than the Trainer thinks.
        self._epoch = self._skipped = 0
        self._is_exhausted = self._is_short = False
        self._loader: Any = None
        self._rngs: list[Any] = []
        self._given = 0
        self._ahead: _Drawn | None = None
        self._saved: Mapping[str, Any] | None = None
        self._rest: Iterator[Any] | None = None
        self._after: _Drawn | None = None

    def close(self) -> None:
        """Give the trainer its own method back, and end the workers that are kept for another epoch.

        The exit of the interpreter would kill them, and torch report it.
        """
        with contextlib.suppress(RuntimeError):
            renew(self._loader)
        for name, own in self._own_methods.items():
            if own is None:
                vars(self._trainer).pop(name, None)
            else:
                vars(self._trainer)[name] = own

    @property
    def is_noting(self) -> bool:
        """Whether a resume inside this epoch makes the batch that was read ahead as it was, whatever it draws."""
        inner = self._loader
        return (
            type(inner) is DataLoaderShard
            and not isinstance(inner.dataset, IterableDataset)
            and not worker_count(inner)
            and getattr(inner, "batch_sampler", None) is not None
            and not getattr(inner, "use_stateful_dataloader", False)
        )

    # ---- the place in the data ----

    def choose(self, path: Path, saved: Mapping[str, Any] | None) -> None:
        """A checkpoint was chosen; ``saved`` is its file of RNG states.

        Raises:
            ValueError: it has a place that this Trainer cannot be told.
        """
        place = (saved or {}).get(_PLACE)
        if place is None:
            return
        if self._init is None:
            raise ValueError(
                "this version of transformers cannot resume in a later epoch of a data set without a length, or after "
                "an epoch that a callback ended: install transformers 5.22"
            )
        self._chosen = path, (place["epoch"], place["batches"])

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:  # noqa: ANN401
        """What the Trainer's own method returns: the epoch to start in, and how many batches of it are skipped."""
        found: tuple[int, int] = self._init(*args, **kwargs)
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, str | Path)]
        if self._chosen is not None and self._chosen[0] in map(Path, given):
            found = self._chosen[1]
            self._is_short = True
        else:
            self._chosen = None
        self._epoch, self._skipped = found
        return found

    def is_between_epochs(self, saved: Mapping[str, Any]) -> bool | None:
        """Whether a checkpoint was saved at the end of an epoch; None if its place is not known."""
        place = saved.get(_PLACE)
        return None if place is None else place["batches"] == 0

    @property
    def pending_batches(self) -> int:
        """How many batches at the end of an epoch no optimizer step has used, of a loader without a length."""
        accumulated = int(self._trainer.args.gradient_accumulation_steps)
        return self._given % accumulated if batch_count(self._loader) is None else 0

    # ---- an epoch ----

    def begin_epoch(self, loader: object, saved: Mapping[str, Any] | None) -> None:
        """An epoch begins; ``saved`` are the RNG states of a checkpoint inside it."""
        self._loader, self._saved, self._rest, self._after = loader, saved, None, None
        self._given, self._skipped = self._skipped, 0
        self._ahead, self._is_exhausted = None, False
        if self._is_rereading:
            # Workers that are kept over epochs carry RNG states that nobody knows.
            renew(loader)
        if self.is_noting:
            _make_rng(self._trainer.data_collator)
        held = SimpleNamespace(dataset=getattr(loader, "dataset", None), collate_fn=getattr(loader, "collate_fn", None))
        self._rngs = rngs_of(held) if self.is_noting else []

    def end_epoch(self, *, is_stopping: bool) -> None:
        """An epoch is over: what is saved from here on is the beginning of the next one."""
        length = batch_count(self._loader)
        is_inside = not self._is_exhausted and (length is None or self._given < length)
        if is_inside and is_stopping:
            # The training is over, and not the epoch: a longer training continues in it.
            return
        self._is_short = self._is_short or (length is not None and self._given < length)
        self._epoch, self._given = self._epoch + 1, 0

    @property
    def _is_dispatched(self) -> bool:
        """Whether one process reads for all: then the Trainer skips too few batches, and a last one is filled up."""
        inner = self._loader
        if not isinstance(inner, DataLoaderDispatcher) or isinstance(inner.dataset, IterableDataset):
            return False
        return int(inner.state.num_processes) > 1

    @property
    def _is_rereading(self) -> bool:
        inner = self._loader
        if self._is_dispatched:
            return True
        if type(inner) is not DataLoaderShard or isinstance(inner.dataset, IterableDataset) or not worker_count(inner):
            # The Trainer itself reads an iterable data set again.
            return False
        return not draws_nothing(inner) if self._reread is None else self._reread

    def _samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        saved, self._saved = self._saved, None
        if saved is not None and self._is_where(saved):
            self._rest = self._placed(saved)
        batches = epoch_iterator if self._rest is None else self._rest
        found = self._read(self._noted(batches), num_batches, device)
        if saved is not None and self._rest is not None and self.is_noting:
            self._after = self._drawn()
        return found

    def _noted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches; before each one is read, the RNG states are noted."""
        is_noting = self.is_noting
        while True:
            if is_noting:
                self._ahead = self._drawn()
            batch = next(batches, None)
            if batch is None:
                self._is_exhausted = True
                return
            self._given += 1
            yield batch

    def settle(self) -> None:
        """The Trainer has loaded the RNG states of its checkpoint: the batches that were read since count, too."""
        after, self._after = self._after, None
        if after is not None:
            self._restore(after)

    # ---- a checkpoint ----

    def state(self) -> dict[str, Mapping[str, Any] | None]:
        """What a resume needs, for the file of RNG states."""
        own = {"now": packed_states([rng_state(each) for each in self._rngs])}
        if self._ahead is not None:
            own["ahead"] = packed_states(self._ahead.own)
        return {
            _PLACE: self._own_place(),
            _AHEAD: None if self._ahead is None else self._ahead.rng,
            _BATCHES: {"count": self._given, "own": own},
        }

    def _own_place(self) -> dict[str, int] | None:
        length = batch_count(self._loader)
        if length is None:
            return {"epoch": self._epoch, "batches": self._given}
        if not self._is_short:
            return None
        # As the Trainer counts: behind the last batch of an epoch the next one begins.
        is_over = self._given >= length
        return {"epoch": self._epoch + is_over, "batches": 0 if is_over else self._given}

    def restore_own(self, saved: Mapping[str, Any]) -> None:
        """Put the generators of the data set and the collator where they were at the end of an epoch."""
        if saved.get(_BATCHES) is not None:
            for each, held in zip(self._rngs, unpacked_states(saved[_BATCHES]["own"]["now"]), strict=False):
                set_rng_state(each, held)

    def _is_where(self, saved: Mapping[str, Any]) -> bool:
        """Whether the checkpoint knows its place, and the Trainer counts the batches up to it alike."""
        if saved.get(_BATCHES) is None or not (self.is_noting or self._is_rereading):
            return False
        count, (_, expected) = saved[_BATCHES]["count"], self._place()
        return bool(count == expected and (self._is_rereading or saved.get(_AHEAD) is not None))

    def _place(self) -> tuple[int, int]:
        """The epoch that the Trainer resumes in, and the batches of it that it skips."""
        if self._chosen is not None:
            return self._chosen[1]
        accumulated = self._trainer.args.gradient_accumulation_steps
        updates = max(-(-len(self._loader) // accumulated), 1)
        epoch, steps = divmod(self._trainer.state.global_step, updates)
        return epoch, steps * accumulated

    def _placed(self, saved: Mapping[str, Any]) -> Iterator[Any]:
        """The rest of an epoch that an earlier job began; the RNG states are those with which it began."""
        epoch, count = self._place()
        self._given = count
        if self._is_rereading:
            if is_first_process():
                why = "loader workers may draw random numbers (Callback(reread=False) skips them)"
                why = "one process reads them for all" if self._is_dispatched else why
                _log.info("continuing epoch %d: its first %d batches are read again, because %s", epoch, count, why)
            self._loader.set_epoch(epoch)
            batches = iter(self._loader)
            skipped = 0
        else:
            own = saved[_BATCHES]["own"]
            now = _Drawn(saved["rng"], unpacked_states(own["now"]))
            ahead = _Drawn(saved[_AHEAD], unpacked_states(own["ahead"]))
            # The first read of an epoch makes two batches: it is done again as a whole.
            skipped = count if count > 1 else 0
            if not skipped:
                self._restore(ahead)
            loader = skip_first_batches(self._loader, skipped)
            loader.set_epoch(epoch)
            skipping: SkipBatchSampler = loader.batch_sampler
            states = {count + 1: now} | ({count: ahead} if skipped else {})
            skipping.batch_sampler = _Restoring(skipping.batch_sampler, states, self._restore)
            batches = iter(loader)
        for _ in range(count - skipped):
            next(batches)
        found: Iterator[Any] = batches
        return found

    def _drawn(self) -> _Drawn:
        return _Drawn(capture_rng(rng_devices()), [rng_state(each) for each in self._rngs])

    def _restore(self, drawn: _Drawn) -> None:
        restore_rng(drawn.rng)
        for each, held in zip(self._rngs, drawn.own, strict=False):
            set_rng_state(each, held)


class _Restoring:
    """The batches of a sampler; RNG states are restored before those of some numbers are asked for."""

    def __init__(self, inner: Any, states: Mapping[int, _Drawn], restore: Any) -> None:  # noqa: ANN401
        self._inner, self._states, self._restore = inner, states, restore

    def __iter__(self) -> Iterator[Any]:
        batches, number = iter(self._inner), 0
        while True:
            if number in self._states:
                self._restore(self._states[number])
            batch = next(batches, None)
            if batch is None:
                return
            yield batch
            number += 1

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> object:
        # Accelerate asks for the sampler in it, which it tells the epoch.
        return getattr(self._inner, name)


def _make_rng(collator: object) -> None:
    """Let a collator with a seed make its generator now, not with its first batch: a resume sets its state before."""
    make = getattr(collator, "create_rng", None)
    if callable(make) and getattr(collator, "seed", None) is not None and getattr(collator, "generator", 0) is None:
        make()


def draws_nothing(loader: Any) -> bool:  # noqa: ANN401 - any loader
    """Whether the data set and the collator of a loader are known to draw no random numbers."""
    collator = getattr(loader, "collate_fn", None)
    # The Trainer puts one around it that removes columns.
    collator = getattr(collator, "data_collator", collator)
    name = getattr(collator, "__name__", type(collator).__name__)
    module = str(getattr(collator, "__module__", type(collator).__module__))
    is_fixed = module.startswith("transformers.") and name in _FIXED_COLLATORS
    if name == "DataCollatorForLanguageModeling":
        # TRL's class of this name has no masks; that of Transformers has them if it is told so.
        is_fixed = module.startswith(("transformers.", "trl.")) and not getattr(collator, "mlm", False)
    return is_fixed and _is_fixed_data(getattr(loader, "dataset", None))


def _is_fixed_data(dataset: object) -> bool:
    kind = type(dataset)
    if kind.__module__.startswith("datasets."):
        # A transform is a function of the script's own.
        form = getattr(dataset, "format", None)
        return isinstance(form, dict) and form.get("type") != "custom"
    return kind is TensorDataset
