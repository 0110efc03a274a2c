"""Errors about tokenized data: shards that are not what they say, and data that is not what a run was trained on."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unbroken.errors.tree import DataError, Help, quoted
from unbroken.quoting.amounts import plural


@dataclass(eq=False, kw_only=True)
class ShardDamaged(DataError):
    """One file of a shard is not what it says it is."""

    kind = "shard-damaged"
    path: Path
    complaint: str

    def headline(self) -> str:
        return f"a shard is damaged: {self.complaint}"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        return "nothing is read from it; copy it anew or tokenize its source again"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain shard-damaged", "what a shard must be"),)


@dataclass(eq=False, kw_only=True)
class DataDamaged(DataError):
    """A folder of shards does not bear out what its files or its list say; every finding at once."""

    kind = "data-damaged"
    path: Path
    findings: tuple[str, ...]

    def headline(self) -> str:
        return f"this data cannot be used: {plural(len(self.findings), 'finding')}"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        return "nothing was read from it; each line below names a file under this folder"

    def details(self) -> Iterator[str]:
        yield from self.findings

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain data-damaged", "what each finding asks for"),)


@dataclass(eq=False, kw_only=True)
class DataMissing(DataError):
    """There is nothing to train on where data was named."""

    kind = "data-missing"
    path: Path
    lacks: str
    # Whether shards stand at the path itself, where only a split of them is looked for.
    has_shards: bool = False

    def headline(self) -> str:
        lacks = "it is a file, and data stands in a folder" if self.path.is_file() else self.lacks
        return f"there is no data here: {lacks}"

    def at(self) -> str | None:
        return str(self.path)

    @property
    def _has_train(self) -> bool:
        """Whether it is a data folder, and only its other split is missing."""
        return self.has_shards and self.path.joinpath("train").is_dir()

    def so(self) -> str | None:
        if self._has_train:
            return "its train/ is there; shards of another split stand beside it, in PATH/val/, in the same buckets"
        if self.has_shards:
            return "the shards in it are those of one split: they belong into PATH/train/, and PATH is what is named"
        return "shards stand in PATH/train/BUCKET/, or in PATH/train/ for one bucket called default"

    def help(self) -> tuple[Help, ...]:
        if self._has_train:
            made = f"unbroken tokenize --input-dir TEXT --output-dir {quoted(self.path / 'val')} --tokenizer-path NAME"
            return (Help(made, "make it, with the tokenizer of train/"),)
        if self.has_shards and self.path.name in ("train", "val"):
            return (Help(f"unbroken data inspect {quoted(self.path.parent)}", "look at the folder it is a split of"),)
        if self.has_shards:
            folder, aside = quoted(self.path), quoted(f"{self.path}-train")
            moved = f"mv {folder} {aside} && mkdir {folder} && mv {aside} {quoted(self.path / 'train')}"
            return (Help(moved, "make it the train/ of a data folder"),)
        nearest = next(above for above in (self.path, *self.path.parents, Path()) if above.exists())
        return (Help(f"ls {quoted(nearest)}", "see what is there"),)


@dataclass(eq=False, kw_only=True)
class TokenizersDiffer(DataError):
    """Folders of one corpus were made with different tokenizers, or with tokens of different sizes."""

    kind = "tokenizers-differ"
    path: Path
    found: tuple[tuple[str, str], ...]
    # Whether the last of them was asked for and made none of the shards.
    is_asked: bool = False

    def headline(self) -> str:
        if self.is_asked:
            return "this data was not made with the tokenizer that was asked for"
        return "the folders of this data were not made with one tokenizer"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        return "the same number means different text in each of them"

    def details(self) -> Iterator[str]:
        width = max(len(folder) for folder, _ in self.found)
        yield from (f"{folder:<{width}}  {what}" for folder, what in self.found)

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain tokenizers-differ", "how to bring them together"),)


@dataclass(eq=False, kw_only=True)
class TokenizationUnfinished(DataError):
    """A tokenization was begun in this folder and has not been finished; ``command`` finishes it."""

    kind = "tokenization-unfinished"
    path: Path
    command: str

    def headline(self) -> str:
        return "a tokenization into this folder is not finished"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        return "it was killed or still runs; started again with the same options it goes on where it stood"

    def help(self) -> tuple[Help, ...]:
        return (Help(self.command, "finish it"),)


ServedShare = Literal["none", "some", "all"]
_SERVED = {
    "none": "none of its documents were served",
    "some": "some of its documents were served",
    "all": "all its documents were served",
}


@dataclass(frozen=True)
class ShardChange:
    """One shard that is not what a run was trained on: its name, what is different, what was served of it."""

    bucket: str
    name: str
    difference: str
    served: ServedShare | None = None

    def __str__(self) -> str:
        told = f"; {_SERVED[self.served]}" if self.served else ""
        return f"{self.bucket}/{self.name}: {self.difference}{told}"


@dataclass(eq=False, kw_only=True)
class DataChanged(DataError):
    """The data is not the data this run was trained on."""

    kind = "data-changed"
    path: Path
    changed: tuple[ShardChange, ...] = ()
    missing: tuple[ShardChange, ...] = ()
    added: tuple[ShardChange, ...] = ()

    @property
    def is_growth(self) -> bool:
        """Whether shards were added and nothing else is different."""
        return not self.changed and not self.missing

    def headline(self) -> str:
        counts = (
            (len(each), what)
            for each, what in ((self.changed, "changed"), (self.missing, "missing"), (self.added, "added"))
        )
        said = ", ".join(f"{plural(count, 'shard')} {what}" for count, what in counts if count)
        return f"the data is not what this run was trained on: {said}"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        if self.is_growth:
            return (
                "every shard the run knows is as it was; the new ones join when that is asked for: --accept data.grow"
            )
        return "the samples would not be those of one long job; nothing was loaded"

    def details(self) -> Iterator[str]:
        yield from (str(change) for change in (*self.changed, *self.missing, *self.added))

    def help(self) -> tuple[Help, ...]:
        if self.is_growth:
            return (Help("unbroken explain data-changed", "how new shards join a run"),)
        # The path is that of a split; what is verified is the folder above, with all its splits.
        return (
            Help(f"unbroken data verify {quoted(self.path.parent)}", "see whether its bytes are those of its list"),
        )
