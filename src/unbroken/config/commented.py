"""A config as a commented YAML file, and single values as YAML. Reading the output back gives the same config."""

import re
import textwrap
from collections.abc import Iterator
from typing import Any, Final

from unbroken.config.document import SECTIONS, Config, all_fields
from unbroken.config.fields import Field
from unbroken.quoting.yaml import scalar

_WIDTH: Final = 120
_HEADINGS: Final = {
    "model": "Model architecture.",
    "data": "Training data, and how documents become sequences.",
    "optimizer": "AdamW and the learning rate schedule.",
    "training": "Batch size, length of the run, checkpoints, stopping, precision.",
}


def as_yaml(value: Any) -> str:  # noqa: ANN401 -- any plain JSON value
    """A plain JSON value on one line of YAML, as a user would write it."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case float():
            return re.sub(r"e([+-])0*(\d)", lambda m: f"e{m[1].replace('+', '')}{m[2]}", repr(value))
        case str():
            return scalar(value)
        case list():
            return f"[{', '.join(map(as_yaml, value))}]"
        case dict():
            return f"{{{', '.join(f'{as_yaml(key)}: {as_yaml(item)}' for key, item in value.items())}}}"
    return str(value)


def heading_of(section: str) -> str:
    """What a section is about, in one sentence."""
    return _HEADINGS[section]


def comment_of(field: Field) -> str:
    """A field's meaning, its choices and what null means, short enough for the end of a line."""
    said = field.declaration
    parts = [said.meaning.rstrip(".")]
    if field.shape.words and not all(word in said.meaning for word in field.shape.words):
        parts[0] += f" ({', '.join(field.shape.words)})"
    if said.null_means:
        parts.append(f"null: {said.null_means}")
    return "; ".join(parts)


def commented(config: Config, title: str) -> str:
    """The whole config as YAML with a comment on every field; null fields are commented out with an example."""
    lines = [
        f"# {title}",
        "# unbroken explain FIELD explains a field. Any field can be overridden on the command line:",
    ]
    lines += ["#   unbroken validate THIS_FILE --optimizer.learning_rate 1e-4"]
    values = config.values()
    for section in SECTIONS:
        lines += ["", f"{section}:  # {_HEADINGS[section]}"]
        fields = [field for field in all_fields().values() if field.section == section]
        heads = [_head(field, values[section][field.name]) for field in fields]
        column = max(len(head) for head in heads if len(head) <= 50) + 2
        for field, head in zip(fields, heads, strict=True):
            lines += _with_comment(head, comment_of(field), column)
    return "\n".join(lines) + "\n"


def _head(field: Field, value: Any) -> str:  # noqa: ANN401 -- any plain JSON value
    if value is not None:
        return f"  {field.name}: {as_yaml(value)}"
    example = field.declaration.example
    shown = example if field.shape.is_curriculum else as_yaml(example)
    # A null that is not the default must be written, or reading it back would give the default.
    return f"  # {field.name}: {shown}" if field.default is None else f"  {field.name}: null"


def _with_comment(head: str, comment: str, column: int) -> Iterator[str]:
    if len(head) >= column:
        yield from (f"  # {line}" for line in textwrap.wrap(comment, _WIDTH - 4))
        yield head
        return
    first, *more = textwrap.wrap(comment, _WIDTH - column - 2)
    yield f"{head:<{column}}# {first}"
    yield from (f"{'':<{column}}#   {line}" for line in more)
