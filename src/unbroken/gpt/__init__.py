"""A GPT trainer, complete: train from a config, generate text, export weights.

    unbroken.gpt.train("run.yaml")                          # the same call starts the run and resumes it
    model = unbroken.gpt.TextModel.open("runs/tiny")
    print(model.continue_text("Once upon a time").text)

Each name is loaded when it is first used.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from unbroken.gpt.build import initialize
    from unbroken.gpt.export import to_safetensors, to_torch
    from unbroken.gpt.generation import generate, stream
    from unbroken.gpt.huggingface import to_huggingface
    from unbroken.gpt.loss import LossSum
    from unbroken.gpt.model import GPT
    from unbroken.gpt.sampling import Generation, Sampling
    from unbroken.gpt.text import Continued, TextModel
    from unbroken.gpt.train import Trained, train

__all__ = [
    "GPT",
    "Continued",
    "Generation",
    "LossSum",
    "Sampling",
    "TextModel",
    "Trained",
    "generate",
    "initialize",
    "stream",
    "to_huggingface",
    "to_safetensors",
    "to_torch",
    "train",
]

_HOMES: Final = {
    "GPT": "unbroken.gpt.model",
    "Continued": "unbroken.gpt.text",
    "Generation": "unbroken.gpt.sampling",
    "LossSum": "unbroken.gpt.loss",
    "Sampling": "unbroken.gpt.sampling",
    "TextModel": "unbroken.gpt.text",
    "Trained": "unbroken.gpt.train",
    "generate": "unbroken.gpt.generation",
    "initialize": "unbroken.gpt.build",
    "stream": "unbroken.gpt.generation",
    "to_huggingface": "unbroken.gpt.huggingface",
    "to_safetensors": "unbroken.gpt.export",
    "to_torch": "unbroken.gpt.export",
    "train": "unbroken.gpt.train",
}


class _Package(ModuleType):
    """This package. Importing a module ``train`` sets it as an attribute here; the function ``train`` is meant."""

    def __setattr__(self, name: str, value: object) -> None:
        is_hidden = isinstance(value, ModuleType) and _HOMES.get(name) == f"{__name__}.{name}"
        super().__setattr__(name, getattr(value, name) if is_hidden else value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:  # noqa: ANN401 -- any public name
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_HOMES[name]), name)
    globals()[name] = found
    return found
