"""The tokenizer of a run's model: the one it was trained with, or another one with the same digest.

A run keeps its tokenizer's file and identity. A tokenizer given instead must have the same digest; if the run has none,
it must at least have no more ids than the model has rows.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unbroken.data.corpus.listing import TokenizerIdentity, identity_from_json
from unbroken.data.ingest.encoders import BYTES, FILE_NAME, TextEncoder, TokenizerFile, find_tokenizer, load_encoder
from unbroken.errors import TokenizerUnknown, WrongTokenizer
from unbroken.files import LOCAL, Files
from unbroken.gpt.checkpoint import FoundModel
from unbroken.gpt.run_files import IDENTITY, TOKENIZER
from unbroken.quoting.amounts import count
from unbroken.store.fields import Malformed

_LIMIT_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Vocabulary:
    """From text to a model's ids and back; ``file`` is the tokenizer as it was found."""

    file: TokenizerFile
    encoder: TextEncoder

    @property
    def identity(self) -> TokenizerIdentity:
        """What the ids mean."""
        return self.encoder.identity

    def encode(self, text: str) -> list[int]:
        """The ids of a text; the text of a control token is encoded as text."""
        # A lone surrogate, from a JSON escape or odd bytes on a command line, is not valid text.
        plain = text.encode("utf-8", "replace").decode()
        ids: list[int] = self.encoder.encode_texts([plain]).ids.tolist()
        return ids

    def decode_after(self, prompt: list[int], new: list[int]) -> str:
        """The text of ``new`` after ``prompt``: decoding may put a space between them."""
        before, whole = self.encoder.decode(prompt), self.encoder.decode([*prompt, *new])
        return whole[len(before) :] if whole.startswith(before) else self.encoder.decode(new)


def vocabulary_of(found: FoundModel, asked: str | None = None, files: Files = LOCAL) -> Vocabulary:
    """The tokenizer of a run's model, or the given one, if it is the same.

    Raises:
        TokenizerUnknown: the run has none and none was given, or the given one does not exist.
        WrongTokenizer: it differs, or has more ids than the model.
        PackageMissing: ``tokenizers`` is not installed.
        StorageFailed: an I/O error.
    """
    folder = found.layout.run / TOKENIZER
    trained_with = recorded_identity(folder, files)
    file = find_tokenizer(asked) if asked is not None else _kept(folder, trained_with, found, files)
    encoder = load_encoder(file, eod_id=None if trained_with is None else trained_with.eod_id)
    if trained_with is not None and trained_with.digest != encoder.identity.digest:
        said = f"the run was trained with {trained_with.name}, {count(trained_with.vocab_size)} ids, of other contents"
        raise WrongTokenizer(tokenizer=asked or str(folder), run=found.layout.run, complaint=said)
    if encoder.identity.vocab_size > found.rows:
        said = f"it has {count(encoder.identity.vocab_size)} ids, the model {count(found.rows)}"
        raise WrongTokenizer(tokenizer=asked or file.name, run=found.layout.run, complaint=said)
    return Vocabulary(file, encoder)


def recorded_identity(folder: Path, files: Files = LOCAL) -> TokenizerIdentity | None:
    """The recorded identity of a run's tokenizer; None if there is none.

    Raises:
        TokenizerUnknown: the record is damaged.
        StorageFailed: an I/O error.
    """
    path = folder / IDENTITY
    if files.find(path) is None:
        return None
    try:
        return identity_from_json(json.loads(files.read_bytes(path, limit_bytes=_LIMIT_BYTES)))
    except (Malformed, ValueError) as wrong:
        raise TokenizerUnknown(tokenizer=str(path), reason=f"the record is damaged: {wrong}") from wrong


def _kept(folder: Path, trained_with: TokenizerIdentity | None, found: FoundModel, files: Files) -> TokenizerFile:
    if trained_with is not None and trained_with.name == BYTES:
        return find_tokenizer(BYTES)
    if files.find(folder / FILE_NAME) is not None:
        return find_tokenizer(str(folder))
    # The job that started the run could not find its file; it may exist by now.
    return find_tokenizer(found.config.data.tokenizer)
