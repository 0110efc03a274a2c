"""A store as a state machine: random saves, kills, power cuts, damage, pins, mirrors, prunes, rewinds against a dict.

The model knows every checkpoint that was committed, by id, and what must never be lost: the newest usable one, the
best, the milestones, the pinned, what has no second copy, the one the job resumed from, and all that is not ours.
"""

import itertools
import math
import random
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.crash.scenes import FOREIGN, ROOT, UNFINISHED, names_below, nobody_is_live, write_foreign
from unbroken.errors import StorageError
from unbroken.files import Files
from unbroken.store.check import Level, verify
from unbroken.store.choose import resume_point
from unbroken.store.commit import Record, begin, commit
from unbroken.store.directory import Store
from unbroken.store.keep import BestBy, EveryNSteps, LastK, Policy, decide
from unbroken.store.mirrored import Upload, mirrored_ids, read_mirrors, record_upload, write_mirrors
from unbroken.store.names import MANIFEST, PERIODIC
from unbroken.store.parts import read_part
from unbroken.store.rewind import rewind
from unbroken.store.scan import newest_first, scan
from unbroken.store.sweep import candidates, pin, settle, sweep, unpin
from unbroken.testing import Fault, FaultyDisk, Kill, Killed, MemoryDisk, Plan, Refuse, crash_states, never, strategies

MILESTONE = 5
Policies = list[Policy]
policies: st.SearchStrategy[Policies] = st.lists(
    st.sampled_from([LastK(1), LastK(2), EveryNSteps(MILESTONE), BestBy("loss")]), min_size=1, max_size=2
)
picks = st.integers(0, 1 << 16)
MIRROR = "file:///shared/mirror"
mirrored = st.sampled_from([True, True, True, False])
steps = st.integers(0, 12)
losses = strategies.losses()
kinds = strategies.save_kinds()


def at_change(index: int, fault: Fault) -> Plan:
    """The plan that strikes the operation that is the ``index``-th to change something."""
    changes = itertools.count()
    return lambda operation: fault if operation.is_mutating and next(changes) == index else None


@dataclass
class Known:
    """What the model knows of one committed checkpoint."""

    step: int
    order: int
    loss: float | None
    data: bytes
    is_sound: bool = True
    is_pinned: bool = False
    is_mirrored: bool = False
    is_abandoned: bool = False
    is_certain: bool = True

    @property
    def age(self) -> tuple[int, int]:
        return self.step, self.order


@dataclass
class Model:
    """Every checkpoint that stands in the store, by id."""

    known: dict[str, Known] = field(default_factory=dict)

    def usable(self) -> dict[str, Known]:
        return {id_: k for id_, k in self.known.items() if k.is_sound and not k.is_abandoned}

    def _last_of(self, step: int) -> str:
        usable = self.usable()
        return max((id_ for id_ in usable if usable[id_].step == step), key=lambda id_: usable[id_].age)

    def newest(self) -> str | None:
        usable = self.usable()
        return max(usable, key=lambda id_: usable[id_].age, default=None)

    def protected(self, policies: Policies) -> set[str]:
        """The ids that no sweep by these policies may take."""
        usable = self.usable()
        kept = {self.newest()} if usable else set()
        kept |= {id_ for id_, k in self.known.items() if k.is_pinned or not k.is_mirrored or not k.is_sound}
        last_of = {step: self._last_of(step) for step in sorted({k.step for k in usable.values()})}
        for policy in policies:
            if isinstance(policy, LastK) and policy.k is not None:
                kept |= set(list(last_of.values())[-policy.k :])
        if any(isinstance(policy, EveryNSteps) for policy in policies):
            kept |= {id_ for step, id_ in last_of.items() if step and step % MILESTONE == 0}
        measured = {id_: k for id_, k in usable.items() if k.loss is not None and math.isfinite(k.loss)}
        if measured and any(isinstance(policy, BestBy) for policy in policies):
            kept.add(min(measured, key=lambda id_: (measured[id_].loss, [-n for n in measured[id_].age])))
        return {id_ for id_ in kept if id_ is not None}


class StoreMachine(RuleBasedStateMachine):
    """The rules; the disk is replaced by what a power cut leaves of it."""

    PARTS: ClassVar = ("state/shard", "trainer_state.json")

    @initialize(history=st.lists(st.tuples(steps, mirrored), max_size=5))
    def build(self, history: list[tuple[int, bool]]) -> None:
        """A store that has seen some saves."""
        self.disk = MemoryDisk([ROOT])
        write_foreign(self.store().files, ROOT)
        self.disk.sync_all()
        self.model = Model()
        self.jobs = 0
        self.clock = 0
        self.target: str | None = None
        for step, has_copy in history:
            self.save(step, PERIODIC, None, has_copy)

    def store(self, plan: Plan = never) -> Store:
        return Store(ROOT, Files(FaultyDisk(self.disk, plan)))

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def new_job(self) -> str:
        self.jobs += 1
        return f"j{self.jobs}"

    def standing(self) -> dict[str, str]:
        """The names of the checkpoints that stand in the store or aside, by id."""
        store = self.store()
        inventory = scan(store)
        aside = [f"quarantine/{name}" for name in inventory.quarantined]
        found = {}
        for name in (*inventory.committed, *inventory.abandoned, *aside):
            for id_, known in self.model.known.items():
                if self._is(store, name, id_, known):
                    found[id_] = name
        return found

    def _is(self, store: Store, name: str, id_: str, known: Known) -> bool:
        handle = store.files.find(store.path(name) / "trainer_state.json")
        return handle is not None and known.data == store.files.read_bytes(
            store.path(name) / "trainer_state.json", limit_bytes=1 << 16
        )

    # ---- saving ----

    def _save(self, store: Store, step: int, kind: str, loss: float | None, job: str) -> str:
        at_ns = self.tick()
        data = f"step {step} saved at {at_ns}".encode()
        id_ = f"{job}-{step}-{at_ns:x}"
        # From now on it may come to stand there; whether it does is known when the commit returns.
        self.model.known[id_] = Known(step, at_ns, loss, data, is_certain=False)
        draft = begin(store, step=step, job=job)
        parts = [draft.write_part(part, [data]) for part in self.PARTS]
        metrics = {} if loss is None else {"loss": loss}
        record = Record(kind=kind, saved_at_ns=at_ns, metrics=metrics)
        name = commit(draft, plan=self.PARTS, parts=parts, record=record)
        self.model.known[id_].is_certain = True
        return name

    @rule(step=steps, kind=kinds, loss=losses, has_copy=mirrored)
    def save(self, step: int, kind: str, loss: float | None, has_copy: bool) -> None:
        """A save that keeps everything."""
        store = self.store()
        job = self.new_job()
        name = self._save(store, step, kind, loss, job)
        settle(store, name, (LastK(None),), job=job, is_live=nobody_is_live)
        self._newest_known().is_mirrored = has_copy

    def _newest_known(self) -> Known:
        return max(self.model.known.values(), key=lambda known: known.order)

    @rule(step=steps, loss=losses, chosen=policies, has_copy=mirrored)
    def save_and_prune(self, step: int, loss: float | None, chosen: Policies, has_copy: bool) -> None:
        """A save with a prune behind it."""
        store = self.store()
        job = self.new_job()
        name = self._save(store, step, PERIODIC, loss, job)
        self._newest_known().is_mirrored = has_copy
        self._settle(store, name, chosen, job)

    def _settle(self, store: Store, name: str, chosen: Policies, job: str) -> None:
        protected = self.model.protected(chosen) | {self.target}
        self._keep_ledger(store)
        settle(
            store, name, chosen, job=job, is_live=nobody_is_live,
            resume_target=self._name_of_target(),
        )  # fmt: skip
        self._forget(protected)

    def _keep_ledger(self, store: Store) -> None:
        """Record what the model says is mirrored."""
        if not read_mirrors(store):
            write_mirrors(store, [MIRROR], job="mirror")
        for id_ in {id_ for id_, known in self.model.known.items() if known.is_mirrored} - mirrored_ids(store, MIRROR):
            record_upload(store, Upload(MIRROR, id_, "", "", 0), job="mirror", at_ns=1)

    def _name_of_target(self) -> str | None:
        return self.standing().get(self.target) if self.target else None

    def _forget(self, protected: set[str | None]) -> None:
        """Take note of what a sweep removed; nothing protected may be among it."""
        standing = self.standing()
        for id_ in [id_ for id_ in self.model.known if id_ not in standing]:
            known = self.model.known.pop(id_)
            assert id_ not in protected or not known.is_certain, f"{id_} was swept"

    # ---- faults ----

    @rule(step=steps, loss=losses, chosen=policies, index=st.integers(0, 45), fault=st.sampled_from(
        [Kill("before"), Kill("during"), Refuse(28), Refuse(5)]))  # fmt: skip
    def save_struck(self, step: int, loss: float | None, chosen: Policies, index: int, fault: Fault) -> None:
        """A save with a prune behind it, struck at one operation; where it is a kill, the next job cleans up."""
        protected = self._save_and_settle(self.store(at_change(index, fault)), step, loss, chosen)
        self._reconcile(protected)
        # A refused sync leaves names that a later power cut may still take back; here time goes by without one.
        self.disk.sync_all()

    @rule(step=steps, index=st.integers(0, 45), seed=st.integers(0, 1 << 16), pick=picks)
    def power_cut(self, step: int, index: int, seed: int, pick: int) -> None:
        """A save killed at one operation, and then one of the disks that a power cut may leave."""
        protected = self._save_and_settle(self.store(at_change(index, Kill("before"))), step, None, [LastK(1)])
        found = [disk for _, disk in crash_states(self.disk, random.Random(seed), subsets=4)]
        self.disk = found[pick % len(found)]
        self._reconcile(protected)

    def _save_and_settle(self, store: Store, step: int, loss: float | None, chosen: Policies) -> set[str | None]:
        """Save until something strikes; returns what nothing may have cost, seen from where it got to."""
        job = self.new_job()
        protected: set[str | None] = {*self.model.protected(chosen), self.target}
        try:
            name = self._save(store, step, PERIODIC, loss, job)
            protected = {*self.model.protected(chosen), self.target}
            self._settle(store, name, chosen, job)
        except (Killed, StorageError):
            pass
        return protected

    def _reconcile(self, protected: set[str | None]) -> None:
        standing = self.standing()
        for id_, known in list(self.model.known.items()):
            if id_ in standing:
                known.is_certain = True
            else:
                del self.model.known[id_]
        assert protected - {None} <= standing.keys(), "what must never be lost is gone"

    # ---- people ----

    def _pick(self, pick: int) -> tuple[str, str]:
        """The id and the name of one usable checkpoint."""
        usable = sorted(self.model.usable())
        id_ = usable[pick % len(usable)]
        return id_, self.standing()[id_]

    @precondition(lambda self: self.model.usable())
    @rule(pick=picks)
    def pin(self, pick: int) -> None:
        """A person pins one."""
        id_, name = self._pick(pick)
        pin(self.store(), name, reason="mine", job=self.new_job(), at_ns=self.tick())
        self.model.known[id_].is_pinned = True

    @precondition(lambda self: self.model.usable())
    @rule(pick=picks)
    def unpin(self, pick: int) -> None:
        """A person takes a pin back."""
        id_, name = self._pick(pick)
        assert unpin(self.store(), name) == self.model.known[id_].is_pinned
        self.model.known[id_].is_pinned = False

    @precondition(lambda self: self.model.usable())
    @rule(pick=picks)
    def mirror(self, pick: int) -> None:
        """A second copy has been verified."""
        self.model.known[self._pick(pick)[0]].is_mirrored = True

    @precondition(lambda self: self.model.usable())
    @rule(pick=picks, part=st.sampled_from([MANIFEST, "state/shard"]))
    def damage(self, pick: int, part: str) -> None:
        """A disk forgets what it was told."""
        id_, name = self._pick(pick)
        self._damage(name, part)
        self.model.known[id_].is_sound = False
        self.disk.sync_all()

    @precondition(lambda self: self.model.usable())
    @rule(pick=picks, index=st.integers(0, 25))
    def rewind(self, pick: int, index: int) -> None:
        """Go back to one, perhaps killed on the way: then it happened or it did not, and nothing between."""
        # Nobody rewinds past a checkpoint that cannot be read: resuming sets it aside first.
        self._resume()
        id_, name = self._pick(pick)
        store = self.store(at_change(index, Kill("before")))
        names = newest_first(self.store(), scan(self.store()).committed)
        before = self.model.newest()
        try:
            rewind(store, names, target=name, job=self.new_job(), at_ns=self.tick())
        except Killed:
            choice = resume_point(self.store(), Level.FULL, job=self.new_job(), at_ns=self.tick())
            assert choice.chosen is not None and choice.chosen.manifest is not None
            assert choice.chosen.manifest.id in (before, id_)
            if choice.chosen.manifest.id == before:
                return
        for other in self.model.usable().values():
            if other.age > self.model.known[id_].age:
                other.is_abandoned = True
        self.target = id_

    def _damage(self, name: str, part: str) -> None:
        path = self.store().path(name) / part
        self.store().files.remove_file(path)
        self.store().files.write_new(path, [b"rot"])

    # ---- jobs ----

    @rule()
    def resume(self) -> None:
        """A job starts: it finds exactly the newest usable one, and every byte of it is what was saved."""
        self._resume()

    def _resume(self) -> None:
        store = self.store()
        choice = resume_point(store, Level.FULL, job=self.new_job(), at_ns=self.tick())
        expected = self.model.newest()
        if choice.chosen is None or choice.chosen.manifest is None:
            assert expected is None, f"nothing was found where {expected} stands"
            return
        manifest = choice.chosen.manifest
        assert manifest.id == expected, f"{manifest.id} was chosen, not {expected}"
        for part in manifest.parts:
            blocks = read_part(store.files, store.path(choice.chosen.name), manifest, part)
            assert b"".join(map(bytes, blocks)) == self.model.known[manifest.id].data
        self.target = manifest.id

    @rule(chosen=policies)
    def prune(self, chosen: Policies) -> None:
        """What ``prune`` does: decide and sweep, with no save before it."""
        store = self.store()
        protected = self.model.protected(chosen) | {self.target}
        self._keep_ledger(store)
        found = candidates(store, scan(store).committed)
        decision = decide(found, chosen, resume_target=self._name_of_target())
        sweep(store, decision.released, is_live=nobody_is_live)
        self._forget(protected)
        left = [name for name in names_below(self.disk, ROOT) if name.startswith(UNFINISHED)]
        assert not left

    # ---- always ----

    @invariant()
    def nothing_foreign_is_touched(self) -> None:
        """A user's files are there, byte for byte."""
        for name, data in FOREIGN.items():
            assert self.store().files.read_bytes(ROOT / name, limit_bytes=99) == data

    @invariant()
    def all_that_is_known_stands_somewhere(self) -> None:
        """What was committed and not released is in the store, or aside, and can be looked at."""
        standing = self.standing()
        assert self.model.known.keys() == standing.keys()
        names = {name: id_ for id_, name in standing.items()}
        for name in scan(self.store()).committed:
            is_sound = verify(self.store(), name, Level.QUICK).is_sound
            assert is_sound == self.model.known[names[name]].is_sound, f"{name} is half removed"


SETTINGS = settings(
    derandomize=True,
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    database=None,
    # A mutated source only has to turn the test red; looking for the smallest example would cost minutes.
)


@pytest.mark.promise("C17", "G6", "K4", "K5")
def test_a_store_is_what_a_dict_says_it_is_whatever_happens_to_it() -> None:
    run_state_machine_as_test(StoreMachine, settings=SETTINGS)
