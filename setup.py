"""The description of the package: the README, with links that also work where it is shown without the repository.

Everything else about the package stands in pyproject.toml.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
# The target of a Markdown link that names a file of the repository: neither an address nor a place on the same page.
RELATIVE = re.compile(r"(?<=\]\()(?![a-z]+:|#)")


def description() -> str:
    """The README; its links lead to the files of the tag of this version."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    version = re.search(r'^VERSION = "(.+)"$', (ROOT / "src/unbroken/version.py").read_text(encoding="utf-8"), re.M)
    assert version is not None
    return RELATIVE.sub(f"{urls['Repository']}/blob/v{version[1]}/", (ROOT / "README.md").read_text(encoding="utf-8"))


setup(long_description=description(), long_description_content_type="text/markdown")
