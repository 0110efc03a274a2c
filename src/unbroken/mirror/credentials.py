"""Credentials for S3 that the client library does not look for itself: the shared files of the AWS tools.

The environment, web identity tokens, containers and instance metadata are the library's. The files
``~/.aws/credentials`` and ``~/.aws/config`` are read here, again every few minutes, so that keys that another program
renews are used without a restart. Keys are handed to the library and kept nowhere else.
"""

import configparser
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

# So long keys from a file are used before the file is read again.
_FRESH: Final = timedelta(minutes=5)
_OF_LIBRARY: Final = (
    ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN"),
    ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI",),
)


@dataclass(frozen=True)
class Profile:
    """One profile of the shared files; never printed, so that no log can hold a key."""

    region: str | None = None
    endpoint: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)


def in_environment(environ: Mapping[str, str]) -> bool:
    """Whether the library finds credentials in the environment by itself."""
    return any(all(environ.get(name) for name in names) for names in _OF_LIBRARY)


def asks_metadata(environ: Mapping[str, str]) -> bool:
    """Whether the metadata service of a cloud may be asked."""
    return environ.get("AWS_EC2_METADATA_DISABLED", "").lower() != "true"


def read_profile(environ: Mapping[str, str]) -> Profile:
    """The profile that the environment names, or ``default``; empty where there are no files."""
    name = environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE") or "default"
    home = Path(environ.get("HOME", "/"))
    keys = _section(Path(environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws/credentials"), name)
    called = name if name == "default" else f"profile {name}"
    settings = {**_section(Path(environ.get("AWS_CONFIG_FILE") or home / ".aws/config"), called), **keys}
    found = {
        "access_key_id": settings.get("aws_access_key_id", ""),
        "secret_access_key": settings.get("aws_secret_access_key", ""),
        "token": settings.get("aws_session_token", ""),
    }
    is_whole = found["access_key_id"] and found["secret_access_key"]
    kept = {key: value for key, value in found.items() if value} if is_whole else {}
    return Profile(settings.get("region"), settings.get("endpoint_url"), kept)


def _section(path: Path, name: str) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
        return dict(parser[name]) if parser.has_section(name) else {}
    except (OSError, UnicodeDecodeError, configparser.Error):
        # What cannot be read has no credentials; the error that follows says so.
        return {}


def renewing(environ: Mapping[str, str] = os.environ) -> Callable[[], dict[str, object]]:
    """What the library calls for keys, and calls again once they are no longer fresh."""

    def provide() -> dict[str, object]:
        return {**read_profile(environ).keys, "expires_at": datetime.now(UTC) + _FRESH}

    return provide
