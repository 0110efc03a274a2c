"""The files under a folder of data: which shards stand there, which halves of one, which lists.

Names that begin with a dot are ours and unfinished, or nobody's: they are passed over, except the mark of a
tokenization that has not ended.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from unbroken.data.corpus.listing import LISTING
from unbroken.data.corpus.shards import BIN_SUFFIX, IDX_SUFFIX
from unbroken.disk import Node, NodeKind
from unbroken.errors import StorageFailed, TokenizationUnfinished
from unbroken.files import LOCAL

UNFINISHED: Final = ".tokenize"
# A file in the folder of that name: the command line that finishes the work, as a shell takes it.
COMMAND: Final = "command"
_ANY_COMMAND: Final = "unbroken tokenize --help"


@dataclass
class Found:
    """The files under a folder by their names relative to it, those of shards without suffix; ``listings`` are folders.

    ``irregular`` are names that belong to data and stand for no regular file: links above all.
    """

    bins: set[str] = field(default_factory=set)
    indexes: set[str] = field(default_factory=set)
    irregular: list[str] = field(default_factory=list)
    listings: list[str] = field(default_factory=list)

    @property
    def stems(self) -> set[str]:
        """Every name that at least one file of a shard has."""
        return self.bins | self.indexes

    @property
    def pairs(self) -> set[str]:
        """The names of which both files are there."""
        return self.bins & self.indexes

    @property
    def lone_bins(self) -> list[str]:
        """The names of which only the ``.bin`` is there."""
        return sorted(self.bins - self.indexes)

    @property
    def lone_indexes(self) -> list[str]:
        """The names of which only the ``.idx`` is there."""
        return sorted(self.indexes - self.bins)


def walk(folder: Path, *, follows_buckets: bool) -> Found:
    """Everything under a folder that belongs to data.

    Args:
        folder: a split's folder, or a bucket's.
        follows_buckets: follow links to folders right under this one, where they cannot lead round in a circle.

    Raises:
        TokenizationUnfinished: a tokenization into one of the folders has not ended.
        StorageFailed: the system refused to list a folder.
    """
    found = Found()
    waiting = [""]
    while waiting:
        place = waiting.pop()
        require_finished(folder / place)
        for node in LOCAL.list_directory(folder / place):
            name = f"{place}/{node.name}" if place else node.name
            is_linked_bucket = follows_buckets and not place and node.kind is NodeKind.LINK and (folder / name).is_dir()
            if node.name.startswith("."):
                continue
            if node.kind is NodeKind.DIRECTORY or is_linked_bucket:
                waiting.append(name)
            else:
                _note(found, folder, place, node)
    return found


def require_finished(folder: Path) -> None:
    """Pass if no tokenization into this folder waits to be finished.

    Raises:
        TokenizationUnfinished: one does.
        StorageFailed: the system refused to look.
    """
    if LOCAL.find(folder / UNFINISHED) is not None:
        raise TokenizationUnfinished(path=folder, command=_command_of(folder / UNFINISHED / COMMAND))


def _command_of(path: Path) -> str:
    try:
        command = LOCAL.read_bytes(path, limit_bytes=1 << 16).decode().strip()
    except (StorageFailed, UnicodeDecodeError):
        return _ANY_COMMAND
    # It is going to be pasted into a shell: nothing but one line of ours is passed on.
    return command if command.startswith("unbroken tokenize ") and command.isprintable() else _ANY_COMMAND


def _note(found: Found, folder: Path, place: str, node: Node) -> None:
    name = f"{place}/{node.name}" if place else node.name
    of_data = node.name == LISTING or node.name.endswith((BIN_SUFFIX, IDX_SUFFIX))
    if node.kind is not NodeKind.FILE:
        # Behind a link to a folder there may be shards, and to pass over shards in silence is to lose data.
        if of_data or (folder / name).is_dir():
            found.irregular.append(name)
    elif node.name == LISTING:
        found.listings.append(place)
    elif node.name.endswith(BIN_SUFFIX):
        found.bins.add(name.removesuffix(BIN_SUFFIX))
    elif node.name.endswith(IDX_SUFFIX):
        found.indexes.add(name.removesuffix(IDX_SUFFIX))
