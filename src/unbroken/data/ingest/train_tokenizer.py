"""Train a small byte-level BPE tokenizer: the same documents give the same file, byte for byte."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unbroken.data.ingest.documents import BadDocument, Reader, Stretch
from unbroken.data.ingest.sources import TextSource, find_sources
from unbroken.errors import BadDocuments, Help, NoTextFound, PackageMissing, WouldOverwrite
from unbroken.errors.tree import quoted
from unbroken.files import LOCAL, Files
from unbroken.store.digest import BlockDigester

EOD: Final = "<|endoftext|>"
# 256 bytes and the end of a document.
LEAST_VOCABULARY: Final = 257
_MOST_PROBLEMS: Final = 20


@dataclass(frozen=True)
class TrainedTokenizer:
    """The trained tokenizer: its path, its vocabulary size, and the size of its text."""

    path: Path
    vocab_size: int
    documents: int
    text_bytes: int


class _Texts:
    """The documents of a folder, counted as they are read."""

    def __init__(self, folder: Path, text_field: str) -> None:
        self.documents = 0
        self.text_bytes = 0
        self.problems: list[BadDocument] = []
        self._sources = find_sources(folder).sources
        self._reader = Reader(folder, text_field, self._report)

    def _report(self, bad: BadDocument) -> None:
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(bad)

    def __iter__(self) -> Iterator[list[str]]:
        for source in self._sources:
            yield from self._of(source)

    def _of(self, source: TextSource) -> Iterator[list[str]]:
        stretch = Stretch(source.name, 0, source.size_bytes)
        for batch in self._reader.batches(stretch, source.kind, BlockDigester()):
            self.documents += len(batch.texts)
            self.text_bytes += batch.size_bytes
            yield batch.texts


def train_tokenizer(
    input_dir: Path, output: Path, *, vocab_size: int, text_field: str = "text", files: Files = LOCAL
) -> TrainedTokenizer:
    """Train a byte-level BPE on all documents below a folder and write its ``tokenizer.json`` atomically.

    Raises:
        PathMissing: the input folder does not exist.
        NoTextFound: it holds no document.
        BadDocuments: documents cannot be read.
        SourceBroken: a file is truncated.
        WouldOverwrite: the output exists.
        PackageMissing: ``tokenizers`` is not installed.
        ValueError: the vocabulary is smaller than the number of bytes.
        StorageFailed: an I/O error.
    """
    if vocab_size < LEAST_VOCABULARY:
        raise ValueError(f"a vocabulary has at least {LEAST_VOCABULARY} ids: 256 bytes and the end of a document")
    if files.find(output) is not None:
        another = output.with_name(f"{output.stem}-2{output.suffix}")
        command = f"unbroken tokenizer train {quoted(input_dir)} -o {quoted(another)} --vocab-size {vocab_size}"
        raise WouldOverwrite(path=output, remedy=Help(command, "write to another path"))
    texts = _Texts(input_dir, text_field)
    content = _learn(texts, vocab_size)
    if texts.problems:
        command = f"unbroken tokenizer train {quoted(input_dir)} -o {quoted(output)} --vocab-size {vocab_size}"
        if text_field != "text":
            command += f" --text-field {quoted(text_field)}"
        problems = tuple(str(problem) for problem in texts.problems)
        raise BadDocuments(problems=problems, is_more=len(problems) == _MOST_PROBLEMS, command=command, can_skip=False)
    if not texts.text_bytes:
        raise NoTextFound(path=input_dir, known=("a document that is not empty",))
    files.make_directory(output.parent)
    # crash here: no file under the name, or a whole one; a scratch file may be left, which the next start removes.
    files.replace(output, content.encode(), scratch=f".writing-{output.name}")
    return TrainedTokenizer(output, _size_of(content), texts.documents, texts.text_bytes)


def _learn(texts: _Texts, vocab_size: int) -> str:
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as missing:
        raise PackageMissing(package="tokenizers", purpose="training a tokenizer") from missing
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    content: str = tokenizer.to_str(pretty=True)
    return content


def _size_of(content: str) -> int:
    from tokenizers import Tokenizer

    size: int = Tokenizer.from_str(content).get_vocab_size()
    return size
