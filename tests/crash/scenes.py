"""The scenes of the crash suite: what stands before, what is done, and what a reader may find after any crash.

A scene names the one checkpoint a resume finds before its action and the one it finds afterwards. Whatever cuts the
action short, exactly one of the two is found, with every byte as that step wrote it; ``examine`` looks at all of that,
saves once more as a new job, sweeps, and looks again.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.disk import Disk, NodeKind
from unbroken.files import Files, storage_errors
from unbroken.store.check import Level, verify
from unbroken.store.choose import resume_point
from unbroken.store.commit import Record, begin, commit
from unbroken.store.directory import Store
from unbroken.store.keep import LastK, Policy
from unbroken.store.names import FINAL, PERIODIC, DraftName, is_checkpoint_name, scratch, trash_name
from unbroken.store.parts import read_part
from unbroken.store.rewind import rewind
from unbroken.store.scan import newest_first, scan
from unbroken.store.seal import seal
from unbroken.store.sweep import pin, pinned_ids, settle, sweep, unpin

ROOT = Path("/run/checkpoints")
PARTS = ("state/.metadata", "state/shards/0/__0_0.distcp", "trainer_state.json")
FOREIGN = {
    "notes.txt": b"my notes",
    "my-experiment/weights.bin": b"my weights",
    "checkpoint-7/readme": b"a folder of mine that is called like one of yours",
}
UNFINISHED = (".tmp-", ".trash-", ".scratch-")
LIVE = "live"

Label = tuple[int, str]
"""What tells one checkpoint of a scene from another: its step and the job that saved it."""


class Mixed(AssertionError):
    """A reader found something that is neither the old state nor the new one."""


def content(step: int, job: str, part: str) -> bytes:
    """What a job writes into a part at a step; no two are alike."""
    return f"{part} of step {step} by {job}\n".encode() * 4


def is_live(draft: DraftName) -> bool:
    """Of all jobs in the scenes one other than the actor is alive."""
    return draft.job == LIVE


def nobody_is_live(draft: DraftName) -> bool:
    """Every job is gone."""
    del draft
    return False


def save(
    store: Store,
    step: int,
    job: str,
    *,
    kind: str = PERIODIC,
    policies: Iterable[Policy] = (LastK(None),),
    live: Callable[[DraftName], bool] = is_live,
    committed: Callable[[str], None] = lambda name: None,
    fence: Callable[[], None] | None = None,
) -> str:
    """One save as a training job does it; ``committed`` hears the name the moment the commit has returned."""
    draft = begin(store, step=step, job=job)
    parts = []
    for part in PARTS:
        data = content(step, job, part)
        parts.append(draft.write_part(part, [data[:7], data[7:]]))
    # A later job saves at a later time, also where it saves an earlier step.
    at_ns = 1_000 * step + len(job)
    name = commit(draft, plan=PARTS, parts=parts, record=Record(kind=kind, saved_at_ns=at_ns), fence=fence)
    committed(name)
    settle(store, name, tuple(policies), job=job, is_live=live)
    return name


def look(store: Store) -> tuple[Label | None, tuple[str, ...]]:
    """What a job that starts now resumes from, each byte compared with what was saved; and what it skipped."""
    choice = resume_point(store, Level.FULL, job="reader", at_ns=1)
    passed = tuple(over.name for over in choice.skipped)
    if choice.chosen is None or choice.chosen.manifest is None:
        return None, passed
    manifest = choice.chosen.manifest
    if sorted(part.name for part in manifest.parts) != sorted(PARTS):
        raise Mixed(f"{choice.chosen.name} has the parts {[part.name for part in manifest.parts]}")
    for part in manifest.parts:
        found = b"".join(
            bytes(block) for block in read_part(store.files, store.path(choice.chosen.name), manifest, part)
        )
        if found != content(manifest.step, manifest.job, part.name):
            raise Mixed(f"{choice.chosen.name}/{part.name} is not what step {manifest.step} by {manifest.job} wrote")
    return (manifest.step, manifest.job), passed


@dataclass(frozen=True)
class Scene:
    """One thing that can be cut short.

    Attributes:
        prepare: makes what stands before; all of it is durable when the action begins.
        act: the action; it calls its second argument once the new state must survive everything.
        before: what a resume finds if nothing was done.
        after: what a resume finds if all was done.
        publishes: the name whose appearance is the one instant between the two; None where it is another kind of move.
        damaged: names that are damaged on purpose.
        has_live_draft: whether a draft of a live job stands there from the beginning.
        repeat: what its user does again after a crash, where nobody else cleans up.
    """

    title: str
    prepare: Callable[[Store], None]
    act: Callable[[Store, Callable[[], None]], None]
    before: Label | None
    after: Label
    publishes: str | None = None
    damaged: frozenset[str] = field(default_factory=frozenset)
    has_live_draft: bool = False
    repeat: Callable[[Store], None] = lambda store: None

    def __str__(self) -> str:
        return self.title


def write_foreign(files: Files, root: Path) -> None:
    """Lay a user's own files into the store."""
    for name, data in FOREIGN.items():
        files.make_directory((root / name).parent)
        files.write_new(root / name, [data])


def _history(*labels: Label) -> Callable[[Store], None]:
    def prepare(store: Store) -> None:
        for step, job in labels:
            save(store, step, job)
        write_foreign(store.files, store.root)

    return prepare


def _ended(store: Store) -> None:
    _history((10, "a"))(store)
    save(store, 20, "b", kind=FINAL)


def _nothing(store: Store) -> None:
    store.files.make_directory(store.root.parent)


def _saving(
    step: int, job: str, *, kind: str = PERIODIC, policies: Iterable[Policy] = (LastK(None),)
) -> Callable[[Store, Callable[[], None]], None]:
    def act(store: Store, reached: Callable[[], None]) -> None:
        save(store, step, job, kind=kind, policies=policies, committed=lambda _: reached())

    return act


def _litter(store: Store) -> None:
    """Leftovers of a dead job, of an interrupted sweep, of a link that was never swapped; and a live job's draft."""
    _history((10, "a"), (20, "b"))(store)
    draft = begin(store, step=30, job="dead")
    draft.write_part(PARTS[0], [b"torn"])
    draft.write_part(PARTS[2], [b"torn too"])
    begin(store, step=30, job="dead")
    files = store.files
    files.make_directory(store.path(trash_name("checkpoint-5")) / "state")
    files.write_new(store.path(trash_name("checkpoint-5")) / "state/.metadata", [b"half removed"])
    files.write_new(store.path(scratch("dead", "latest")), [b""])
    begin(store, step=40, job=LIVE).write_part(PARTS[0], [b"being written"])


def _sweep(store: Store, reached: Callable[[], None]) -> None:
    reached()
    sweep(store, ["checkpoint-10"], is_live=is_live)


def _sweep_only(store: Store, reached: Callable[[], None]) -> None:
    reached()
    sweep(store, (), is_live=is_live)


def _damage_newest(store: Store) -> None:
    _history((10, "a"), (20, "b"), (30, "c"))(store)
    for name, part in (("checkpoint-30", PARTS[1]), ("checkpoint-20", "manifest.json")):
        path = store.path(name) / part
        store.files.remove_file(path)
        store.files.write_new(path, [b"rot"])


def _resume(store: Store, reached: Callable[[], None]) -> None:
    reached()
    resume_point(store, Level.FULL, job="d", at_ns=4)


def _rewind(store: Store, reached: Callable[[], None]) -> None:
    names = newest_first(store, scan(store).committed)
    rewind(store, names, target="checkpoint-10", job="d", at_ns=5)
    reached()


def _half_rewound(store: Store) -> None:
    _history((10, "a"), (20, "b"), (30, "c"))(store)
    with contextlib.suppress(InterruptedError):
        rewind(
            _Stopping(store.root, store.files),
            ["checkpoint-30", "checkpoint-20", "checkpoint-10"],
            target="checkpoint-10",
            job="d",
            at_ns=5,
        )


class _Stopping(Store):
    """A store that stops a rewind between its record and its moves."""

    def path(self, name: str) -> Path:
        if name == "abandoned":
            raise InterruptedError
        return super().path(name)


def _pin(store: Store, reached: Callable[[], None]) -> None:
    reached()
    pin(store, "checkpoint-10", reason="for the paper", job="c", at_ns=6)


def _pinned(store: Store) -> None:
    _history((10, "a"), (20, "b"))(store)
    pin(store, "checkpoint-10", reason="for the paper", job="b", at_ns=6)


def _unpin(store: Store, reached: Callable[[], None]) -> None:
    reached()
    unpin(store, "checkpoint-10")


def _discard(store: Store, reached: Callable[[], None]) -> None:
    reached()
    draft = begin(store, step=30, job="c")
    draft.write_part(PARTS[1], [b"given up"])
    draft.discard()


def _seal(store: Store, reached: Callable[[], None]) -> None:
    """Another tool writes a folder and syncs nothing of it; then it is sealed."""
    for part in PARTS:
        path = store.path("hf-step-30") / part
        store.files.make_directory(path.parent)
        with storage_errors("write", path):
            handle = store.files.disk.create(path)
            rest = memoryview(content(30, "seal", part))
            while rest:
                rest = rest[store.files.disk.write(handle, rest) :]
            store.files.disk.close(handle)
    _seal_again(store)
    reached()


def _seal_again(store: Store) -> None:
    if store.files.find(store.path("hf-step-30") / PARTS[2]) is not None:
        seal(store, "hf-step-30", at_ns=7, workers=1)


SCENES = (
    Scene("first save", _nothing, _saving(10, "a"), None, (10, "a"), "checkpoint-10"),
    Scene("save", _history((10, "a"), (20, "b")), _saving(30, "c"), (20, "b"), (30, "c"), "checkpoint-30"),
    Scene("save of a step that is there", _history((10, "a"), (20, "b")), _saving(20, "cc"), (20, "b"), (20, "cc"),
          "checkpoint-20.2"),
    Scene("final save", _history((10, "a"), (20, "b")), _saving(30, "c", kind=FINAL), (20, "b"), (30, "c"), "final"),
    Scene("final save of an extended run", _ended, _saving(30, "c", kind=FINAL), (20, "b"), (30, "c")),
    Scene("save that releases old ones", _pinned, _saving(30, "c", policies=(LastK(1),)), (20, "b"), (30, "c"),
          "checkpoint-30"),
    Scene("save beside litter", _litter, _saving(30, "c", policies=(LastK(2),)), (20, "b"), (30, "c"),
          "checkpoint-30", has_live_draft=True),
    Scene("sweep", _litter, _sweep, (20, "b"), (20, "b"), has_live_draft=True),
    Scene("resume with damaged ones", _damage_newest, _resume, (10, "a"), (10, "a"),
          damaged=frozenset({"checkpoint-20", "checkpoint-30"})),
    Scene("rewind", _history((10, "a"), (20, "b"), (30, "c")), _rewind, (30, "c"), (10, "a")),
    Scene("sweep after a rewind cut short", _half_rewound, _sweep_only, (10, "a"), (10, "a")),
    Scene("pin", _history((10, "a"), (20, "b")), _pin, (20, "b"), (20, "b")),
    Scene("unpin", _pinned, _unpin, (20, "b"), (20, "b")),
    Scene("seal", _history((10, "a"), (20, "b")), _seal, (20, "b"), (30, "seal"), "manifest.json",
          repeat=_seal_again),
    Scene("giving a draft up", _history((10, "a")), _discard, (10, "a"), (10, "a")),
)  # fmt: skip


def names_below(disk: Disk, directory: Path) -> Iterator[str]:
    """Every name below a directory, files and directories, at any depth."""
    for node in disk.list_directory(directory):
        yield node.name
        if node.kind is NodeKind.DIRECTORY:
            yield from names_below(disk, directory / node.name)


def examine(
    store: Store, scene: Scene, *, must: Label | None, next_job: str = "next", has_symlinks: bool = True
) -> None:
    """Look at what a fault left, then work on: all that holds after any crash of a scene.

    Args:
        must: the one checkpoint that has to be found; None where the old and the new one are both right.
        next_job: who saves next.
        has_symlinks: whether the file system has them.

    Raises:
        Mixed: an invariant does not hold.
    """
    files = store.files
    _no_half_checkpoint(store, scene)
    if scene.has_live_draft:
        expect(files.read_bytes(store.path(str(DraftName(LIVE, 40, 1))) / PARTS[0], limit_bytes=99) == b"being written",
               "the draft of a live job was touched")  # fmt: skip
    found, passed = look(store)
    expect(found in ((scene.before, scene.after) if must is None else (must,)), f"a resume finds {found}")
    expect(set(passed) <= scene.damaged, f"{passed} were skipped")
    save(store, 50, next_job, live=nobody_is_live)
    expect(look(store) == ((50, next_job), ()), f"after another save a resume finds {look(store)}")
    scene.repeat(store)
    sweep(store, (), is_live=nobody_is_live)
    left = [name for name in names_below(files.disk, store.root) if name.startswith(UNFINISHED)]
    expect(not left, f"a sweep with no live job left {left}")
    hint = "checkpoint-50" if has_symlinks else None
    expect(files.read_link(store.path("latest")) == hint, "latest is not the last commit")
    if scene.before is not None:
        for name, data in FOREIGN.items():
            expect(files.read_bytes(store.path(name), limit_bytes=99) == data, f"the user's own {name} was touched")
    if scene.title == "save that releases old ones":
        expect("checkpoint-10" in scan(store).committed and bool(pinned_ids(store)), "a pinned checkpoint is gone")


def _no_half_checkpoint(store: Store, scene: Scene) -> None:
    inventory = scan(store)
    for name in inventory.committed:
        if name not in scene.damaged:
            expect(verify(store, name, Level.FULL, workers=1).is_sound, f"{name} stands there and is not whole")
    halves = [name for name in inventory.foreign if is_checkpoint_name(name) and f"{name}/readme" not in FOREIGN]
    expect(not halves, f"{halves} have a checkpoint's name and no manifest")
    moved = "rewind" in scene.title or "extended" in scene.title or scene.damaged
    if inventory.latest is not None and not moved:
        expect(inventory.latest in inventory.committed, f"latest points at {inventory.latest}, which is not committed")


def expect(is_true: bool, complaint: str) -> None:
    """Say what does not hold.

    Raises:
        Mixed: it does not.
    """
    if not is_true:
        raise Mixed(complaint)
