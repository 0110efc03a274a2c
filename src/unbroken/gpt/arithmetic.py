"""The checkpoint item ``arithmetic``: what the bits of a run depend on besides its state.

It holds lanes, seed, dtype and reduction of the reducer, and the record of the numerics. Differences are an error at
resume, unless the user accepted them by their own name or by the config field they follow from.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

from unbroken.config.document import all_fields
from unbroken.exact import Numerics, Reducer
from unbroken.exact.numerics import require_alike
from unbroken.launch.accepted import ARITHMETIC, CONFIG

# What changes with a field that the user may change between two jobs.
FOLLOWING: Final[Mapping[str, tuple[str, ...]]] = {
    "training.exact": (
        *("reduction", "deterministic", "inductor_deterministic", "cublas_workspace", "cudnn_benchmark"),
        *("cudnn_deterministic", "attention", "matmul_fp32", "conv_fp32"),
    ),
    "training.mixed_precision": ("compute_dtype",),
}
# The item of the state that appears or disappears with a field.
ITEMS_FOLLOWING: Final[Mapping[str, str]] = {"training.ema_decay": "ema", "training.mixed_precision": "scaler"}


def accepted_items(accept: Collection[str]) -> tuple[str, ...]:
    """The items that may appear or disappear because the user accepted a field they follow from."""
    return tuple(item for field, item in ITEMS_FOLLOWING.items() if field in accept and item not in accept)


class Arithmetic:
    """How this job computes; registered with ``Run``."""

    def __init__(
        self,
        reducer: Reducer,
        numerics: Numerics,
        accept: Collection[str],
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._reducer, self._numerics, self._settings = reducer, numerics, settings or {}
        self._accept = {*accept, *(name for field in accept for name in FOLLOWING.get(field, ()))}

    def state_dict(self) -> dict[str, Any]:
        """All of it, by name."""
        return {**self._reducer.state_dict(), **self._numerics.record()}

    def comparable_settings(self) -> Mapping[str, Any]:
        """The config of this job's steps; steps of another config are not compared."""
        return self._settings

    def is_accepting(self, name: str) -> bool:
        """Whether an accepted name is checked here, or was when the config was compared."""
        return name in (*all_fields(), *ARITHMETIC, *ITEMS_FOLLOWING.values(), CONFIG)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise unless this job computes like the one that saved.

        Raises:
            ArithmeticDiffers: there are differences that were not accepted; each is named.
        """
        require_alike(state, self.state_dict(), self._accept)
