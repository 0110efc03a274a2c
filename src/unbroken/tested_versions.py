"""The versions of torch and Python that the tests ran with. What was not tested is not promised, and is said.

``tools/compat.py --check`` compares this table with the recorded results in docs/measured/compat/.
"""

import functools
import os
import platform
from collections.abc import Callable
from typing import Final

TESTED_TORCH: Final = ("2.6", "2.8", "2.9", "2.10", "2.13", "2.15")
TESTED_PYTHON: Final = ("3.11", "3.12", "3.13", "3.14")


def minor_version(version: str) -> str:
    """Major and minor version: "2.13" of "2.13.0+cpu"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def untested_torch(version: str) -> str | None:
    """One line about a version of torch that the tests did not run with; None if they did."""
    if minor_version(version) in TESTED_TORCH:
        return None
    return f"torch {version} was not tested with unbroken (tested: {', '.join(TESTED_TORCH)})"


def untested_python(version: str) -> str | None:
    """One line about a version of Python that the tests did not run with; None if they did."""
    if minor_version(version) in TESTED_PYTHON:
        return None
    return f"Python {version} was not tested with unbroken (tested: {', '.join(TESTED_PYTHON)})"


@functools.cache
def say_if_untested(version: str, say: Callable[[str], None]) -> None:
    """Say it, once in a process and on one rank, if this version of torch or of Python was not tested."""
    if os.environ.get("RANK", "0") != "0":
        return
    for said in (untested_torch(version), untested_python(platform.python_version())):
        if said is not None:
            say(said)
