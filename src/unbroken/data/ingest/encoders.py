"""Encode text to token ids: the built-in byte tokenizer, and Hugging Face ``tokenizers`` for everything else.

Text stays text: the text of a control token (``<|endoftext|>``) in a document is encoded like any other text, never as
the control token. The identity of an encoder says what its ids mean.
"""

import contextlib
import importlib
import json
import os
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from unbroken.data.corpus.catalogue import TokenizerIdentity
from unbroken.data.ingest.documents import DocumentBatch
from unbroken.errors import NoEodToken, PackageMissing, TokenizerUnknown
from unbroken.files import storage_errors
from unbroken.quoting.log import logger
from unbroken.store.digest import digest_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer


# ---- the hub ----

_FILE_NAME: Final = "tokenizer.json"
_CONNECT_S: Final = 5.0
_QUIET_S: Final = 1.0
_log = logger(__name__)


def tokenizer_of_hub(name: str) -> bytes:
    """The ``tokenizer.json`` of a tokenizer on the hub, downloaded or from the local cache of ``huggingface_hub``.

    Raises:
        TokenizerUnknown: it cannot be downloaded and is not in the cache.
        PackageMissing: ``tokenizers`` or ``huggingface_hub`` is not installed.
    """
    kind = package("tokenizers").Tokenizer
    constants = package("huggingface_hub.constants")
    with _warn_if_slow(name, constants.ENDPOINT):
        refusal = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _unreachable(constants.ENDPOINT)
        # The client raises errors of its HTTP library; `tokenizers` turns them into a plain Exception.
        try:
            kept = None if refusal is None else package("huggingface_hub").try_to_load_from_cache(name, _FILE_NAME)
            if refusal is None or isinstance(kept, str):
                found = kind.from_pretrained(name) if refusal is None else kind.from_file(kept)
                content: str = found.to_str()
                return content.encode()
        except Exception as refused:
            # The first sentence says what happened; the others are advice about the client.
            reason = " ".join(str(refused).split()).partition(". ")[0][:160] or type(refused).__name__
            raise TokenizerUnknown(
                tokenizer=name, reason=f"there is no such path, and it could not be downloaded: {reason}"
            ) from refused
    reason = f"there is no such path, it is not in the local cache, and {constants.ENDPOINT} is not used: {refusal}"
    raise TokenizerUnknown(tokenizer=name, reason=reason)


def _unreachable(endpoint: str) -> str | None:
    """Why no connection can be made; None if one can, or behind a proxy. The client would retry for half a minute."""
    place = urllib.parse.urlsplit(endpoint)
    if place.hostname is None or (urllib.request.getproxies() and not urllib.request.proxy_bypass(place.hostname)):
        return None
    port = place.port or (80 if place.scheme == "http" else 443)
    try:
        socket.create_connection((place.hostname, port), timeout=_CONNECT_S).close()
    except OSError as refused:
        return refused.strerror or str(refused) or type(refused).__name__
    return None


@contextlib.contextmanager
def _warn_if_slow(name: str, endpoint: str) -> Iterator[None]:
    message = "waiting for %s: downloading tokenizer '%s' (HF_HUB_OFFLINE=1 uses only the local cache)"
    timer = threading.Timer(_QUIET_S, _log.warning, (message, endpoint, name))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def package(name: str) -> Any:  # noqa: ANN401 -- a module
    """Import a package that tokenizers need.

    Raises:
        PackageMissing: it is not installed.
    """
    # Progress bars of the hub must not reach the terminal of a command.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        return importlib.import_module(name)
    except ImportError as missing:
        raise PackageMissing(package=name, purpose="this tokenizer") from missing


# ---- encoders ----

BYTES: Final = "bytes"
FILE_NAME: Final = "tokenizer.json"
EOD_TOKENS: Final = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>", "<|end|>", "<|im_end|>"),
    *("<eod>", "<|eod|>", "<EOD>", "[SEP]"),
)
_BYTE_EOD: Final = 256


@dataclass(frozen=True)
class Encoded:
    """The ids of some documents, concatenated, and their offsets; the last offset is the end."""

    ids: NDArray[np.uint32]
    offsets: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """How many ids each document has."""
        return np.diff(self.offsets)

    def of(self, number: int) -> NDArray[np.uint32]:
        """The ids of one document."""
        return self.ids[self.offsets[number] : self.offsets[number + 1]]


class Encoder(Protocol):
    """Encodes documents to ids."""

    @property
    def identity(self) -> TokenizerIdentity:
        """What the ids mean."""

    @property
    def control(self) -> frozenset[int]:
        """The ids of control tokens, which no text may have."""

    def encode(self, batch: DocumentBatch) -> Encoded:
        """The ids of each document, without begin or end tokens."""


class TextEncoder(Encoder, Protocol):
    """An encoder that also encodes plain strings, and decodes."""

    def encode_texts(self, texts: Sequence[str]) -> Encoded:
        """The ids of each text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids."""


def joined(rows: Sequence[Sequence[int]]) -> Encoded:
    """Rows of ids, concatenated."""
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    ids = np.empty(int(offsets[-1]), np.uint32)
    for row, first, last in zip(rows, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        ids[first:last] = row
    return Encoded(ids, offsets)


class ByteEncoder:
    """Every byte of UTF-8 is an id, 256 is EOD: needs no file, no network and no training."""

    identity = TokenizerIdentity(
        name=BYTES,
        # The meaning of the ids never changes, so neither does their digest.
        digest=digest_of([b"unbroken: the byte b is the id b, and 256 ends a document"]).whole,
        vocab_size=_BYTE_EOD + 1,
        eod_id=_BYTE_EOD,
    )
    control = frozenset({_BYTE_EOD})

    def encode(self, batch: DocumentBatch) -> Encoded:
        """The bytes of each document."""
        offsets = np.zeros(len(batch.encoded) + 1, np.int64)
        np.cumsum([len(text) for text in batch.encoded], out=offsets[1:])
        return Encoded(np.frombuffer(b"".join(batch.encoded), np.uint8).astype(np.uint32), offsets)

    def encode_texts(self, texts: Sequence[str]) -> Encoded:
        """The bytes of each text."""
        return joined([list(text.encode()) for text in texts])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; invalid UTF-8 is replaced, EOD is left out."""
        return bytes(each for each in ids if each < _BYTE_EOD).decode("utf-8", "replace")


class ReferenceEncoder:
    """Hugging Face ``tokenizers``, the reference for all ids."""

    def __init__(self, tokenizer: "Tokenizer", identity: TokenizerIdentity) -> None:
        # A file may enable truncation or padding; documents need neither.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        # `encode_batch_fast` skips the offsets of tokens in the text; older versions do not have it.
        self._encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
        self.identity = identity
        special = {number: token for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self.control = frozenset(special) | {identity.eod_id}
        words = {token.content for token in special.values()} | {tokenizer.id_to_token(identity.eod_id) or ""}
        self.control_texts = tuple(sorted(words - {""}))

    def encode(self, batch: DocumentBatch) -> Encoded:
        """The ids of each document."""
        return self.encode_texts(batch.texts)

    def encode_texts(self, texts: Sequence[str]) -> Encoded:
        """The ids of each text."""
        return joined([found.ids for found in self._encode(list(texts), add_special_tokens=False)])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, without control tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer: its name and its ``tokenizer.json``; None for the built-in bytes."""

    name: str
    content: bytes | None


def find_tokenizer(asked: str) -> TokenizerFile:
    """Find a tokenizer: ``bytes``, a file, a folder that contains one, or a name on the hub.

    Raises:
        TokenizerUnknown: there is no such tokenizer.
        PackageMissing: ``tokenizers`` is not installed.
        StorageFailed: an I/O error.
    """
    path = Path(asked)
    if asked == BYTES:
        return TokenizerFile(BYTES, None)
    if path.is_dir():
        path = path / FILE_NAME
        if not path.is_file():
            raise TokenizerUnknown(tokenizer=asked, reason=f"the folder contains no {FILE_NAME}")
    if path.is_file():
        with storage_errors("read", path):
            return TokenizerFile(path.resolve().parent.name if path.name == FILE_NAME else path.name, path.read_bytes())
    if path.is_absolute() or asked.startswith((".", "~")) or asked.endswith(".json") or asked.count("/") > 1:
        raise TokenizerUnknown(tokenizer=asked, reason="there is no such file")
    return TokenizerFile(asked, tokenizer_of_hub(asked))


def load_encoder(file: TokenizerFile, eod_token: str | None = None, *, eod_id: int | None = None) -> TextEncoder:
    """An encoder for a tokenizer; EOD is given by name or id, or found among the usual names.

    Raises:
        TokenizerUnknown: the file is not a tokenizer.
        NoEodToken: it has no EOD token, or not the given one.
        PackageMissing: ``tokenizers`` is not installed.
    """
    if file.content is None:
        if eod_token is not None:
            raise NoEodToken(tokenizer=BYTES, eod_token=eod_token, tried=())
        return ByteEncoder()
    tokenizer = _parsed(file)
    identity = TokenizerIdentity(
        name=file.name,
        digest=_digest(file.content),
        # Ids may have gaps: the largest one counts.
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1,
        eod_id=_eod_id(tokenizer, file.name, eod_token) if eod_id is None else eod_id,
    )
    return ReferenceEncoder(tokenizer, identity)


def _parsed(file: TokenizerFile) -> "Tokenizer":
    try:
        text = (file.content or b"").decode()
        tokenizer: Tokenizer = package("tokenizers").Tokenizer.from_str(text)
    except PackageMissing:
        raise
    # `tokenizers` raises a plain Exception for JSON that is not a tokenizer.
    except Exception as refusal:
        reason = f"not a tokenizer file: {' '.join(str(refusal).split())[:160]}"
        raise TokenizerUnknown(tokenizer=file.name, reason=reason) from refusal
    return tokenizer


def _eod_id(tokenizer: "Tokenizer", name: str, asked: str | None) -> int:
    for token in (asked,) if asked is not None else EOD_TOKENS:
        found = tokenizer.token_to_id(token)
        if found is not None:
            return int(found)
    raise NoEodToken(tokenizer=name, eod_token=asked, tried=EOD_TOKENS if asked is None else ())


def _digest(content: bytes) -> str:
    # Over the parsed JSON: a file that was only reformatted is the same tokenizer.
    described = json.loads(content)
    return digest_of([json.dumps(described, sort_keys=True, separators=(",", ":")).encode()]).whole
