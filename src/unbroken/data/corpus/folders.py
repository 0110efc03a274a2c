"""The data files under a folder: shards, shards with a file missing, and lists.

Names that begin with a dot are skipped, except the mark of an unfinished tokenization.
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
# A file in that folder: the command that finishes the work, quoted for a shell.
COMMAND: Final = "command"
_ANY_COMMAND: Final = "unbroken tokenize --help"


@dataclass
class ShardFiles:
    """The files under a folder, by name relative to it; shards without suffix, ``listings`` as their folders.

    ``irregular`` are names of data files that are not regular files, such as links.
    """

    bins: set[str] = field(default_factory=set)
    indexes: set[str] = field(default_factory=set)
    irregular: list[str] = field(default_factory=list)
    listings: list[str] = field(default_factory=list)

    @property
    def stems(self) -> set[str]:
        """The names of shards with at least one file."""
        return self.bins | self.indexes

    @property
    def pairs(self) -> set[str]:
        """The names of shards with both files."""
        return self.bins & self.indexes

    @property
    def lone_bins(self) -> list[str]:
        """The names with only a ``.bin``."""
        return sorted(self.bins - self.indexes)

    @property
    def lone_indexes(self) -> list[str]:
        """The names with only an ``.idx``."""
        return sorted(self.indexes - self.bins)


def walk(folder: Path, *, follows_buckets: bool) -> ShardFiles:
    """All data files under a folder.

    Args:
        folder: a split's folder, or a bucket's.
        follows_buckets: follow links to folders directly under this one, where they cannot form a cycle.

    Raises:
        TokenizationUnfinished: a tokenization into one of the folders is unfinished.
        StorageFailed: an I/O error.
    """
    found = ShardFiles()
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
    """Raise if a tokenization into this folder is unfinished.

    Raises:
        TokenizationUnfinished: it is.
        StorageFailed: an I/O error.
    """
    if LOCAL.find(folder / UNFINISHED) is not None:
        raise TokenizationUnfinished(path=folder, command=_command_of(folder / UNFINISHED / COMMAND))


def _command_of(path: Path) -> str:
    try:
        command = LOCAL.read_bytes(path, limit_bytes=1 << 16).decode().strip()
    except (StorageFailed, UnicodeDecodeError):
        return _ANY_COMMAND
    # Users paste it into a shell: only a single line that we wrote is passed on.
    return command if command.startswith("unbroken tokenize ") and command.isprintable() else _ANY_COMMAND


def _note(found: ShardFiles, folder: Path, place: str, node: Node) -> None:
    name = f"{place}/{node.name}" if place else node.name
    of_data = node.name == LISTING or node.name.endswith((BIN_SUFFIX, IDX_SUFFIX))
    if node.kind is not NodeKind.FILE:
        # A link to a folder may hold shards; skipping them silently would lose data.
        if of_data or (folder / name).is_dir():
            found.irregular.append(name)
    elif node.name == LISTING:
        found.listings.append(place)
    elif node.name.endswith(BIN_SUFFIX):
        found.bins.add(name.removesuffix(BIN_SUFFIX))
    elif node.name.endswith(IDX_SUFFIX):
        found.indexes.add(name.removesuffix(IDX_SUFFIX))
