"""The object-store client: the only module that speaks obstore, and with ``files`` the only one that changes storage.

Credentials are found by the usual chains and never leave the library. A request is repeated inside the library with
backoff; what it gives up on is raised as one of our errors, and the caller decides when to try again.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

from unbroken.errors import BadEndpoint, ClientMissing, MirrorUnreachable, NoCredentials, UnbrokenError
from unbroken.mirror import credentials
from unbroken.mirror.address import Address, is_server
from unbroken.mirror.client import Found, piece_bytes
from unbroken.mirror.refusals import classified, code_of

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")
_CONNECT: Final = timedelta(seconds=10)
# A piece of 16 MiB over a slow line takes its time; a server that says nothing for so long is given up.
_REQUEST: Final = timedelta(seconds=120)
_RETRY: Final[Any] = {
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=5), "base": 2},
}
_DELETED_AT_ONCE: Final = 500


class ObjectClient:
    """S3, Google Cloud Storage or Azure at one address."""

    def __init__(self, address: Address, environ: Mapping[str, str] = os.environ) -> None:
        self.address = address
        self._environ = environ
        self._lock = threading.Lock()
        self._opened: ObjectStore | None = None
        # Now, so that a missing library or missing credentials are met before the first checkpoint.
        self._store()

    def has_checksum(self, size_bytes: int) -> bool:
        """S3 always, Google Cloud for what was sent in one piece, Azure never."""
        return self.address.scheme == "s3" or (self.address.scheme == "gs" and size_bytes <= piece_bytes(size_bytes))

    def create(self, key: str, data: bytes) -> bool:
        """A conditional put; of many at the same time one wins."""
        obs = _library(self.address)

        def ask(store: "ObjectStore") -> bool:
            try:
                obs.put(store, key, data, mode="create", use_multipart=False)
            except obs.exceptions.AlreadyExistsError:
                return False
            return True

        return self._asked("create", ask)

    def put(self, key: str, chunks: Iterator[bytes | memoryview], size_bytes: int, *, in_flight: int) -> None:
        """A put, or a parallel multipart put for what is larger than one piece."""
        obs, piece, raised = _library(self.address), piece_bytes(size_bytes), list[BaseException]()

        def guarded() -> Iterator[bytes | memoryview]:
            # The library wraps what an iterator raises into an error of its own; the caller needs the first one.
            try:
                yield from chunks
            except BaseException as own:
                raised.append(own)
                raise

        def ask(store: "ObjectStore") -> None:
            if size_bytes <= piece:
                # One chunk is sent from where it is.
                pieces = list(guarded())
                obs.put(store, key, pieces[0] if len(pieces) == 1 else b"".join(pieces), use_multipart=False)
            else:
                obs.put(store, key, guarded(), use_multipart=True, chunk_size=piece, max_concurrency=in_flight)

        try:
            # What was given out once is not there to be sent again.
            self._asked("write", ask, is_repeatable=False)
        except UnbrokenError:
            if raised:
                raise raised[0] from None
            raise

    def find(self, key: str) -> Found | None:
        """A head request."""
        obs = _library(self.address)

        def ask(store: "ObjectStore") -> Found | None:
            try:
                return _found(obs.head(store, key))
            except FileNotFoundError:
                return None
            except obs.exceptions.PermissionDeniedError:
                # An answer to a head has no body and so no reason: a listing is refused with one.
                list(obs.list(store, prefix=key, chunk_size=1))
                raise

        return self._asked("look at", ask)

    def read(self, key: str, start: int, end: int) -> bytes:
        """A ranged get."""
        obs = _library(self.address)
        if end <= start:
            return b""

        def ask(store: "ObjectStore") -> bytes:
            data: bytes = obs.get_range(store, key, start=start, end=end).to_bytes()
            return data

        return self._asked("read", ask)

    def fill(self, key: str, start: int, into: memoryview) -> int:
        """A ranged get, copied once."""
        obs = _library(self.address)
        if not into:
            return 0

        def ask(store: "ObjectStore") -> int:
            data = memoryview(obs.get_range(store, key, start=start, end=start + len(into)))
            into[: len(data)] = data
            return len(data)

        return self._asked("read", ask)

    def listing(self, below: str) -> Iterable[Found]:
        """Every object below a key."""
        obs = _library(self.address)

        def ask(store: "ObjectStore") -> list[Found]:
            return [_found(each) for page in obs.list(store, prefix=below or None) for each in page]

        return self._asked("list", ask)

    def level(self, below: str) -> tuple[list[str], list[Found]]:
        """One level below a key."""
        obs = _library(self.address)

        def ask(store: "ObjectStore") -> tuple[list[str], list[Found]]:
            page = obs.list_with_delimiter(store, prefix=below or None)
            folders = [each.rstrip("/").rpartition("/")[2] for each in page["common_prefixes"]]
            return folders, [_found(each) for each in page["objects"]]

        return self._asked("list", ask)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, hundreds with one request."""
        obs, named = _library(self.address), list(keys)

        def ask(store: "ObjectStore") -> None:
            for start in range(0, len(named), _DELETED_AT_ONCE):
                try:
                    obs.delete(store, named[start : start + _DELETED_AT_ONCE])
                except FileNotFoundError:
                    continue

        self._asked("delete", ask)

    def _asked(self, operation: str, ask: "Callable[[ObjectStore], T]", *, is_repeatable: bool = True) -> T:
        try:
            return self._asked_once(operation, ask)
        except NoCredentials:
            if not is_repeatable:
                raise
        # Another program may have renewed the keys since they were read.
        return self._asked_once(operation, ask)

    def _asked_once(self, operation: str, ask: "Callable[[ObjectStore], T]") -> T:
        obs = _library(self.address)
        try:
            return ask(self._store())
        except FileNotFoundError as absent:
            if code_of(str(absent)) in (None, "NoSuchKey", "BlobNotFound"):
                raise
            raise classified(str(absent), self.address, operation) from None
        except obs.exceptions.BaseError as refused:
            error = classified(str(refused), self.address, operation, self._server())
        except OSError as broken:
            error = MirrorUnreachable(mirror=str(self.address), operation=operation, cause=type(broken).__name__)
        if isinstance(error, NoCredentials):
            # The chain is asked anew the next time.
            with self._lock:
                self._opened = None
        # Without the library's own error behind it: its text is long and is not ours to log.
        raise error from None

    def _server(self) -> str:
        """The server that the environment names, without what may be a password; empty for the cloud's own."""
        endpoint = _endpoint(self.address, self._environ)
        parts = urlsplit(endpoint or "")
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if endpoint else ""

    def _store(self) -> "ObjectStore":
        with self._lock:
            if self._opened is None:
                self._opened = _opened(self.address, self._environ)
            return self._opened


def _library(address: Address) -> Any:  # noqa: ANN401 -- the module, imported only where an object store is used
    try:
        import obstore
        import obstore.exceptions
    except ImportError as absent:
        raise ClientMissing(mirror=str(address)) from absent
    return obstore


def _found(meta: Mapping[str, Any]) -> Found:
    etag = meta.get("e_tag")
    return Found(meta["path"], meta["size"], etag.strip('"') if isinstance(etag, str) else None)


def _opened(address: Address, environ: Mapping[str, str]) -> "ObjectStore":
    _library(address)
    opening = {"s3": _s3, "gs": _gcs, "az": _azure}[address.scheme]
    try:
        return opening(address, environ)
    except UnbrokenError:
        raise
    except Exception as refused:  # noqa: BLE001 -- the library raises its own errors and ValueError for bad settings
        raise classified(str(refused), address, "open") from None


_ENDPOINTS: Final = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
}


def _endpoint(address: Address, environ: Mapping[str, str]) -> str | None:
    """The server that is named in place of the cloud's own.

    Raises:
        BadEndpoint: what is named is no address; the library would stop with a message of its own.
    """
    named = {name: environ[name] for name in _ENDPOINTS[address.scheme] if environ.get(name)}
    if address.scheme == "s3" and not named and (found := credentials.read_profile(environ).endpoint):
        named = {"endpoint_url": found}
    variable, endpoint = next(iter(named.items()), ("", None))
    if endpoint is not None and not is_server(endpoint):
        raise BadEndpoint(mirror=str(address), variable=variable)
    return endpoint


def _http(endpoint: str | None) -> Any:  # noqa: ANN401 -- a typed dict of the library
    is_plain = endpoint is not None and endpoint.startswith("http://")
    return {"timeout": _REQUEST, "connect_timeout": _CONNECT, "allow_http": is_plain}


def _s3(address: Address, environ: Mapping[str, str]) -> "ObjectStore":
    from obstore.store import S3Store

    profile, endpoint = credentials.read_profile(environ), _endpoint(address, environ)
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or profile.region or "us-east-1"
    settings: dict[str, Any] = {"region": region, "client_options": _http(endpoint), "retry_config": _RETRY}
    # Every object is proven after it was sent, so a digest of each body inside its signature would be a second one.
    settings["unsigned_payload"] = True
    if endpoint is not None:
        settings["endpoint"] = endpoint
    if not credentials.in_environment(environ):
        if profile.keys:
            settings["credential_provider"] = credentials.renewing(environ)
        elif not credentials.asks_metadata(environ):
            raise NoCredentials(mirror=str(address), problem="none")
    return S3Store(address.bucket, prefix=address.prefix or None, **settings)


def _gcs(address: Address, environ: Mapping[str, str]) -> "ObjectStore":
    from obstore.store import GCSStore

    http = _http(_endpoint(address, environ))
    return GCSStore(address.bucket, prefix=address.prefix or None, client_options=http, retry_config=_RETRY)


def _azure(address: Address, environ: Mapping[str, str]) -> "ObjectStore":
    from obstore.store import AzureStore

    account = environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    if not account:
        raise NoCredentials(mirror=str(address), problem="none")
    endpoint = _endpoint(address, environ)
    settings: dict[str, Any] = {"account_name": account, "client_options": _http(endpoint), "retry_config": _RETRY}
    if endpoint is not None:
        settings["endpoint"] = endpoint
    return AzureStore(address.bucket, prefix=address.prefix or None, **settings)
