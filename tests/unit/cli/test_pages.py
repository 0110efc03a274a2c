"""The pages of ``explain``: one for each error, and every command they and the errors name really works."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.exceptions import Exit

from tests.unit.errors_examples import EXAMPLES
from unbroken import doctor
from unbroken.cli import explain
from unbroken.cli.group import PROGRAM, ROOT, as_dashed
from unbroken.doctor.finding import KINDS
from unbroken.errors import TABLE

HEADINGS = ["Why it happens", "What unbroken does", "What you can do"]


def named_commands() -> Iterator[tuple[str, str]]:
    """Every ``unbroken ...`` command line that an error or a page tells somebody to run, and who tells it."""
    for error in EXAMPLES:
        yield from ((error.kind, each.command) for each in error.help())
    pages = {**explain.error_pages(), **explain.finding_pages(), **explain.general_pages()}
    for kind, page in pages.items():
        for line in page.splitlines():
            if line.startswith("    "):
                yield f"{kind}.md", re.split(r"\s{3,}", line.strip())[0]
            else:
                yield from ((f"{kind}.md", each) for each in re.findall(r"`(unbroken [^`]+)`", line))


def ours() -> list[tuple[str, list[str]]]:
    found = [(place, shlex.split(re.sub(r"^[A-Z_]+=\S+ ", "", line))) for place, line in named_commands()]
    # A word in capitals stands for any.
    return [(place, words[1:]) for place, words in found if words[0] == PROGRAM and not words[-1].isupper()]


def test_every_error_has_a_page_and_every_page_an_error() -> None:
    assert set(explain.error_pages()) == set(TABLE)


def test_a_page_says_what_how_and_what_to_do_on_one_screen() -> None:
    for kind in TABLE:
        page = explain.error_pages()[kind]
        lines = page.splitlines()
        assert lines[0] == f"# {kind}", kind
        assert [line.removeprefix("## ") for line in lines if line.startswith("## ")] == HEADINGS, kind
        assert 15 <= len(lines) <= 32, kind
        assert max(map(len, lines)) <= 100, kind
        assert lines[-1] == f"Exit code {TABLE[kind].exit_code}.", kind
        assert 20 <= len(explain.meaning(page)) <= 90, kind


def test_every_finding_of_doctor_has_a_page() -> None:
    assert set(explain.finding_pages()) == KINDS and not KINDS & set(TABLE)
    source = "".join(path.read_text() for path in Path(doctor.__file__).parent.glob("*.py"))
    results = set(re.findall(r'\b(?:note|problem)\(\s*"[^"]+",\s*"([a-z-]+)"', source))
    assert results <= KINDS | set(TABLE) and len(results) > 10


def test_a_page_of_a_finding_says_what_how_and_what_to_do_on_one_screen() -> None:
    for kind in KINDS:
        page = explain.finding_pages()[kind]
        lines = page.splitlines()
        assert lines[0] == f"# {kind}", kind
        assert [line.removeprefix("## ") for line in lines if line.startswith("## ")] == HEADINGS, kind
        assert 15 <= len(lines) <= 32, kind
        assert max(map(len, lines)) <= 88, kind
        assert lines[-1].startswith(("A problem", "A note")), kind
        assert 20 <= len(explain.meaning(page)) <= 90, kind


def test_the_page_of_exit_codes_lists_the_kinds_of_every_code() -> None:
    page = explain.general_pages()["exit-codes"]
    listed = re.findall(r"^Exit code (\d+): (.+?)\.$", page.partition("## Kinds")[2], re.MULTILINE | re.DOTALL)
    codes = {kind: int(code) for code, kinds in listed for kind in kinds.replace(",", " ").split()}
    assert codes == {kind: error.exit_code for kind, error in TABLE.items()}


def test_the_errors_and_pages_name_commands_at_all() -> None:
    assert len(ours()) > 2 * len(TABLE)


def parse(words: list[str]) -> click.Context | None:
    """Parse a command line as the tool would, without running it; None where it only asks for help."""
    root = click.Context(ROOT, info_name=PROGRAM, token_normalize_func=as_dashed)
    try:
        if words[0].startswith("-"):
            return ROOT.make_context(PROGRAM, [*words])
        command = ROOT.get_command(root, words[0])
        assert command is not None, f"there is no command {words[0]}"
        return command.make_context(words[0], words[1:], parent=root)
    except Exit:
        assert "--help" in words
        return None


def test_a_command_that_is_named_exists_and_takes_these_arguments() -> None:
    for _, words in ours():
        parsed = parse(words)
        if words[0] == "explain" and parsed is not None and parsed.params["topic"]:
            explain.find(parsed.params["topic"])


@pytest.mark.parametrize("words", [["explain", "--no-such-option"], ["explain", "one", "two"], ["--no-such-option"]])
def test_a_command_line_that_is_wrong_would_be_noticed(words: list[str]) -> None:
    with pytest.raises(click.UsageError):
        parse(words)
