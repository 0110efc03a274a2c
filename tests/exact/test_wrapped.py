"""Wrapped objects and generators of one's own are taken exactly, or refused when the run is entered."""

from pathlib import Path

import pytest

from tests.exact import wrapped
from tests.exact.forks import forked_each


@pytest.mark.promise("U13")
@pytest.mark.parametrize("kind", wrapped.WRAP)
def test_wrapped_objects_and_own_generators_resume_bit_for_bit_under_a_strict_audit(kind: str, tmp_path: Path) -> None:
    (found,) = forked_each(wrapped.chain, [(kind, str(tmp_path))])
    whole, parts = found.required()
    assert len(whole) == wrapped.TOTAL
    assert parts == whole


@pytest.mark.promise("U13")
def test_what_would_fail_at_the_first_save_is_refused_at_entry_in_one_line(tmp_path: Path) -> None:
    kinds = ("hollow", "mute")
    found = forked_each(wrapped.refused, [(kind, str(tmp_path / kind)) for kind in kinds])
    said = dict(zip(kinds, (each.required() for each in found), strict=True))
    assert said["hollow"].startswith("'optimizer' cannot be saved: Hollow lacks what torch.optim.Optimizer sets up")
    assert said["mute"] == (
        "'note' cannot be saved: Mute lacks a state_dict() that works: AttributeError: there is none yet"
    )
    assert not (tmp_path / "mute" / "checkpoints").exists()


@pytest.mark.promise("U13")
def test_one_name_of_the_audit_can_be_silenced(tmp_path: Path) -> None:
    (found,) = forked_each(wrapped.ignored, [(str(tmp_path / "run"),)])
    assert found.required() == (("optimizer SGD, called `teacher`",), 2)
