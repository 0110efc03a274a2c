"""The complete tool: build a model from a config, train, evaluate, generate, export.

Names are loaded when they are first used.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from unbroken.gpt.build import initialize
    from unbroken.gpt.export import to_safetensors, to_torch
    from unbroken.gpt.generation import Sampling, generate, stream
    from unbroken.gpt.huggingface import to_huggingface
    from unbroken.gpt.loss import LossSum
    from unbroken.gpt.model import GPT
    from unbroken.gpt.text import Continued, Generation, TextModel
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

_PLACES: Final = {
    "GPT": "model",
    "Continued": "text",
    "Generation": "text",
    "LossSum": "loss",
    "Sampling": "generation",
    "TextModel": "text",
    "Trained": "train",
    "generate": "generation",
    "initialize": "build",
    "stream": "generation",
    "to_huggingface": "huggingface",
    "to_safetensors": "export",
    "to_torch": "export",
    "train": "train",
}


class _Package(ModuleType):
    """This package. Importing a module ``train`` sets it as an attribute here; the function ``train`` is meant."""

    def __setattr__(self, name: str, value: object) -> None:
        is_hidden = isinstance(value, ModuleType) and _PLACES.get(name) == name
        super().__setattr__(name, getattr(value, name) if is_hidden else value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:  # noqa: ANN401 -- whatever the name stands for
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = found
    return found
