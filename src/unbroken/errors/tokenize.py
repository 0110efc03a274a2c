"""Errors met on the way from raw text to shards."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unbroken.errors.tree import BusyError, DataError, Help, PeerError, UsageError, quoted
from unbroken.quoting.amounts import plural


@dataclass(eq=False, kw_only=True)
class NoTextFound(DataError):
    """An input folder without a file that holds documents."""

    kind = "no-text-found"
    path: Path
    known: tuple[str, ...]
    unknown: tuple[str, ...] = ()

    def headline(self) -> str:
        return "this folder holds no file of documents"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        return f"nothing was written; documents are read from {', '.join(self.known)}"

    def details(self) -> Iterator[str]:
        yield from (f"{name}: not a suffix that is read" for name in self.unknown[:20])

    def help(self) -> tuple[Help, ...]:
        return (Help(f"ls {quoted(self.path)}", "see what is there"),)


@dataclass(eq=False, kw_only=True)
class NoTokens(DataError):
    """Documents of which not one gave a token; ``left_out`` counts them by reason."""

    kind = "no-tokens"
    path: Path
    left_out: tuple[tuple[str, int], ...] = ()

    def headline(self) -> str:
        if not self.left_out:
            return "the files of this folder hold no document"
        return f"{plural(sum(number for _, number in self.left_out), 'document')} read, and none has a token"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        return "no data set was made"

    def details(self) -> Iterator[str]:
        yield from (f"{plural(number, 'document')} left out: {reason}" for reason, number in self.left_out)

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain no-tokens", "what the reasons mean, and what the ways out are"),)


@dataclass(eq=False, kw_only=True)
class BadDocuments(DataError):
    """Documents that cannot be read, each with its place and what is wrong with it."""

    kind = "bad-documents"
    problems: tuple[str, ...]
    is_more: bool
    command: str
    can_skip: bool = True

    def headline(self) -> str:
        at_least = "at least " if self.is_more else ""
        return f"{at_least}{plural(len(self.problems), 'document')} cannot be read"

    def so(self) -> str | None:
        return "nothing of these files was published; what was finished before them stays"

    def details(self) -> Iterator[str]:
        yield from self.problems

    def help(self) -> tuple[Help, ...]:
        repaired = Help(self.command, "go on when they are repaired")
        if not self.can_skip:
            return (repaired,)
        return (repaired, Help(f"{self.command} --skip-bad", "leave them out and count them"))


@dataclass(eq=False, kw_only=True)
class SourceBroken(DataError):
    """A file of documents that ends too early or is not what its suffix says."""

    kind = "source-broken"
    path: Path
    reason: str

    def headline(self) -> str:
        return f"this file cannot be read to its end: {self.reason}"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        return "how many documents it lacks is not known, so it is never skipped; nothing of it was published"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"ls -l {quoted(self.path)}", "compare its size with the original's, then fetch it again"),)


@dataclass(eq=False, kw_only=True)
class ColumnMissing(DataError):
    """A Parquet file without the column that the text is read from; ``columns`` are those it has, with their types."""

    kind = "column-missing"
    path: Path
    column: str
    columns: tuple[tuple[str, str], ...]

    def headline(self) -> str:
        return f"this file has no column '{self.column}'"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        return "text is read from that column; --text-field of unbroken tokenize names another one"

    def details(self) -> Iterator[str]:
        yield from (f"column {name}: {kind}" for name, kind in self.columns[:40])
        if len(self.columns) > 40:
            yield f"and {len(self.columns) - 40} more"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken tokenize --help", "see --text-field"),)


@dataclass(eq=False, kw_only=True)
class SourcesChanged(DataError):
    """The input is not the one that the shards were made from."""

    kind = "sources-changed"
    output: Path
    changed: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    is_finished: bool = True
    command: str = "unbroken tokenize --help"

    def headline(self) -> str:
        counts = (("changed", self.changed), ("gone", self.gone), ("new", self.added))
        return "of the files of documents " + ", ".join(
            f"{len(names)} {'is' if len(names) == 1 else 'are'} {word}" for word, names in counts if names
        )

    def at(self) -> str | None:
        return str(self.output)

    def so(self) -> str | None:
        if self.changed or self.gone:
            return "the shards here are of other text; nothing was written"
        if self.is_finished:
            return "they are in no shard yet; nothing was written"
        return "the tokenization here began without them; nothing was written"

    def details(self) -> Iterator[str]:
        yield from (f"{name}: changed" for name in self.changed)
        yield from (f"{name}: gone" for name in self.gone)
        yield from (f"{name}: new" for name in self.added)

    def help(self) -> tuple[Help, ...]:
        if self.changed or self.gone or not self.is_finished:
            return (Help("unbroken explain sources-changed", "what the ways out are"),)
        return (Help(f"{self.command} --add", "tokenize the new ones alone, into shards of their own"),)


@dataclass(eq=False, kw_only=True)
class TokenizedDifferently(UsageError):
    """An output folder that holds shards, or a part of them, made with other options."""

    kind = "tokenized-differently"
    output: Path
    differences: tuple[tuple[str, str, str], ...]

    def headline(self) -> str:
        return "the shards in this folder were made with other options"

    def at(self) -> str | None:
        return str(self.output)

    def so(self) -> str | None:
        return "nothing was written; shards of two kinds in one folder would be no corpus"

    def details(self) -> Iterator[str]:
        yield from (f"{name}: {now}, and it was {then}" for name, then, now in self.differences)

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain tokenized-differently", "what the ways out are"),)


@dataclass(eq=False, kw_only=True)
class ShardsExist(UsageError):
    """An output folder with shards that no tokenization of ours recorded."""

    kind = "shards-exist"
    output: Path
    found: str

    def headline(self) -> str:
        return "this folder holds shards whose origin is not recorded"

    def at(self) -> str | None:
        return str(self.output)

    def so(self) -> str | None:
        return f"nothing was written; the first of them is {self.found}"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"ls {quoted(self.output)}", "see what is there, and name another output folder"),)


@dataclass(eq=False, kw_only=True)
class TokenizerUnknown(UsageError):
    """A tokenizer that is neither a path, nor built in, nor to be had from the hub."""

    kind = "tokenizer-unknown"
    asked: str
    reason: str

    def headline(self) -> str:
        return f"there is no tokenizer '{self.asked}'"

    def so(self) -> str | None:
        return f"nothing was written; {self.reason}"

    def details(self) -> Iterator[str]:
        yield "a tokenizer is a tokenizer.json, a folder that holds one, a name of the hub, or the built-in 'bytes'"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken tokenizer train --help", "make one of your own text"),)


@dataclass(eq=False, kw_only=True)
class NoEodToken(UsageError):
    """A tokenizer that has no token for the end of a document."""

    kind = "no-eod-token"
    tokenizer: str
    asked: str | None
    tried: tuple[str, ...]

    def headline(self) -> str:
        if self.asked is not None:
            return f"the tokenizer '{self.tokenizer}' has no token '{self.asked}'"
        return f"the tokenizer '{self.tokenizer}' has no token that ends a document"

    def so(self) -> str | None:
        return "nothing was written; every document must end with such a token"

    def details(self) -> Iterator[str]:
        if self.tried:
            yield f"looked for {', '.join(self.tried)}"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken tokenize --help", "say it with --eod-token"),)


@dataclass(eq=False, kw_only=True)
class ControlToken(DataError):
    """A document whose text became a control token, which no text may."""

    kind = "control-token"
    place: str
    token: int
    tokenizer: str

    def headline(self) -> str:
        return f"text became the control token {self.token} of the tokenizer '{self.tokenizer}'"

    def at(self) -> str | None:
        return self.place

    def so(self) -> str | None:
        return "a model would take a document's text for a command; nothing of this file was published"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain control-token", "why, and what the ways out are"),)


@dataclass(eq=False, kw_only=True)
class WorkerDied(PeerError):
    """A process that tokenized was killed or ended by itself."""

    kind = "worker-died"
    how: str
    unit: str
    command: str

    def headline(self) -> str:
        return f"a process that tokenized {self.unit} {self.how}"

    def so(self) -> str | None:
        return "what was finished stays; a machine without free memory kills processes in this way"

    def help(self) -> tuple[Help, ...]:
        return (Help(self.command, "go on; fewer --num-workers need less memory"),)


@dataclass(eq=False, kw_only=True)
class TokenizeBusy(BusyError):
    """Somebody else tokenizes into this folder."""

    kind = "tokenize-busy"
    output: Path

    def headline(self) -> str:
        return "another process tokenizes into this folder"

    def at(self) -> str | None:
        return str(self.output)

    def so(self) -> str | None:
        return "nothing was written"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"ls {quoted(self.output)}", "see what it has made so far"),)


@dataclass(eq=False, kw_only=True)
class PackageMissing(UsageError):
    """Something needs a package that this interpreter does not have."""

    kind = "package-missing"
    package: str
    purpose: str

    def headline(self) -> str:
        return f"{self.purpose} needs the package '{self.package}', and it is not installed here"

    def so(self) -> str | None:
        return "nothing was written"

    def help(self) -> tuple[Help, ...]:
        return (Help("pip install 'unbroken[train]'", "install what trains, this package with it"),)
