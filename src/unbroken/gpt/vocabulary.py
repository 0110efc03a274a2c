"""What a model's ids mean: the tokenizer a run was trained with, and proof that another one offered is the same.

A run keeps its tokenizer's file and identity. A tokenizer that is named instead must have the same digest; where a run
kept none, it must at least have no more ids than the model has rows.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unbroken.data.corpus.listing import TokenizerIdentity, identity_from_json
from unbroken.data.ingest.encoders import BYTES, FILE_NAME, TextEncoder, TokenizerFile, find_tokenizer, load_encoder
from unbroken.errors import TokenizerUnknown, WrongTokenizer
from unbroken.files import LOCAL, Files
from unbroken.gpt.checkpoint import Found
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
        """The ids of a text; the words of a control token are words."""
        # A lone surrogate, which an escape in JSON or odd bytes on a command line leave, is no text.
        plain = text.encode("utf-8", "replace").decode()
        ids: list[int] = self.encoder.encode_texts([plain]).ids.tolist()
        return ids

    def decode_after(self, prompt: list[int], new: list[int]) -> str:
        """The text of ``new`` as it stands behind ``prompt``: a blank may belong to the place between them."""
        before, whole = self.encoder.decode(prompt), self.encoder.decode([*prompt, *new])
        return whole[len(before) :] if whole.startswith(before) else self.encoder.decode(new)


def vocabulary_of(found: Found, asked: str | None = None, files: Files = LOCAL) -> Vocabulary:
    """The tokenizer of a run's model, or the one that was asked for, if it is the same.

    Raises:
        TokenizerUnknown: the run kept none and none was named, or the one that was named is not there.
        WrongTokenizer: it is another one, or has more ids than the model.
        PackageMissing: ``tokenizers`` is not installed.
        StorageFailed: the system refused to read.
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
    """What a run says about its ids; None where it says nothing.

    Raises:
        TokenizerUnknown: the record is not what a job wrote.
        StorageFailed: the system refused to read.
    """
    path = folder / IDENTITY
    if files.find(path) is None:
        return None
    try:
        return identity_from_json(json.loads(files.read_bytes(path, limit_bytes=_LIMIT_BYTES)))
    except (Malformed, ValueError) as wrong:
        raise TokenizerUnknown(asked=str(path), reason=f"the record is not what a job wrote: {wrong}") from wrong


def _kept(folder: Path, trained_with: TokenizerIdentity | None, found: Found, files: Files) -> TokenizerFile:
    if trained_with is not None and trained_with.name == BYTES:
        return find_tokenizer(BYTES)
    if files.find(folder / FILE_NAME) is not None:
        return find_tokenizer(str(folder))
    # The job that started the run could not find its file; it may be there by now.
    return find_tokenizer(found.config.data.tokenizer)
