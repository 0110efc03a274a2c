"""Overrides from the command line: ``--section.field value``, ``--section.field=value``, ``section.field=value``.

Every field can be overridden; the texts become nodes and are decoded like the file's. Where a field is given twice the
last one wins, as in any shell alias with an option appended.
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
    """A command line taken apart: overrides as nodes, everything that is none, and the overrides as written."""

    overrides: tuple[tuple[Scalar, Node], ...]
    rest: tuple[str, ...]
    written: tuple[str, ...]


def take_apart(arguments: Sequence[str]) -> Arguments:
    """Tell overrides from other arguments.

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
    # `run.lr=3e-4.yaml` is a file's name; `traning.seed=1` is a slip that should be told as one.
    suffix = name.rpartition(".")[2]
    return name.partition(".")[0] not in SECTIONS and suffix in ("yaml", "yml", "json")


def _override(written: str, text: str) -> tuple[Scalar, Node]:
    # Options may be written with dashes for underscores; no field has a dash in its name.
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
        # A folder may be called `null`: where null is no value, every text is one.
        node = Scalar(text, is_plain=False, place=COMMAND_LINE)
    return Scalar(name, is_plain=True, place=COMMAND_LINE), node


def _invalid(name: str, complaint: str) -> ConfigInvalid:
    topic = name if name in all_fields() else None
    return ConfigInvalid(problems=(Problem(COMMAND_LINE.source, None, name, complaint, None, topic),))
