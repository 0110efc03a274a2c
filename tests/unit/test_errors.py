"""The error tree: every leaf is complete, unique, printable, and survives the way to another process."""

import json
import pickle
import re
from pathlib import Path

import pytest

from tests.unit.errors_examples import EXAMPLES, leaves
from unbroken import errors
from unbroken.errors import UnbrokenError, as_json, render

SECOND_LEVEL = {
    errors.UsageError: 2,
    errors.ConfigError: 2,
    errors.DataError: 4,
    errors.StorageError: 74,
    errors.CheckpointError: 3,
    errors.ExactnessError: 6,
    errors.BusyError: 7,
    errors.InternalError: 1,
    errors.PeerError: 1,
    errors.TrainingError: 8,
}

each_example = pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: error.kind)


def test_every_error_has_an_example() -> None:
    assert {type(error) for error in EXAMPLES} == set(leaves())


def test_every_error_is_public() -> None:
    assert {leaf.__name__ for leaf in leaves()} <= set(errors.__all__)


def test_kinds_are_unique_and_fit_a_command_line() -> None:
    kinds = [leaf.kind for leaf in leaves()]
    assert len(set(kinds)) == len(kinds)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", kind) for kind in kinds)


def test_every_error_belongs_to_one_family_of_the_second_level() -> None:
    for leaf in leaves():
        assert len([family for family in SECOND_LEVEL if family in leaf.__mro__]) == 1, leaf


def test_the_families_have_the_exit_codes_of_the_table() -> None:
    assert {family: family.exit_code for family in SECOND_LEVEL} == SECOND_LEVEL
    assert errors.NoUsableCheckpoint.exit_code == 5


@each_example
def test_an_error_is_printed_in_at_most_eight_lines_with_every_label_in_its_column(error: UnbrokenError) -> None:
    lines = render(error).splitlines()
    assert len(lines) <= 8
    assert lines[0] == f"error[{error.kind}]: {error.headline()}"
    assert all(re.match(r"  (at  |so  |help|    ) \S", line) for line in lines[1:]), lines
    assert all(line == line.rstrip() for line in lines)
    assert len(lines[0]) <= 140


@each_example
def test_an_error_names_a_way_on(error: UnbrokenError) -> None:
    assert error.help() or error.so()


@each_example
def test_an_error_is_one_document_with_the_same_facts(error: UnbrokenError) -> None:
    facts = as_json(error)
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert facts["kind"] == error.kind
    assert facts["exit_code"] == error.exit_code
    assert facts["message"] == str(error)
    assert [each["command"] for each in facts["help"]] == [each.command for each in error.help()]


@each_example
def test_an_error_arrives_in_another_process_with_all_its_fields(error: UnbrokenError) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert render(arrived) == render(error)
    assert as_json(arrived) == as_json(error)


@each_example
def test_no_error_says_please_or_failed_to(error: UnbrokenError) -> None:
    assert not re.search(r"please|failed to|sorry|oops", render(error), re.IGNORECASE)


def test_a_path_with_a_space_can_be_pasted() -> None:
    error = errors.RunHeld(path=Path("my runs/a"), holder="job 1", age_s=1)
    assert error.help()[0].command == "unbroken status 'my runs/a'"
