"""Overrides from the command line: ``--section.field value``, ``--section.field=value``, ``section.field=value``.

Any field can be overridden; values are decoded like the file's. If a field is given twice, the last one wins, so that
options can be appended to a shell alias.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from unbroken.config.document import SECTIONS, all_fields
from unbroken.config.source import Node, Place, Scalar
from unbroken.errors import ConfigInvalid, ConfigUnreadable, Problem

COMMAND_LINE: Final = Place("command line")

_DASHED: Final = re.compile(r"--([A-Za-z_]\w*\.[\w.\-]*)(?:=(.*))?", re.DOTALL)
_ASSIGNED: Final = re.compile(r"([A-Za-z_]\w*\.[\w.\-]+)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Arguments:
    """A command line split into overrides (as nodes and as written) and all other arguments."""

    overrides: tuple[tuple[Scalar, Node], ...]
    rest: tuple[str, ...]
    written: tuple[str, ...]


def take_apart(arguments: Sequence[str]) -> Arguments:
    """Separate overrides from other arguments.

    Raises:
        ConfigInvalid: an override has no value, or one that cannot be read.
    """
    overrides: list[tuple[Scalar, Node]] = []
    rest: list[str] = []
    written: list[str] = []
    waiting = list(reversed(arguments))
    while waiting:
        argument = waiting.pop()
        written.append(argument)
        if match := _DASHED.fullmatch(argument):
            name, text = match[1], match[2]
            if text is None:
                if not waiting or waiting[-1].startswith("--"):
                    raise _invalid(name, "has no value")
                text = waiting.pop()
                written.append(text)
            overrides.append(_override(name, text))
        elif (match := _ASSIGNED.fullmatch(argument)) and not _is_path(match[1]):
            overrides.append(_override(match[1], match[2]))
        else:
            rest.append(written.pop())
    return Arguments(tuple(overrides), tuple(rest), tuple(written))


def _is_path(name: str) -> bool:
    # `run.lr=3e-4.yaml` is a file name; `traning.seed=1` is a typo to report.
    suffix = name.rpartition(".")[2]
    return name.partition(".")[0] not in SECTIONS and suffix in ("yaml", "yml", "json")


def _override(written: str, text: str) -> tuple[Scalar, Node]:
    # Options may use dashes instead of underscores; no field name has a dash.
    name = written.replace("-", "_")
    field = all_fields().get(name)
    node: Node = Scalar(text, is_plain=True, place=COMMAND_LINE)
    if field is not None and field.shape.is_curriculum and text.lstrip()[:1] in ("[", "{"):
        from unbroken.config.source import parse

        try:
            node = parse(text, COMMAND_LINE.source, has_lines=False) or node
        except ConfigUnreadable as unreadable:
            raise _invalid(name, f"cannot be read: {unreadable.complaint}") from unreadable
    elif field is not None and str in field.shape.scalars and not field.shape.optional:
        # A folder may be called `null`: in a field that cannot be null it is text.
        node = Scalar(text, is_plain=False, place=COMMAND_LINE)
    return Scalar(name, is_plain=True, place=COMMAND_LINE), node


def _invalid(name: str, complaint: str) -> ConfigInvalid:
    topic = name if name in all_fields() else None
    return ConfigInvalid(problems=(Problem(COMMAND_LINE.source, None, name, complaint, None, topic),))
