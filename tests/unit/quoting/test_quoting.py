"""Text from outside inside a shell, a YAML document, a terminal: exactly what it was, and nothing more."""

import logging
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from unbroken.errors import PathMissing, render
from unbroken.quoting.log import logger
from unbroken.quoting.shell import for_shell, shell_line
from unbroken.quoting.terminal import for_terminal, printable, styled, unstyled
from unbroken.quoting.yaml import comment, dumped, scalar

pytestmark = pytest.mark.promise("U17")

WORDS = (
    *("", "plain", "a b", "it's", '"', "\\", "$(touch x)", "`id`", "a;b", "-x", "~", "*", "#", "é", "模"),
    *(
        "a\nb",
        "\n",
        "a\r\nb",
        "\t",
        "\x1b[2J",
        "\x07",
        "'\n'",
        "\\\n",
        "$\n",
        "1\x012",
        "\x7f8",
        "\u202e",
        "\u2028",
        "\udcff",
    ),
)
STEERING = "\x1b[2J\x1b]0;t\x07\x9b31m\r\x08\u202e\u2066\u200f\u061c\u2028\ufeff\U000e0041\udcff"
CONTROLS = {each for each in STEERING if not each.isprintable()}


def test_bash_reads_every_word_as_it_was_given() -> None:
    said = subprocess.run(["bash", "-c", f"printf '%s\\0' {shell_line(WORDS)}"], capture_output=True, check=True)
    assert said.stdout.split(b"\0")[:-1] == [word.encode("utf-8", "surrogateescape") for word in WORDS]


@pytest.mark.parametrize("word", WORDS, ids=repr)
def test_a_quoted_word_is_one_printable_line(word: str) -> None:
    assert for_shell(word).isprintable()
    assert for_shell(Path("runs") / (word.replace("/", "") or "x")).isprintable()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_yaml_reads_every_text_as_it_was_given(text: str) -> None:
    # Two characters that YAML forbids even when they are escaped, as its readers have it.
    if not {"\ufffe", "\uffff"} & set(text):
        assert yaml.safe_load(f"key: {scalar(text)}") == {"key": text}
        assert len(scalar(text).splitlines()) <= 1
    assert len(comment(text).splitlines()) == 1
    assert yaml.safe_load(comment(text)) is None


@pytest.mark.parametrize("text", ["a\nb: c", "- x", "\x1b[2J", "\u202e", "a: b #c", "&a", "!!python/object:x", "a\n"])
def test_a_document_carries_a_text_and_nothing_else(text: str) -> None:
    made = dumped({"key": text, "list": [text]})
    assert yaml.safe_load(made) == {"key": text, "list": [text]}
    assert for_terminal(made) == made


def test_nothing_that_steers_a_terminal_reaches_it() -> None:
    shown = for_terminal(f"a{STEERING}b\n\tc")
    assert shown.isascii() and not CONTROLS & set(shown)
    assert shown.startswith("a\\x1b[2J\\x1b]0;t\\x07") and shown.endswith("b\n\tc")
    assert printable("a\nb\tc").splitlines() == ["a\\nb\\tc"]


def test_text_that_people_write_is_left_alone() -> None:
    for text in ("loss 0.5", "模型", "नमस्ते", "👩\u200d🔬", "a\u00a0b", "می\u200cخواهم"):
        assert for_terminal(text) == text


def test_a_style_of_ours_is_painted_and_one_from_outside_is_spelled_out() -> None:
    outside = "\x1b[32msound\x1b[0m"
    assert for_terminal(f"{styled('1', 'a')} {outside}") == "\x1b[1ma\x1b[0m \\x1b[32msound\\x1b[0m"
    assert unstyled(printable(styled("1", f"a\n{outside}"))) == "a\\n\\x1b[32msound\\x1b[0m"


def test_an_error_takes_one_line_a_field_whatever_a_path_is_called() -> None:
    error = PathMissing(path=Path(f"runs/a\nerror[forged]: {STEERING}"), purpose="run")
    assert not CONTROLS & set(render(error) + str(error))
    assert not any(line.startswith("error[forged]") for line in render(error).splitlines())


def test_a_log_message_cannot_steer_whoever_s_handler_shows_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        logger("unbroken.test").info("saved %s", "x\x1b[2J\u202e")
    assert caplog.messages == ["saved x\\x1b[2J\\u202e"]
