"""numpy scalars and arrays as JSON and back, bit for bit, without pickle.

Plain kinds only: booleans, integers, floats, complex numbers, bytes, text and times. Objects and records are not
stored here; ``encode`` says what then happens. Reading treats its input as hostile.
"""

import base64
import binascii
import math
import re
import sys
from typing import TYPE_CHECKING, Any, Final

from unbroken.store.fields import Malformed

if TYPE_CHECKING:
    import numpy as np

_PLAIN_DTYPE: Final = re.compile(r"[<>|][biufcSUMm][0-9]{1,9}(\[[0-9]*[a-zA-Z]+\])?")


def is_plain(value: Any) -> bool:  # noqa: ANN401 - whatever a state dict holds
    """Whether a value is a numpy scalar or array that can be stored without pickle."""
    numpy = sys.modules.get("numpy")  # without it there can be no such value
    if numpy is None:
        return False
    if type(value) is numpy.ndarray:
        return value.dtype.itemsize > 0 and _has_plain_dtype(value.dtype)
    return isinstance(value, numpy.generic) and type(value).__module__ == "numpy" and _has_plain_dtype(value.dtype)


def _has_plain_dtype(dtype: "np.dtype[Any]") -> bool:
    return _PLAIN_DTYPE.fullmatch(dtype.str) is not None


def write_scalar(value: "np.generic") -> list[str]:
    """A scalar as its dtype and its bytes."""
    if isinstance(value, str):  # numpy has no dtype for an empty text
        return ["<U", write_bytes(value.encode("utf-32-le", "surrogatepass"))]
    if isinstance(value, bytes):
        return ["|S", write_bytes(bytes(value))]
    return [value.dtype.str, write_bytes(value.tobytes())]


def write_array(value: "np.ndarray[Any, Any]") -> list[object]:
    """An array as its dtype, its shape, the order of its elements and their bytes."""
    is_fortran = value.flags.f_contiguous and not value.flags.c_contiguous
    order: Any = "F" if is_fortran else "C"
    return [value.dtype.str, list(value.shape), order, write_bytes(value.tobytes(order=order))]


def read_scalar(found: object) -> "np.generic":
    """The scalar that ``write_scalar`` wrote.

    Raises:
        Malformed: it wrote no such thing.
    """
    import numpy

    dtype_text, content = _fields(found, 2)
    raw = read_bytes(content)
    if dtype_text == "|S":
        return numpy.bytes_(raw)
    if dtype_text == "<U":
        return numpy.str_(_text(raw))
    dtype = _dtype(dtype_text)
    if len(raw) != dtype.itemsize or not raw:
        raise Malformed(f"a scalar of {dtype} has {len(raw)} bytes")
    scalar: np.generic = numpy.frombuffer(raw, dtype)[0]
    return scalar


def read_array(found: object) -> "np.ndarray[Any, Any]":
    """The array that ``write_array`` wrote.

    Raises:
        Malformed: it wrote no such thing.
    """
    import numpy

    dtype_text, shape, order, content = _fields(found, 4)
    dtype, raw = _dtype(dtype_text), read_bytes(content)
    if not isinstance(shape, list) or len(shape) > 32 or not all(type(n) is int and n >= 0 for n in shape):
        raise Malformed("the shape of an array is no list of whole numbers")
    if dtype.itemsize == 0 or len(raw) != math.prod(shape) * dtype.itemsize or order not in ("C", "F"):
        raise Malformed(f"an array of {dtype}, shape {shape}, has {len(raw)} bytes")
    try:
        return numpy.frombuffer(raw, dtype).reshape(shape, order=order).copy(order=order)
    except (ValueError, OverflowError) as refused:
        raise Malformed(f"no array has the shape {shape}") from refused


def write_bytes(raw: bytes) -> str:
    """Bytes as text."""
    return base64.b64encode(raw).decode("ascii")


def read_bytes(text: object) -> bytes:
    """The bytes that ``write_bytes`` wrote.

    Raises:
        Malformed: it wrote no such thing.
    """
    if not isinstance(text, str):
        raise Malformed("bytes are not stored as text")
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as refused:
        raise Malformed("bytes are not stored as base64") from refused


def _fields(found: object, count: int) -> list[object]:
    if not isinstance(found, list) or len(found) != count:
        raise Malformed(f"a numpy value is no list of {count}")
    return found


def _dtype(text: object) -> "np.dtype[Any]":
    import numpy

    if not isinstance(text, str) or not _PLAIN_DTYPE.fullmatch(text):
        raise Malformed(f"{text!r} is no plain numpy dtype")
    try:
        return numpy.dtype(text)
    except (TypeError, ValueError) as refused:
        raise Malformed(f"{text!r} is no numpy dtype") from refused


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-32-le", "surrogatepass")
    except UnicodeDecodeError as refused:
        raise Malformed("a numpy text holds no characters") from refused
