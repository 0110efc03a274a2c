"""The config of a run: fields, strict reading, overrides, presets, and what a resume may change.

Everything here works without torch and numpy, so that a config can be checked on a login node in milliseconds. Reading
and explaining are loaded when they are first asked for: naming a field should not pay for a parser.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

from unbroken.config.document import Config
from unbroken.config.fields import ResumeClass
from unbroken.config.sections import CurriculumPhase, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig

if TYPE_CHECKING:
    from unbroken.config.changes import Difference, Differences, compare
    from unbroken.config.decode import Resolved
    from unbroken.config.guide import explain, topics
    from unbroken.config.presets import PRESETS, preset
    from unbroken.config.reading import from_json, from_preset, load, require_sound

__all__ = [
    "PRESETS",
    "Config",
    "CurriculumPhase",
    "DataConfig",
    "Difference",
    "Differences",
    "ModelConfig",
    "OptimizerConfig",
    "Resolved",
    "ResumeClass",
    "TrainingConfig",
    "compare",
    "explain",
    "from_json",
    "from_preset",
    "load",
    "preset",
    "require_sound",
    "topics",
]

_LOADED_WHEN_USED: Final = {
    "PRESETS": "presets",
    "preset": "presets",
    "Difference": "changes",
    "Differences": "changes",
    "compare": "changes",
    "Resolved": "decode",
    "explain": "guide",
    "topics": "guide",
    "from_json": "reading",
    "from_preset": "reading",
    "load": "reading",
    "require_sound": "reading",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 -- whatever the name stands for
    module = _LOADED_WHEN_USED.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
