"""The error tree: every error is complete, unique, printable, and survives pickling to another process."""

import json
import pickle
import re
from dataclasses import replace
from pathlib import Path
from string import Formatter

import pytest

from tests.unit.errors_examples import EXAMPLES
from unbroken import errors
from unbroken.errors import TABLE, UnbrokenError, as_json, render
from unbroken.quoting.terminal import printable

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


def leaves() -> list[type[UnbrokenError]]:
    """Every error class that has no subclass: those that are raised."""

    def below(cls: type[UnbrokenError]) -> list[type[UnbrokenError]]:
        children = cls.__subclasses__()
        return [leaf for child in children for leaf in below(child)] if children else [cls]

    # A class made by a test below may not be collected yet.
    return [leaf for leaf in below(UnbrokenError) if leaf.__module__.startswith("unbroken.")]


def test_every_error_has_an_example() -> None:
    assert {type(error) for error in EXAMPLES} == set(TABLE.values())


def test_the_table_has_every_error_under_its_kind() -> None:
    assert set(TABLE.values()) == set(leaves())
    assert all(kind == error.kind for kind, error in TABLE.items())


def test_every_error_is_public() -> None:
    assert {leaf.__name__ for leaf in TABLE.values()} <= set(errors.__all__)


def test_kinds_fit_a_command_line() -> None:
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", kind) for kind in TABLE)


def test_two_errors_cannot_have_one_kind() -> None:
    with pytest.raises(TypeError, match="two errors have the kind 'bad-usage'"):
        type("Again", (errors.UsageError,), {"kind": "bad-usage"})
    assert TABLE["bad-usage"] is errors.BadUsage


def test_templates_name_only_fields_of_their_error() -> None:
    for error in TABLE.values():
        helps = [text for each in error.HELP for text in (each.command, each.effect)]
        templates = [each for each in (getattr(error, "HEADLINE", None), error.AT, error.SO, *helps) if each]
        named = {name.partition(".")[0] for each in templates for _, name, _, _ in Formatter().parse(each) if name}
        assert named <= {"kind", *error.__annotations__, *vars(error)}, error.kind
        assert error.DETAILS is None or error.DETAILS.field in error.__annotations__, error.kind


def test_no_field_hides_what_every_error_has() -> None:
    # A field that its base has already would count as given.
    for error in TABLE.values():
        assert not set(error.__annotations__) & set(dir(error.__base__)) - {"exit_code"}, error


def test_an_error_takes_exactly_its_fields() -> None:
    for values in ({"command": "unbroken"}, {"command": "unbroken", "complaint": "wrong", "hint": "none"}, {}):
        with pytest.raises(TypeError, match="BadUsage takes command, complaint, not"):
            errors.BadUsage(**values)
    usage = errors.BadUsage(command="a", complaint="b")
    assert repr(usage) == "BadUsage(command='a', complaint='b')"
    assert replace(usage, complaint="c").values() == {"command": "a", "complaint": "c"}


def test_every_error_belongs_to_one_family_of_the_second_level() -> None:
    for leaf in TABLE.values():
        assert len([family for family in SECOND_LEVEL if family in leaf.__mro__]) == 1, leaf


def test_the_families_have_the_exit_codes_of_the_table() -> None:
    assert {family: family.exit_code for family in SECOND_LEVEL} == SECOND_LEVEL
    assert errors.NoUsableCheckpoint.exit_code == 5


def test_an_error_is_printed_in_at_most_eight_lines_with_every_label_in_its_column() -> None:
    for error in EXAMPLES:
        lines = render(error).splitlines()
        assert len(lines) <= 8, error.kind
        assert lines[0] == f"error[{error.kind}]: {error.headline()}", error.kind
        assert all(re.match(r"  (at  |so  |help|    ) \S", line) for line in lines[1:]), lines
        assert all(line == line.rstrip() for line in lines), error.kind
        assert len(lines[0]) <= 140, error.kind


def test_an_error_names_a_way_on() -> None:
    for error in EXAMPLES:
        assert error.help() or error.so(), error.kind


def test_an_error_is_one_document_with_the_same_fields() -> None:
    for error in EXAMPLES:
        facts = as_json(error)
        assert json.loads(json.dumps(facts, allow_nan=False)) == facts, error.kind
        assert facts["kind"] == error.kind, error.kind
        assert facts["exit_code"] == error.exit_code, error.kind
        assert printable(facts["message"]) == error.message, error.kind
        assert [each["command"] for each in facts["help"]] == [each.command for each in error.help()], error.kind


def test_an_error_arrives_in_another_process_with_all_its_fields() -> None:
    for error in EXAMPLES:
        arrived = pickle.loads(pickle.dumps(error))
        assert type(arrived) is type(error), error.kind
        assert render(arrived) == render(error), error.kind
        assert as_json(arrived) == as_json(error), error.kind


def test_no_error_says_please_or_failed_to() -> None:
    for error in EXAMPLES:
        assert not re.search(r"please|failed to|sorry|\boops", render(error), re.IGNORECASE), error.kind


def test_a_path_with_a_space_can_be_pasted() -> None:
    error = errors.RunHeld(path=Path("my runs/a"), holder="job 1", proof="process")
    assert error.help()[0].command == "unbroken status 'my runs/a'"


def test_a_data_folder_without_val_is_not_reported_as_a_split_of_one(tmp_path: Path) -> None:
    error = errors.DataMissing(path=tmp_path, lacks="it has no folder val/", has_shards=True)
    assert error.help()[0].command.startswith("mv ")
    (tmp_path / "train").mkdir()
    assert f"--output-dir {tmp_path / 'val'}" in error.help()[0].command
    assert "it has train/" in str(error.so())


def test_a_file_in_the_place_of_data_is_called_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.touch()
    error = errors.DataMissing(path=path, lacks="the folder that data.path names does not exist")
    assert error.headline() == "no data found: it is a file, and data must be a folder"


def test_one_checkpoint_that_is_in_the_way_is_one(tmp_path: Path) -> None:
    said = [errors.CheckpointsExist(store=tmp_path, count=count, newest="final").headline() for count in (1, 2)]
    assert [text.partition(" has ")[2] for text in said] == ["1 checkpoint", "2 checkpoints"]


def test_where_no_checkpoint_is_the_status_of_the_run_helps_before_a_look_for_bad_parts(tmp_path: Path) -> None:
    for store in (tmp_path / "checkpoints", tmp_path):
        assert errors.NoUsableCheckpoint(store=store).help()[0].command == f"unbroken status {tmp_path}"
    damaged = errors.NoUsableCheckpoint(store=tmp_path / "checkpoints", skipped=(("final", "torn"),))
    assert damaged.help()[0].command.startswith("unbroken verify ") and "--resume scratch --force" in str(damaged.so())


def test_an_error_that_a_script_prints_says_all_that_a_command_would_print() -> None:
    for error in EXAMPLES:
        assert f"error[{error.kind}]: {error}" == render(error), error.kind
        assert "\x1b" not in str(error), error.kind
        assert error.message == str(error).splitlines()[0], error.kind
