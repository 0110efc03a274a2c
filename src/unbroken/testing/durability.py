"""Inodes that track which bytes and names are durable, and name changes that a power cut may undo.

A file's bytes and a directory's names become durable by separate syncs, as POSIX has it. Every change of names is
one atomic ``Change`` that waits in ``PendingChanges`` until a sync of a directory it touches settles it; what
survives a power cut is the settled names plus any set of pending changes that respects what each one ``needs``.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum


class Tail(Enum):
    """What a power cut makes of the bytes of a file that were never synced."""

    LOST = "lost"
    """The file ends where it was last synced: empty if it never was."""
    HALF = "half"
    """Half of them arrived."""
    ZEROED = "zeroed"
    """The size arrived and the bytes did not: they read as zeros."""
    KEPT = "kept"
    """All of them arrived."""


@dataclass(eq=False)
class FileInode:
    """A regular file. Files here are only ever appended to, so the durable bytes are a prefix."""

    modified_ns: int
    data: bytearray = field(default_factory=bytearray)
    synced_bytes: int = 0
    names: int = 0
    handles: int = 0

    def after_crash(self, tail: Tail) -> "FileInode":
        """The same file as a reader finds it after a power cut."""
        durable = bytes(self.data[: self.synced_bytes])
        unsynced = bytes(self.data[self.synced_bytes :])
        survived = {
            Tail.LOST: b"",
            Tail.HALF: unsynced[: len(unsynced) // 2],
            Tail.ZEROED: bytes(len(unsynced)),
            Tail.KEPT: unsynced,
        }[tail]
        data = bytearray(durable + survived)
        return FileInode(self.modified_ns, data, len(data))


@dataclass(eq=False)
class LinkInode:
    """A symbolic link; its target is written with its name, as file systems store it in the inode."""

    modified_ns: int
    target: str
    names: int = 0


@dataclass(eq=False)
class DirectoryInode:
    """A directory: the names a process sees, and the names that are durable."""

    modified_ns: int
    parent: "DirectoryInode | None"
    entries: dict[str, "Inode"] = field(default_factory=dict)
    synced: dict[str, "Inode"] = field(default_factory=dict)

    def ancestry(self) -> Iterator["DirectoryInode"]:
        """This directory and those above it, up to the root."""
        here: DirectoryInode | None = self
        while here is not None:
            yield here
            here = here.parent


Inode = FileInode | LinkInode | DirectoryInode


@dataclass(frozen=True, eq=False)
class Edit:
    """One name in one directory that is set to an inode, or removed."""

    directory: DirectoryInode
    name: str
    inode: Inode | None


@dataclass(frozen=True, eq=False)
class Change:
    """One change of names, survived whole or not at all.

    ``needs`` are the earlier changes without which it cannot survive; ``carries`` those of them that any sync which
    settles it settles too.
    """

    number: int
    description: str
    edits: tuple[Edit, ...]
    needs: frozenset[int]
    carries: frozenset[int]

    def touches(self, directory: DirectoryInode) -> bool:
        """Whether a name in this directory changes."""
        return any(edit.directory is directory for edit in self.edits)


class PendingChanges:
    """The changes of names that no sync has settled yet, in the order in which they were made."""

    def __init__(self) -> None:
        self._changes: dict[int, Change] = {}
        self._made = 0

    def __iter__(self) -> Iterator[Change]:
        return iter(self._changes.values())

    def __len__(self) -> int:
        return len(self._changes)

    def make(self, description: str, edits: tuple[Edit, ...], *, removed: DirectoryInode | None = None) -> None:
        """Record a change; ``removed`` is the directory that ceases to exist by it."""
        slots = {(id(edit.directory), edit.name) for edit in edits}
        above = {id(each) for edit in edits for each in edit.directory.ancestry()}
        same_name, inside, named = set[int](), set[int](), set[int]()
        for earlier in self:
            for edit in earlier.edits:
                if (id(edit.directory), edit.name) in slots:
                    same_name.add(earlier.number)
                if edit.directory is removed:
                    inside.add(earlier.number)
                if edit.inode is not None and id(edit.inode) in above:
                    named.add(earlier.number)
        # A sync of one directory says nothing about that directory's own name. A move between two directories is
        # different: settled without the name of its new home, the thing moved would be in neither.
        is_move = len({id(edit.directory) for edit in edits}) > 1
        carries = same_name | inside | (named if is_move else set())
        needs = frozenset(same_name | inside | named)
        self._changes[self._made] = Change(self._made, description, edits, needs, frozenset(carries))
        self._made += 1

    def settle(self, directory: DirectoryInode) -> None:
        """Make the names of one directory durable."""
        wanted = self._closed((change.number for change in self if change.touches(directory)), "carries")
        for number in sorted(wanted):
            for edit in self._changes.pop(number).edits:
                _apply(edit, edit.directory.synced)

    def with_needs(self, numbers: Iterable[int]) -> list[Change]:
        """These changes and all they need, in order."""
        return [self._changes[number] for number in sorted(self._closed(numbers, "needs"))]

    def _closed(self, numbers: Iterable[int], relation: str) -> set[int]:
        closed = set[int]()
        waiting = [number for number in numbers if number in self._changes]
        while waiting:
            number = waiting.pop()
            if number not in closed:
                closed.add(number)
                further: frozenset[int] = getattr(self._changes[number], relation)
                waiting.extend(each for each in further if each in self._changes)
        return closed


def _apply(edit: Edit, entries: dict[str, Inode]) -> None:
    if edit.inode is None:
        entries.pop(edit.name, None)
    else:
        entries[edit.name] = edit.inode


def rebuilt(root: DirectoryInode, survivors: Iterable[Change], tail: Tail | random.Random) -> DirectoryInode:
    """The tree a reader finds after a power cut; a generator as ``tail`` draws one for each file."""
    names: dict[int, dict[str, Inode]] = {}
    for change in survivors:
        for edit in change.edits:
            _apply(edit, names.setdefault(id(edit.directory), dict(edit.directory.synced)))
    copies: dict[int, Inode] = {}

    def copy(inode: Inode, parent: DirectoryInode | None) -> Inode:
        if isinstance(inode, DirectoryInode):
            return copy_directory(inode, parent)
        if id(inode) not in copies:
            if isinstance(inode, LinkInode):
                copies[id(inode)] = LinkInode(inode.modified_ns, inode.target)
            else:
                drawn = tail if isinstance(tail, Tail) else tail.choice(list(Tail))
                copies[id(inode)] = inode.after_crash(drawn)
        found = copies[id(inode)]
        if not isinstance(found, DirectoryInode):
            found.names += 1
        return found

    def copy_directory(inode: DirectoryInode, parent: DirectoryInode | None) -> DirectoryInode:
        made = DirectoryInode(inode.modified_ns, parent)
        entries = names.get(id(inode), inode.synced)
        made.entries = {name: copy(each, made) for name, each in entries.items()}
        made.synced = dict(made.entries)
        return made

    return copy_directory(root, None)
