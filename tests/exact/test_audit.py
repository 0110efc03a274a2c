"""Live state that nobody handed over is named, kind by kind."""

from pathlib import Path

import pytest

from tests.exact import audits
from tests.exact.forks import forked_each

EXPECTED = {
    "nothing": (),
    "scheduler": ("scheduler ConstantLR", "scheduler SequentialLR", "scheduler StepLR, called `inner`"),
    "plateau": ("scheduler ReduceLROnPlateau, called `forgotten_thing`",),
    "scaler": ("scaler GradScaler, called `forgotten_thing`",),
    "ema": ("averaged model AveragedModel, called `forgotten_thing`",),
    "data": ("loader PositionLoader, called `forgotten_thing`",),
    "optimizer": ("optimizer AdamW, called `optimizer`",),
    "torch": ("generator Generator, called `forgotten_thing`",),
    "numpy": ("generator Generator, called `forgotten_thing`",),
    "numpy, old": ("generator RandomState, called `forgotten_thing`",),
    "python": ("generator Random, called `forgotten_thing`",),
}


@pytest.mark.promise("X5")
def test_each_kind_that_was_not_registered_is_named_and_refused(tmp_path: Path) -> None:
    found = forked_each(audits.forgotten, [(kind, str(tmp_path / kind)) for kind in EXPECTED])
    named = {kind: each.required() for kind, each in zip(EXPECTED, found, strict=True)}
    named["scheduler"] = tuple(each.replace(", called `forgotten_thing`", "") for each in named["scheduler"])
    assert named == EXPECTED
