"""What one text means as a value of one field: the field's type decides, never the look of the text alone.

``3e-4`` is a number where a number is expected and text where text is; ``no`` is false for a switch and a word for
``training.mixed_precision``. Text in quotes never stands for a number, a switch or null.
"""

import difflib
import math
import re
from typing import Any, Final

from unbroken.config.fields import Field
from unbroken.config.nodes import Node, Scalar, described

_WHOLE: Final = re.compile(r"[+-]?(0|[1-9][0-9_]*)")
_NUMBER: Final = re.compile(r"[+-]?([0-9][0-9_]*)?(\.[0-9_]*)?([eE][+-]?[0-9]{1,4})?")
_NOT_FINITE: Final = re.compile(r"[+-]?\.?(inf|infinity|nan)", re.IGNORECASE)
_SWITCH: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# Beyond this a float no longer holds every whole number, so 1e17 may not be the number that was meant.
_EXACT_FLOAT: Final = 2**53
_LARGEST: Final = 2**63 - 1
_LONGEST_NUMBER: Final = 60


class Refused(Exception):
    """A text that does not fit its field: the complaint, and the word that was perhaps meant."""

    def __init__(self, complaint: str, nearest: str | None = None) -> None:
        super().__init__(complaint)
        self.complaint = complaint
        self.nearest = nearest


def decode_value(field: Field, node: Node) -> Any:  # noqa: ANN401 -- each field has its own type
    """The value a node gives a field of scalar type.

    Raises:
        Refused: it does not fit.
    """
    shape = field.shape
    if not isinstance(node, Scalar):
        raise Refused(f"must be {shape.expectation}, is {described(node)}")
    if node.is_null:
        if shape.optional:
            return None
        raise Refused(
            f"must be {shape.expectation}, has no value" if node.text == "" else f"must be {shape.expectation}, is null"
        )
    if node.text in shape.words:
        return node.text
    if str in shape.scalars:
        if "\0" in node.text:
            raise Refused("must be text without NUL")
        return node.text
    value = _decode_typed(field, node)
    _check_bounds(field, value)
    return True if shape.scalars == {bool, int} and value == 1 else value


def _decode_typed(field: Field, node: Scalar) -> bool | int | float:
    kinds = field.shape.scalars
    if not kinds:
        close = difflib.get_close_matches(node.text, field.shape.words, n=1)
        raise Refused(f"must be {field.shape.expectation}, is {described(node)}", close[0] if close else None)
    if not node.is_plain:
        raise Refused(f"must be {field.shape.expectation}, is the text {described(node)}; write it without quotes")
    if bool in kinds and (switch := _SWITCH.get(node.text.lower())) is not None:
        return switch
    if int in kinds:
        whole = whole_number(node.text)
        if whole is not None:
            return whole
    if float in kinds:
        return number(node, f"must be {field.shape.expectation}")
    raise Refused(f"must be {field.shape.expectation}, is {described(node)}")


def whole_number(text: str) -> int | None:
    """A whole number: ``5_000_000_000``, ``1e3``; None if the text is none.

    Raises:
        Refused: it is one, and is too large to be meant.
    """
    if len(text) > _LONGEST_NUMBER:
        return None
    if _WHOLE.fullmatch(text):
        value = int(text.replace("_", "")) if not text.endswith("_") else None
    elif re.search("[.eE]", text) and (amount := _float(text)) is not None and amount.is_integer():
        if abs(amount) > _EXACT_FLOAT:
            raise Refused(f"is {text}, which has no exact value in this notation; write all its digits")
        value = int(amount)
    else:
        return None
    if value is not None and abs(value) > _LARGEST:
        raise Refused(f"is {text}, which is larger than 2^63 - 1")
    return value


def number(node: Scalar, expectation: str) -> float:
    """A finite number: ``1e-4``, ``0.1``, ``3``.

    Raises:
        Refused: it is none.
    """
    if _NOT_FINITE.fullmatch(node.text):
        raise Refused(f"must be finite, is {node.text}")
    amount = _float(node.text) if node.is_plain else None
    if amount is None:
        raise Refused(f"{expectation}, is {described(node)}")
    if not math.isfinite(amount):
        raise Refused(f"is {node.text}, which is too large for a number")
    return amount


def _float(text: str) -> float | None:
    match = _NUMBER.fullmatch(text)
    if match is None or len(text) > _LONGEST_NUMBER or not re.search(r"[0-9]", (match[1] or "") + (match[2] or "")):
        return None
    return float(text.replace("_", ""))


def _check_bounds(field: Field, value: bool | int | float) -> None:
    if isinstance(value, bool):
        return
    said = field.declaration
    is_within = (
        (said.minimum is None or value >= said.minimum)
        and (said.above is None or value > said.above)
        and (said.maximum is None or value <= said.maximum)
        and (said.below is None or value < said.below)
    )
    if not is_within:
        raise Refused(f"must be {field.bounds}, is {value}")
