"""Parses the names of trackers in a setting or a config file: ``wandb:my-project, tensorboard``."""

import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from unbroken.errors import TrackerMissing
from unbroken.trackers.tracker import Tracker


@dataclass(frozen=True)
class Known:
    """A tracker that comes with this package: what its target is, and the module of its library.

    ``draws``: the library draws random numbers while it works, so that it gets a process of its own.
    """

    target: str
    library: str
    draws: bool = True


KNOWN: Final[Mapping[str, Known]] = {
    "wandb": Known("PROJECT", "wandb"),
    "trackio": Known("PROJECT", "trackio"),
    "tensorboard": Known("DIRECTORY", "tensorboard", draws=False),
    "mlflow": Known("EXPERIMENT", "mlflow"),
}


@dataclass(frozen=True)
class TrackerName:
    """A tracker and where it shows the run: a project, an experiment or a directory; empty for its own default."""

    kind: str
    target: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.target}" if self.target else self.kind


class _Makes(Protocol):
    make: Callable[[str], Tracker]


def trackers_in(text: str) -> list[str]:
    """The trackers in a text that may name several, separated by commas."""
    return list(dict.fromkeys(each.strip() for each in text.split(",") if each.strip()))


def parse_tracker(text: str) -> TrackerName:
    """The tracker that a text names.

    Raises:
        ValueError: it names none.
    """
    kind, _, target = text.strip().partition(":")
    if kind not in KNOWN:
        raise ValueError(f"{text!r} is no tracker: {', '.join(KNOWN)}, each with or without :PROJECT")
    return TrackerName(kind, target.strip())


def load_tracker(name: TrackerName) -> Tracker:
    """The tracker of a name: with its library imported, or for a process of its own.

    Raises:
        TrackerMissing: its package is not installed.
    """
    known = KNOWN[name.kind]
    if known.draws and importlib.util.find_spec(known.library) is not None:
        from unbroken.trackers.apart import TrackerApart

        return TrackerApart(name)
    try:
        return adapter(name)
    except ModuleNotFoundError as missing:
        raise TrackerMissing(tracker=name.kind, package=missing.name or known.library) from missing


def adapter(name: TrackerName) -> Tracker:
    """What speaks to the library of a tracker, which is imported here.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    # By name: what reads a config must not import the library of a tracker.
    module: _Makes = importlib.import_module(f"unbroken.trackers.{name.kind}")
    return module.make(name.target)


# ---- secrets ----

_SECRET: Final = re.compile(r"(token|secret|passw|credential|api_?key|private_?key)", re.IGNORECASE)
_SHORTEST: Final = 6


def without_secrets(values: Mapping[str, object]) -> dict[str, object]:
    """The values whose names do not look like secrets, nested ones included."""
    # tokens, max_tokens, tokenizer and the like are no secrets.
    shown = {key: value for key, value in values.items() if not _is_secret(str(key))}
    return {key: without_secrets(value) if isinstance(value, Mapping) else value for key, value in shown.items()}


def _is_secret(name: str) -> bool:
    plain = re.sub(r"tokens|tokeniz\w*|token_(id|count|ids)|\w*_per_token", "", name, flags=re.IGNORECASE)
    return _SECRET.search(plain) is not None


def hide_secrets(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """A message without the values of environment variables whose names look like secrets."""
    for name, value in environ.items():
        if len(value) >= _SHORTEST and _is_secret(name):
            text = text.replace(value, "***")
    return text
