"""The command table and the group over it."""

import ast
import importlib
from pathlib import Path

import click
import pytest

import unbroken.cli
from unbroken.cli.commands import COMMANDS, Entry
from unbroken.cli.group import PROGRAM, ROOT, LazyGroup, as_dashed, nearest
from unbroken.cli.output import Command


def load(entry: Entry) -> click.Command:
    """The command that an entry of a table names."""
    module, _, attribute = entry.target.partition(":")
    command: click.Command = getattr(importlib.import_module(module), attribute)
    return command


def with_groups() -> dict[str, Entry]:
    """Every command, also those of groups, by what a person types."""
    found = dict(COMMANDS)
    for name, entry in COMMANDS.items():
        command = load(entry)
        if isinstance(command, LazyGroup):
            found |= {f"{name} {inner}": each for inner, each in command.table.items()}
    return found


EVERY = with_groups()


def test_a_command_is_where_the_table_says_and_begins_with_the_words_of_the_table() -> None:
    for name in EVERY:
        command = load(EVERY[name])
        assert isinstance(command, Command | LazyGroup), name
        assert command.name == name.rpartition(" ")[2], name
        assert command.get_short_help_str(limit=200).startswith(EVERY[name].help.removesuffix(".")), name


def test_a_command_takes_json_quiet_and_help() -> None:
    for name in EVERY:
        command = load(EVERY[name])
        assert {"--json", "--quiet", "-q", "--verbose", "-v"} <= {
            opt for param in command.params for opt in param.opts
        }, name


def test_a_line_of_help_is_one_sentence_that_fits() -> None:
    for name in EVERY:
        line = EVERY[name].help
        assert line[0].isupper(), name
        assert line.endswith("."), name
        assert len(line) <= 66, name


def test_every_option_and_argument_of_a_command_is_explained() -> None:
    for name in EVERY:
        command = load(EVERY[name])
        options = [param for param in command.params if isinstance(param, click.Option)]
        assert all(option.help and option.help.endswith(".") for option in options), name


def test_every_file_with_a_command_is_in_the_table() -> None:
    folders = [Path(package.__file__ or "").parent for package in (unbroken.cli,)]
    with_command = {
        f"unbroken.{folder.name}.{path.stem}"
        for folder in folders
        for path in folder.glob("*.py")
        if any(
            isinstance(node, ast.FunctionDef) and any("as_command" in ast.unparse(d) for d in node.decorator_list)
            for node in ast.parse(path.read_text()).body
        )
    }
    places = {entry.target.partition(":")[0] for entry in EVERY.values() if not isinstance(load(entry), LazyGroup)}
    assert with_command == places


def test_the_help_lists_every_command_under_its_heading() -> None:
    text = ROOT.get_help(click.Context(ROOT, info_name=PROGRAM))
    for name, entry in COMMANDS.items():
        assert f"{entry.heading}:\n" in text
        assert any(line.split()[:1] == [name] and line.endswith(entry.help) for line in text.splitlines())


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("explian", "explain"), ("expl", "explain"), ("completions", "completion"), ("valdiate", "validate")],
)
def test_a_typo_finds_the_command(typed: str, meant: str) -> None:
    assert nearest(typed, list(COMMANDS))[0] == meant


def test_a_name_without_a_close_match_gets_no_suggestion() -> None:
    assert nearest("zzzzzz", list(COMMANDS)) == ()


@pytest.mark.parametrize(("typed", "meant"), [("resume", "train"), ("delete", "prune"), ("kill", "stop")])
def test_a_name_that_other_tools_use_leads_to_the_command(typed: str, meant: str) -> None:
    assert nearest(typed, list(COMMANDS)) == (meant,)
    assert nearest(typed, ["resumed"]) == (("resumed",) if typed == "resume" else ())


def test_an_underscore_is_a_dash() -> None:
    assert as_dashed("--output_dir") == "--output-dir"
