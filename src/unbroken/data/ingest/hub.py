"""A tokenizer that is named, not pointed at: from the hub, or from what an earlier visit to it left on this machine.

The hub's own client asks again and again before it gives up, and says nothing of what it waits for. Here one knock
comes first: a hub that nobody can reach is not waited for, and one that takes its time is named after a second.
"""

import contextlib
import importlib
import os
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any, Final

from unbroken.errors import PackageMissing, TokenizerUnknown
from unbroken.quoting.log import logger

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
