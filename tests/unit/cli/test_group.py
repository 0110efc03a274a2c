"""The command table and the group over it."""

import ast
import importlib
from pathlib import Path

import click
import pytest

import unbroken.cli
from unbroken.cli.group import PROGRAM, ROOT, as_dashed, nearest
from unbroken.cli.output import Command
from unbroken.cli.table import COMMANDS

each_command = pytest.mark.parametrize("name", sorted(COMMANDS))


@each_command
def test_a_command_is_where_the_table_says_and_begins_with_the_words_of_the_table(name: str) -> None:
    module, _, attribute = COMMANDS[name].place.partition(":")
    command = getattr(importlib.import_module(module), attribute)
    assert isinstance(command, Command)
    assert command.name == name
    assert command.get_short_help_str(limit=200).startswith(COMMANDS[name].help.removesuffix("."))


@each_command
def test_a_command_takes_json_quiet_and_help(name: str) -> None:
    command = ROOT.get_command(click.Context(ROOT), name)
    assert command is not None
    assert {"--json", "--quiet", "-q"} <= {opt for param in command.params for opt in param.opts}


@each_command
def test_a_line_of_help_is_one_sentence_that_fits(name: str) -> None:
    line = COMMANDS[name].help
    assert line[0].isupper()
    assert line.endswith(".")
    assert len(line) <= 66


@each_command
def test_every_option_and_argument_of_a_command_is_explained(name: str) -> None:
    command = ROOT.get_command(click.Context(ROOT), name)
    assert command is not None
    options = [param for param in command.params if isinstance(param, click.Option)]
    assert all(option.help and option.help.endswith(".") for option in options)


def test_every_file_with_a_command_is_in_the_table() -> None:
    folder = Path(unbroken.cli.__file__).parent
    with_command = {
        path.stem
        for path in folder.glob("*.py")
        if any(
            isinstance(node, ast.FunctionDef) and any("as_command" in ast.unparse(d) for d in node.decorator_list)
            for node in ast.parse(path.read_text()).body
        )
    }
    assert with_command == {entry.place.partition(":")[0].rpartition(".")[2] for entry in COMMANDS.values()}


def test_the_help_lists_every_command_under_its_heading() -> None:
    text = ROOT.get_help(click.Context(ROOT, info_name=PROGRAM))
    for name, entry in COMMANDS.items():
        assert f"{entry.heading}:\n" in text
        assert any(line.split()[:1] == [name] and line.endswith(entry.help) for line in text.splitlines())


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("explian", "explain"), ("exp", "explain"), ("completions", "completion"), ("valdiate", "validate")],
)
def test_a_slip_of_the_finger_finds_the_command(typed: str, meant: str) -> None:
    assert nearest(typed, list(COMMANDS))[0] == meant


def test_what_is_near_nothing_gets_no_suggestion() -> None:
    assert nearest("zzzzzz", list(COMMANDS)) == ()


def test_an_underscore_is_a_dash() -> None:
    assert as_dashed("--output_dir") == "--output-dir"
