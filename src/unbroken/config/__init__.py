"""The config of a run: fields, strict reading, overrides, presets, and what a resume may change.

Works without torch and numpy, so that a config can be checked on a login node in milliseconds. The parser is loaded
when a file is first read.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

from unbroken.config.document import Config
from unbroken.config.sections import CurriculumPhase, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig

if TYPE_CHECKING:
    from unbroken.config.decode import Resolved
    from unbroken.config.presets import PRESETS, preset
    from unbroken.config.reading import from_preset, load, require_sound

__all__ = [
    "PRESETS",
    "Config",
    "CurriculumPhase",
    "DataConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Resolved",
    "TrainingConfig",
    "from_preset",
    "load",
    "preset",
    "require_sound",
]

_HOMES: Final = {
    "PRESETS": "unbroken.config.presets",
    "Resolved": "unbroken.config.decode",
    "from_preset": "unbroken.config.reading",
    "load": "unbroken.config.reading",
    "preset": "unbroken.config.presets",
    "require_sound": "unbroken.config.reading",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:  # noqa: ANN401 -- any public name
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
