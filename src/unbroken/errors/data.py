"""Errors of data: text that cannot be tokenized, shards that are damaged or changed, batches that do not fit."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from unbroken.errors.tree import (
    BusyError,
    DataError,
    Each,
    ExactnessError,
    Help,
    PeerError,
    UsageError,
    each_line,
    quoted,
)
from unbroken.quoting.amounts import plural

# ---- text to shards ----


class NoTextFound(DataError):
    """An input folder without a file of documents."""

    kind = "no-text-found"
    path: Path
    known: tuple[str, ...]
    unknown: tuple[str, ...] = ()
    HEADLINE = "no file of documents in this folder"
    SO = "nothing was written; supported formats: {known:list}"
    HELP = (Help("ls {path:sh}", "list what is there"),)

    def details(self) -> Iterator[str]:
        yield from each_line(self.unknown[:20], "{0}: unsupported suffix")


class NoTokens(DataError):
    """Documents of which none gave a token; ``left_out`` counts them by reason."""

    kind = "no-tokens"
    path: Path
    left_out: tuple[tuple[str, int], ...] = ()
    SO = "no data set was written"
    DETAILS = Each("left_out", "{1:n document} left out: {0}")
    HELP = (Help("unbroken explain {kind}", "what the reasons mean, and what to do"),)

    def headline(self) -> str:
        if not self.left_out:
            return "the files in this folder contain no documents"
        return f"{plural(sum(number for _, number in self.left_out), 'document')} read, and none of them has tokens"


class BadDocuments(DataError):
    """Documents that cannot be read, each with its place and what is wrong with it."""

    kind = "bad-documents"
    problems: tuple[str, ...]
    is_more: bool
    command: str
    can_skip: bool = True
    SO = "no shards of these files were published; files finished before them are kept"
    DETAILS = Each("problems")

    def headline(self) -> str:
        at_least = "at least " if self.is_more else ""
        return f"{at_least}{plural(len(self.problems), 'document')} cannot be read"

    def help(self) -> tuple[Help, ...]:
        repaired = Help(self.command, "continue once they are repaired")
        if not self.can_skip:
            return (repaired,)
        return (repaired, Help(f"{self.command} --skip-bad", "skip and count them"))


class SourceBroken(DataError):
    """A file of documents that ends too early or does not match its suffix."""

    kind = "source-broken"
    path: Path
    reason: str
    HEADLINE = "this file cannot be read to its end: {reason}"
    SO = "the number of missing documents is unknown, so the file is never skipped; nothing of it was published"
    HELP = (Help("ls -l {path:sh}", "compare its size with the original, then copy it again"),)


class ColumnMissing(DataError):
    """A Parquet file without the column that the text is read from; ``columns`` are those it has, with their types."""

    kind = "column-missing"
    path: Path
    column: str
    columns: tuple[tuple[str, str], ...]
    HEADLINE = "this file has no column '{column}'"
    SO = "text is read from that column; choose another one with unbroken tokenize --text-field"
    DETAILS = Each("columns", "column {0}: {1}", most=40)
    HELP = (Help("unbroken tokenize --help", "see --text-field"),)


class SourcesChanged(DataError):
    """The input files are not those the shards were made from."""

    kind = "sources-changed"
    output: Path
    changed: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    is_finished: bool = True
    command: str = "unbroken tokenize --help"
    AT = "{output}"

    def headline(self) -> str:
        counts = (("changed", self.changed), ("missing", self.gone), ("new", self.added))
        return "the input files have changed: " + ", ".join(f"{len(names)} {word}" for word, names in counts if names)

    def so(self) -> str | None:
        if self.changed or self.gone:
            return "the shards here were made from other text; nothing was written"
        if self.is_finished:
            return "the new files are not in any shard yet; nothing was written"
        return "the tokenization here was started without them; nothing was written"

    def details(self) -> Iterator[str]:
        yield from each_line(self.changed, "{0}: changed")
        yield from each_line(self.gone, "{0}: missing")
        yield from each_line(self.added, "{0}: new")

    def help(self) -> tuple[Help, ...]:
        if self.changed or self.gone or not self.is_finished:
            return (self.explained("what you can do"),)
        return (Help(f"{self.command} --add", "tokenize only the new files, into shards of their own"),)


class TokenizedDifferently(UsageError):
    """An output folder with shards, or some of them, made with other options."""

    kind = "tokenized-differently"
    output: Path
    differences: tuple[tuple[str, str, str], ...]
    HEADLINE = "the shards in this folder were made with other options"
    AT = "{output}"
    SO = "nothing was written; all shards of a folder must be made with the same options"
    DETAILS = Each("differences", "{0}: {2}, was {1}")
    HELP = (Help("unbroken explain {kind}", "what you can do"),)


class ShardsExist(UsageError):
    """An output folder with shards that `unbroken tokenize` did not record."""

    kind = "shards-exist"
    output: Path
    found: str
    HEADLINE = "this folder already has shards that unbroken tokenize did not record"
    AT = "{output}"
    SO = "nothing was written; the first of them is {found}"
    HELP = (Help("ls {output:sh}", "list what is there, then choose another output folder"),)


class TokenizationUnfinished(DataError):
    """A tokenization into this folder is not finished; ``command`` finishes it."""

    kind = "tokenization-unfinished"
    path: Path
    command: str
    HEADLINE = "the tokenization into this folder is not finished"
    SO = "it was killed or is still running; the same command resumes it"
    HELP = (Help("{command}", "finish it"),)


class TokenizerUnknown(UsageError):
    """A tokenizer that is not a path, not built in, and not on the hub."""

    kind = "tokenizer-unknown"
    tokenizer: str
    reason: str
    HEADLINE = "tokenizer '{tokenizer}' not found"
    SO = "nothing was written; {reason}"
    HELP = (Help("unbroken tokenizer train --help", "train a tokenizer on your own text"),)

    def details(self) -> Iterator[str]:
        yield "a tokenizer is a tokenizer.json, a folder that has one, a name on the hub, or the built-in 'bytes'"


class NoEodToken(UsageError):
    """A tokenizer without a token for the end of a document."""

    kind = "no-eod-token"
    tokenizer: str
    eod_token: str | None
    tried: tuple[str, ...]
    SO = "nothing was written; every document must end with an end-of-document token"
    HELP = (Help("unbroken tokenize --help", "set one with --eod-token"),)

    def headline(self) -> str:
        if self.eod_token is not None:
            return f"the tokenizer '{self.tokenizer}' has no token '{self.eod_token}'"
        return f"the tokenizer '{self.tokenizer}' has no end-of-document token"

    def details(self) -> Iterator[str]:
        if self.tried:
            yield f"looked for {', '.join(self.tried)}"


class ControlToken(DataError):
    """The text of a document was encoded as a control token."""

    kind = "control-token"
    place: str
    token: int
    tokenizer: str
    HEADLINE = "text was encoded as the control token {token} of the tokenizer '{tokenizer}'"
    AT = "{place}"
    SO = "the model would read text as a control token; nothing of this file was published"
    HELP = (Help("unbroken explain {kind}", "why it happens, and what you can do"),)


class WorkerDied(PeerError):
    """A tokenizer process was killed or crashed."""

    kind = "worker-died"
    how: str
    unit: str
    command: str
    HEADLINE = "the worker that tokenized {unit} {how}"
    SO = "finished files are kept; a worker is often killed when the machine is out of memory"
    HELP = (Help("{command}", "resume; fewer --num-workers need less memory"),)


class TokenizeBusy(BusyError):
    """Other processes tokenize an earlier state of the text into this folder."""

    kind = "tokenize-busy"
    output: Path
    HEADLINE = "other processes are tokenizing an earlier state of this text into this folder"
    AT = "{output}"
    SO = "nothing was written; run the command again when they have ended"
    HELP = (Help("unbroken explain {kind}", "how to find them"),)


class TokenizeNotShared(UsageError):
    """A worker does not see the work folder of the tokenization."""

    kind = "tokenize-not-shared"
    output: Path
    host: str
    HEADLINE = "a worker on {host} does not see the plan of this tokenization"
    AT = "{output}"
    SO = "the output directory must be on storage that all workers share, under the same path"
    HELP = (Help("df -h {output:sh}", "on each machine: is it the same file system?"),)


# ---- shards ----


class ShardDamaged(DataError):
    """A file of a shard does not match its header or its index."""

    kind = "shard-damaged"
    path: Path
    complaint: str
    HEADLINE = "a shard is damaged: {complaint}"
    SO = "nothing is read from it; copy it again or tokenize its source again"
    HELP = (Help("unbroken explain {kind}", "what a valid shard looks like"),)


class DataDamaged(DataError):
    """A folder of shards does not match its files or its list; every finding at once."""

    kind = "data-damaged"
    path: Path
    findings: tuple[str, ...]
    HEADLINE = "the data is damaged: {findings:n problem}"
    SO = "nothing was read from it; each line below names a file under this folder"
    DETAILS = Each("findings")
    HELP = (Help("unbroken explain {kind}", "what to do about each problem"),)


class DataMissing(DataError):
    """There is no data at the path."""

    kind = "data-missing"
    path: Path
    lacks: str
    # Whether there are shards in the path itself, where a split of them is expected.
    has_shards: bool = False

    def headline(self) -> str:
        lacks = "it is a file, and data must be a folder" if self.path.is_file() else self.lacks
        return f"no data found: {lacks}"

    @property
    def _has_train(self) -> bool:
        """Whether it is a data folder, and only its other split is missing."""
        return self.has_shards and self.path.joinpath("train").is_dir()

    def so(self) -> str | None:
        if self._has_train:
            return "it has train/; put shards of the other split beside it, in PATH/val/, in the same buckets"
        if self.has_shards:
            return "it has the shards of one split: move them to PATH/train/, and use PATH as the data path"
        return "shards are expected in PATH/train/BUCKET/, or in PATH/train/ for one bucket called default"

    def help(self) -> tuple[Help, ...]:
        if self._has_train:
            made = f"unbroken tokenize --input-dir TEXT --output-dir {quoted(self.path / 'val')} --tokenizer-path NAME"
            return (Help(made, "create it, with the tokenizer of train/"),)
        if self.has_shards and self.path.name in ("train", "val"):
            return (Help(f"unbroken data inspect {quoted(self.path.parent)}", "show the folder it is a split of"),)
        if self.has_shards:
            folder, aside = quoted(self.path), quoted(f"{self.path}-train")
            moved = f"mv {folder} {aside} && mkdir {folder} && mv {aside} {quoted(self.path / 'train')}"
            return (Help(moved, "make it the train/ of a data folder"),)
        nearest = next(above for above in (self.path, *self.path.parents, Path()) if above.exists())
        return (Help(f"ls {quoted(nearest)}", "list what is there"),)


class TokenizersDiffer(DataError):
    """Folders of one corpus were made with different tokenizers, or with tokens of different sizes."""

    kind = "tokenizers-differ"
    path: Path
    found: tuple[tuple[str, str], ...]
    # Whether the last of them is the configured one, which made none of the shards.
    is_asked: bool = False
    SO = "the same token id means different text in each of them"
    HELP = (Help("unbroken explain {kind}", "how to fix it"),)

    def headline(self) -> str:
        if self.is_asked:
            return "this data was not made with the configured tokenizer"
        return "the folders of this data were made with different tokenizers"

    def details(self) -> Iterator[str]:
        width = max(len(folder) for folder, _ in self.found)
        yield from (f"{folder:<{width}}  {what}" for folder, what in self.found)


ServedShare = Literal["none", "some", "all"]
_SERVED: Final = {
    "none": "none of its documents were served",
    "some": "some of its documents were served",
    "all": "all its documents were served",
}


@dataclass(frozen=True)
class ShardChange:
    """One shard that has changed since the run was started: its name, the difference, how much of it was served."""

    bucket: str
    name: str
    difference: str
    served: ServedShare | None = None

    def __str__(self) -> str:
        served = f"; {_SERVED[self.served]}" if self.served else ""
        return f"{self.bucket}/{self.name}: {self.difference}{served}"


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
        counts = ((self.changed, "changed"), (self.missing, "missing"), (self.added, "added"))
        said = ", ".join(f"{plural(len(each), 'shard')} {what}" for each, what in counts if each)
        return f"the data has changed since the run was started: {said}"

    def so(self) -> str | None:
        if self.is_growth:
            return "the known shards are unchanged; to train on the new ones too: --accept data.grow"
        return "the samples would differ from those of one long job; nothing was loaded"

    def details(self) -> Iterator[str]:
        yield from map(str, (*self.changed, *self.missing, *self.added))

    def help(self) -> tuple[Help, ...]:
        if self.is_growth:
            return (self.explained("how to add shards to a run"),)
        # The path is that of a split; verify takes the folder above, with all its splits.
        return (Help(f"unbroken data verify {quoted(self.path.parent)}", "verify the shards against their list"),)


class SequenceDamaged(DataError):
    """The bytes of a sequence are not those it had when its digest was taken."""

    kind = "sequence-damaged"
    root: Path
    sample: int
    shards: tuple[str, ...]
    HEADLINE = "the bytes of sample {sample:,} have changed since they were first read"
    AT = "{root}"
    SO = "the sample is not used; one of the shards it is read from is damaged"
    DETAILS = Each("shards", most=8)
    HELP = (Help("unbroken data verify {root:sh}", "find the damaged shard"),)


# ---- data and config ----


class BadMix(DataError):
    """Curriculum phases that do not fit the data: every problem at once."""

    kind = "bad-mix"
    problems: tuple[str, ...]
    buckets: tuple[str, ...]
    HEADLINE = "the curriculum does not fit the data: {problems:n problem}"
    DETAILS = Each("problems")
    HELP = (Help("unbroken explain data.curriculum", "what a phase is"),)

    def so(self) -> str | None:
        return f"the buckets are the folders in train/: {', '.join(self.buckets) or 'there are none'}"


class DataUnfit(DataError):
    """Data that is valid and does not fit the config: every problem at once."""

    kind = "data-unfit"
    path: Path
    problems: tuple[str, ...]
    has_shards: bool = True
    HEADLINE = "the data does not fit this config: {problems:n problem}"
    SO = "nothing was started"
    DETAILS = Each("problems")

    def help(self) -> tuple[Help, ...]:
        stats = Help(f"unbroken data stats {quoted(self.path)}", "show the tokens of each bucket")
        explained = self.explained("what to do about each problem")
        return (stats, explained) if self.has_shards else (explained,)


class LanesUnfit(UsageError):
    """A step cannot be divided into lanes, or the lanes cannot be divided among the ranks."""

    kind = "lanes-unfit"
    global_batch: int
    lane: int | None
    world: int
    complaint: str
    HEADLINE = "the lanes do not fit: {complaint}"
    SO = "every rank needs at least one lane of every step; smaller lanes allow larger world sizes"
    HELP = (Help("unbroken explain {kind}", "which sizes fit together"),)

    def at(self) -> str | None:
        lane = "one lane per rank" if self.lane is None else f"lanes of {self.lane}"
        return f"global batch size {self.global_batch}, {lane}, world size {self.world}"


class StreamDiffers(ExactnessError):
    """The stream is not the one the state was taken from: its samples would differ."""

    kind = "stream-differs"
    differences: tuple[tuple[str, str, str], ...]
    SO = "the samples would differ from those of one long job; nothing was loaded"
    DETAILS = Each("differences", "{0}: {1} in the checkpoint, {2} now")
    HELP = (Help("unbroken explain {kind}", "which settings must not change"),)

    def headline(self) -> str:
        return f"the data stream differs from the checkpoint's: {', '.join(name for name, _, _ in self.differences)}"
