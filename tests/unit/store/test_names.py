"""The grammar of names: what we give, what we read back, what a manifest may say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.errors import UnsafeName
from unbroken.store.names import (
    FINAL,
    PERIODIC,
    SHUTDOWN,
    DraftName,
    checkpoint_name,
    is_checkpoint_name,
    is_job,
    is_trash,
    parse_draft,
    require_safe,
    scratch,
    scratch_owner,
    step_in_name,
    step_of,
    trash_name,
)

STEPS = st.integers(0, 10**18)


@given(STEPS, st.sampled_from([PERIODIC, SHUTDOWN]), st.integers(1, 99))
def test_the_step_is_read_back_from_every_name_we_give(step: int, kind: str, copy: int) -> None:
    name = checkpoint_name(step, kind, copy)
    assert is_checkpoint_name(name)
    assert step_of(name) == step


def test_names_are_those_the_layout_promises() -> None:
    assert checkpoint_name(1000, PERIODIC) == "checkpoint-1000"
    assert checkpoint_name(2734, SHUTDOWN) == "checkpoint-2734-shutdown"
    assert checkpoint_name(2734, SHUTDOWN, 2) == "checkpoint-2734-shutdown.2"
    assert checkpoint_name(10, FINAL) == "final"
    assert checkpoint_name(10, FINAL, 3) == "final.3"


@pytest.mark.parametrize(
    "name",
    [
        *("checkpoint-", "checkpoint-01", "checkpoint--1", "checkpoint-1.", "checkpoint-1.0", "checkpoint-1.02"),
        *("checkpoint-1x", "xcheckpoint-1", "checkpoint-1\n", "Checkpoint-1", "checkpoint-1-shutdown-2", "final.0"),
        *("finally", "latest", "", "checkpoint-²", "checkpoint-1/../2"),
    ],
)
def test_a_name_that_is_nearly_ours_is_not_ours(name: str) -> None:
    assert not is_checkpoint_name(name)
    assert step_of(name) is None


@given(st.from_regex(r"[0-9A-Za-z_]{1,64}", fullmatch=True), STEPS, st.integers(1, 10**6))
def test_a_draft_says_whose_it_is_and_for_which_step(job: str, step: int, attempt: int) -> None:
    assert is_job(job)
    assert parse_draft(str(DraftName(job, step, attempt))) == DraftName(job, step, attempt)


@pytest.mark.promise("U17")
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=250))
def test_trash_of_any_name_is_known_again_and_fits_a_file_system(name: str) -> None:
    assert is_trash(trash_name(name)) and len(trash_name(name).encode()) <= 255
    assert not is_trash(name) and not is_trash(f".trash-{name}")
    assert scratch_owner(scratch("j0001_ab", name)) == "j0001_ab"


@pytest.mark.parametrize("name", [".tmp-", ".tmp-a-1", ".tmp-a b-1-1", ".tmp-a-1-1.json", "tmp-a-1-1", ".tmp-a-x-1"])
def test_a_foreign_folder_is_not_taken_for_a_draft(name: str) -> None:
    assert parse_draft(name) is None


@pytest.mark.parametrize("job", ["", "a-b", "a/b", "a b", "ä", "x" * 65])
def test_a_job_that_would_not_fit_into_a_name_is_refused(job: str) -> None:
    assert not is_job(job)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-500", 500),
        ("global_step500", 500),
        ("step_000500", 500),
        ("epoch=1-step=500.ckpt", 500),
        ("checkpoint_0", 0),
        ("iter_0000007", 7),
        ("run2-step-5-of-step-9", 9),
        ("model.safetensors", None),
        ("2024-01-01", None),
    ],
)
def test_the_step_is_recognized_by_other_tools_names(name: str, step: int | None) -> None:
    assert step_in_name(name) == step


@pytest.mark.parametrize(
    "name", ["a", "state/.metadata", "a/b/c.bin", "..a", "a..", "ä/ö", "x" * 255, "b/manifest.json"]
)
def test_a_name_inside_the_checkpoint_is_safe(name: str) -> None:
    assert require_safe(name) == name


@pytest.mark.parametrize(
    "name",
    [
        *("", "/etc/passwd", "..", "a/../b", "../a", "a/..", ".", "./a", "a/./b", "a//b", "a/", "//a"),
        *(
            "a\\b",
            "a\0b",
            "a\nb",
            "a\x1b[31m",
            "\ud800",
            "\u202e",
            "manifest.json",
            "x" * 256,
            "ä" * 128,
            "a/" * 600 + "a",
        ),
    ],
    ids=repr,
)
def test_a_name_that_could_lead_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(UnsafeName):
        require_safe(name)


@given(st.text(max_size=40))
def test_whatever_is_safe_stays_below_its_directory(name: str) -> None:
    try:
        require_safe(name)
    except UnsafeName:
        return
    pieces = name.split("/")
    assert not name.startswith("/") and all(piece not in ("", ".", "..") for piece in pieces)
