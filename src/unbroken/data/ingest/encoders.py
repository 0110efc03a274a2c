"""From text to token ids: the built-in bytes, and Hugging Face ``tokenizers`` as the reference for everything else.

Promises that text stays text: the words of a control token (``<|endoftext|>``) written in a document are encoded like
any other words, and an id that only a control token has never leaves an encoder. An identity names what the ids mean.
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
from unbroken.data.ingest.documents import Batch
from unbroken.errors import NoEodToken, PackageMissing, TokenizerUnknown
from unbroken.files import storage_errors
from unbroken.quoting.log import logger
from unbroken.store.digest import digest_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer


# ---- the hub ----

_FILE_NAME: Final = "tokenizer.json"
_KNOCK_S: Final = 5.0
_QUIET_S: Final = 1.0
_log = logger(__name__)


def tokenizer_of_hub(name: str) -> bytes:
    """The description of a tokenizer that the hub knows.

    Raises:
        TokenizerUnknown: the hub does not give it, or cannot be asked and gave it at no earlier time.
        PackageMissing: what asks the hub is not installed.
    """
    kind = package("tokenizers").Tokenizer
    constants = package("huggingface_hub.constants")
    with _named_if_slow(name, constants.ENDPOINT):
        refusal = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _refusal(constants.ENDPOINT)
        # The client of the hub raises whatever its transport does; `tokenizers` turns that into a plain Exception.
        try:
            kept = None if refusal is None else package("huggingface_hub").try_to_load_from_cache(name, _FILE_NAME)
            if refusal is None or isinstance(kept, str):
                found = kind.from_pretrained(name) if refusal is None else kind.from_file(kept)
                content: str = found.to_str()
                return content.encode()
        except Exception as refused:
            # Its first sentence says what happened; those after it advise about the client, not about the command.
            reason = " ".join(str(refused).split()).partition(". ")[0][:160] or type(refused).__name__
            raise TokenizerUnknown(
                asked=name, reason=f"there is no such path, and the hub did not give it: {reason}"
            ) from refused
    reason = f"there is no such path, none is kept from the hub here, and {constants.ENDPOINT} is not asked: {refusal}"
    raise TokenizerUnknown(asked=name, reason=reason)


def _refusal(endpoint: str) -> str | None:
    """Why no connection can be made; None where one can, or where only a proxy could say."""
    place = urllib.parse.urlsplit(endpoint)
    if place.hostname is None or (urllib.request.getproxies() and not urllib.request.proxy_bypass(place.hostname)):
        return None
    port = place.port or (80 if place.scheme == "http" else 443)
    try:
        socket.create_connection((place.hostname, port), timeout=_KNOCK_S).close()
    except OSError as refused:
        return refused.strerror or str(refused) or type(refused).__name__
    return None


@contextlib.contextmanager
def _named_if_slow(name: str, endpoint: str) -> Iterator[None]:
    words = "waiting for %s to give the tokenizer '%s'; with HF_HUB_OFFLINE=1 only this machine is asked"
    timer = threading.Timer(_QUIET_S, _log.warning, (words, endpoint, name))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def package(name: str) -> Any:  # noqa: ANN401 -- a module
    """One of the packages that know tokenizers.

    Raises:
        PackageMissing: it is not installed.
    """
    # Nothing of a progress bar or of telemetry may reach the terminal of a command.
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
    """The ids of some documents end to end, and where each begins; the last of the offsets is the end."""

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
    """What turns documents into ids."""

    @property
    def identity(self) -> TokenizerIdentity:
        """What the ids mean."""

    @property
    def control(self) -> frozenset[int]:
        """The ids that no text may become."""

    def encode(self, batch: Batch) -> Encoded:
        """The ids of each document, without any that mark its beginning or end."""


class TextEncoder(Encoder, Protocol):
    """An encoder that also takes plain texts, and gives text back."""

    def encode_texts(self, texts: Sequence[str]) -> Encoded:
        """The ids of each text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids."""


def joined(rows: Sequence[Sequence[int]]) -> Encoded:
    """Rows of ids laid end to end."""
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    ids = np.empty(int(offsets[-1]), np.uint32)
    for row, first, last in zip(rows, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        ids[first:last] = row
    return Encoded(ids, offsets)


class ByteEncoder:
    """Every byte of UTF-8 is an id, 256 ends a document: needs no file, no network and no training."""

    identity = TokenizerIdentity(
        name=BYTES,
        # What the ids mean never changes, so neither does what stands for it.
        digest=digest_of([b"unbroken: the byte b is the id b, and 256 ends a document"]).whole,
        vocab_size=_BYTE_EOD + 1,
        eod_id=_BYTE_EOD,
    )
    control = frozenset({_BYTE_EOD})

    def encode(self, batch: Batch) -> Encoded:
        """The bytes of each document."""
        offsets = np.zeros(len(batch.encoded) + 1, np.int64)
        np.cumsum([len(text) for text in batch.encoded], out=offsets[1:])
        return Encoded(np.frombuffer(b"".join(batch.encoded), np.uint8).astype(np.uint32), offsets)

    def encode_texts(self, texts: Sequence[str]) -> Encoded:
        """The bytes of each text."""
        return joined([list(text.encode()) for text in texts])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; what is no UTF-8 is shown as such, and the end of a document is no text."""
        return bytes(each for each in ids if each < _BYTE_EOD).decode("utf-8", "replace")


class ReferenceEncoder:
    """Hugging Face ``tokenizers``: what it says is what is right."""

    def __init__(self, tokenizer: "Tokenizer", identity: TokenizerIdentity) -> None:
        # A file may ask for texts cut or filled to one length; a document is neither.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        # `encode_batch_fast` leaves out where each token stood in the text; older versions do not have it.
        self._encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
        self.identity = identity
        special = {number: token for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self.control = frozenset(special) | {identity.eod_id}
        words = {token.content for token in special.values()} | {tokenizer.id_to_token(identity.eod_id) or ""}
        self.control_texts = tuple(sorted(words - {""}))

    def encode(self, batch: Batch) -> Encoded:
        """The ids of each document, as the reference has them."""
        return self.encode_texts(batch.texts)

    def encode_texts(self, texts: Sequence[str]) -> Encoded:
        """The ids of each text."""
        return joined([found.ids for found in self._encode(list(texts), add_special_tokens=False)])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, without control tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer as it was found: its name, and the JSON that describes it; None for the built-in bytes."""

    name: str
    content: bytes | None


def find_tokenizer(asked: str) -> TokenizerFile:
    """The tokenizer that a person means: ``bytes``, a file, a folder that holds one, or a name of the hub.

    Raises:
        TokenizerUnknown: there is none.
        PackageMissing: ``tokenizers`` is not installed.
        StorageFailed: the system refused to read it.
    """
    path = Path(asked)
    if asked == BYTES:
        return TokenizerFile(BYTES, None)
    if path.is_dir():
        path = path / FILE_NAME
        if not path.is_file():
            raise TokenizerUnknown(asked=asked, reason=f"the folder holds no {FILE_NAME}")
    if path.is_file():
        with storage_errors("read", path):
            return TokenizerFile(path.resolve().parent.name if path.name == FILE_NAME else path.name, path.read_bytes())
    if path.is_absolute() or asked.startswith((".", "~")) or asked.endswith(".json") or asked.count("/") > 1:
        raise TokenizerUnknown(asked=asked, reason="there is no such file")
    return TokenizerFile(asked, tokenizer_of_hub(asked))


def load_encoder(file: TokenizerFile, eod_token: str | None = None, *, eod_id: int | None = None) -> TextEncoder:
    """An encoder for a tokenizer; the token that ends a document is named, known by its id, or found by itself.

    Raises:
        TokenizerUnknown: the file is no tokenizer.
        NoEodToken: it has no token that ends a document, or not the one that was asked for.
        PackageMissing: ``tokenizers`` is not installed.
    """
    if file.content is None:
        if eod_token is not None:
            raise NoEodToken(tokenizer=BYTES, asked=eod_token, tried=())
        return ByteEncoder()
    tokenizer = _parsed(file)
    identity = TokenizerIdentity(
        name=file.name,
        digest=_digest(file.content),
        # Ids may have holes: what counts is the largest.
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
    # `tokenizers` raises a plain Exception for JSON that describes no tokenizer.
    except Exception as refusal:
        reason = f"the file describes none: {' '.join(str(refusal).split())[:160]}"
        raise TokenizerUnknown(asked=file.name, reason=reason) from refusal
    return tokenizer


def _eod_id(tokenizer: "Tokenizer", name: str, asked: str | None) -> int:
    for token in (asked,) if asked is not None else EOD_TOKENS:
        found = tokenizer.token_to_id(token)
        if found is not None:
            return int(found)
    raise NoEodToken(tokenizer=name, asked=asked, tried=EOD_TOKENS if asked is None else ())


def _digest(content: bytes) -> str:
    # Over the meaning, not the spelling: a file that was only laid out anew is the same tokenizer.
    described = json.loads(content)
    return digest_of([json.dumps(described, sort_keys=True, separators=(",", ":")).encode()]).whole
