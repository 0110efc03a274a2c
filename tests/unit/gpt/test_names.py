"""What the package offers, and what importing it costs."""

import subprocess
import sys
from types import ModuleType

import pytest

import unbroken.gpt


def test_naming_the_package_loads_no_torch() -> None:
    program = "import sys, unbroken.gpt; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("name", unbroken.gpt.__all__)
def test_every_name_stays_what_it_is_once_its_module_is_loaded(name: str) -> None:
    first, second = getattr(unbroken.gpt, name), getattr(unbroken.gpt, name)
    assert first is second and not isinstance(first, ModuleType)


@pytest.mark.parametrize(
    "how", ["from unbroken.gpt.train import Trained", "import unbroken.gpt.train", "unbroken.gpt.Trained"]
)
def test_train_is_the_function_however_its_module_was_loaded(how: str) -> None:
    program = f"import unbroken.gpt; {how}; unbroken.gpt.train(config='nowhere.yaml')"
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert "not callable" not in ended.stderr
    assert "nowhere.yaml" in ended.stderr


def test_a_name_it_does_not_have_is_refused() -> None:
    with pytest.raises(AttributeError, match="'train_'"):
        _ = unbroken.gpt.train_
