"""Writing YAML: single values on one line, comments, and whole documents."""

import io
import re
from collections.abc import Mapping
from typing import Any, Final

import yaml

from unbroken.quoting.terminal import printable

_SAFE_TEXT: Final = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*")
# Words that YAML parsers do not read as text.
_TAKEN: Final = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})


def scalar(text: str) -> str:
    """A text on one line, in double quotes where needed."""
    is_safe = _SAFE_TEXT.fullmatch(text) and text.lower() not in _TAKEN
    # YAML reads the escapes of JSON, except surrogate pairs.
    return text if is_safe else f'"{"".join(map(_escaped, text))}"'


def comment(text: str) -> str:
    """A comment of one line, whatever is in the text."""
    return f"# {printable(text)}\n"


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class _Dumper(yaml.SafeDumper):
    """Lists indented below their key; multi-line texts as blocks."""

    def ignore_aliases(self, data: object) -> bool:
        # Repeated values are written out, not as an alias.
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _as_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _as_text)


def dumped(document: Mapping[str, Any]) -> str:
    """A document in the order of its keys; characters that are not plain ASCII are escaped."""
    stream = io.StringIO()
    # No line folding: a folded word of a command is hard to read.
    yaml.dump(document, stream, Dumper=_Dumper, sort_keys=False, width=1 << 16, default_flow_style=False)
    return stream.getvalue()
