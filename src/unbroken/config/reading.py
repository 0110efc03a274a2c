"""Reads a config from a file, a preset or a run's record, and checks one that was made in Python."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from unbroken.config import source as sources
from unbroken.config.decode import Resolved, decode
from unbroken.config.document import SCHEMA, SECTIONS, Config, digest_of
from unbroken.config.overrides import COMMAND_LINE, take_apart
from unbroken.config.presets import preset
from unbroken.config.source import Mapping, Node, Place, Scalar, from_document
from unbroken.errors import ConfigInvalid, Problem, RunRecordDamaged


def load(path: Path, overrides: Sequence[str] = ()) -> Resolved:
    """Read a YAML or JSON config file and apply overrides (``section.field=value``).

    Raises:
        PathMissing: there is no such file.
        ConfigUnreadable: it is not valid YAML or JSON.
        ConfigInvalid: the config has problems; all of them are in it.
    """
    return decode(sources.read(path), _only_overrides(overrides), source=str(path))


def from_preset(name: str, overrides: Sequence[str] = ()) -> Resolved:
    """A preset with overrides applied.

    Raises:
        KeyError: there is no such preset.
        ConfigInvalid: an override is invalid.
    """
    place = Place(f"preset {name}")
    return decode(None, _only_overrides(overrides), start=preset(name), start_place=place, source=place.source)


def from_json(text: str, source: str) -> Resolved:
    """Read a run's record of its config; a field that is newer than the record has its default.

    Raises:
        RunRecordDamaged: it is not such a record, or was changed after it was written.
        ConfigInvalid: the values have problems.
    """
    try:
        document: Any = json.loads(text, parse_constant=_refuse_constant)
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise RunRecordDamaged(path=Path(source), complaint=f"it is not a {SCHEMA} document")
        sections = {name: document[name] for name in SECTIONS if name in document}
        if digest_of(sections) != document.get("digest"):
            complaint = "its checksum does not match its contents: it was changed after it was written"
            raise RunRecordDamaged(path=Path(source), complaint=complaint)
        root = from_document(document, Place(source))
    except RunRecordDamaged:
        raise
    except (ValueError, RecursionError) as refusal:
        raise RunRecordDamaged(path=Path(source), complaint="it is not a JSON document") from refusal
    assert isinstance(root, Mapping)
    return decode(root, source=source, is_record=True)


def require_sound(config: Config) -> None:
    """Check a config that was made in Python as strictly as one that was read.

    Raises:
        ConfigInvalid: the config has problems; all of them are in it.
    """
    place = Place("config")
    try:
        root = from_document(config.values(), place)
    except (TypeError, ValueError) as refusal:
        problem = Problem(place.source, None, "config", f"holds a value of the wrong type: {refusal}")
        raise ConfigInvalid(problems=(problem,)) from refusal
    assert isinstance(root, Mapping)
    decode(root, source=place.source)


def _only_overrides(arguments: Sequence[str]) -> tuple[tuple[Scalar, Node], ...]:
    taken = take_apart(arguments)
    if taken.rest:
        complaint = "is not an override; write section.field=value"
        problems = tuple(Problem(COMMAND_LINE.source, None, each, complaint) for each in taken.rest)
        raise ConfigInvalid(problems=problems)
    return taken.overrides


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
