"""Every public name loads: packages load their names on first use, so a wrong module name shows only then."""

import importlib

import pytest

PACKAGES = ("unbroken", "unbroken.data", "unbroken.exact", "unbroken.gpt", "unbroken.testing")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_of_a_package_loads(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name) is not None, name
