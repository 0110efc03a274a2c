"""How commands speak: one document or text, notes and progress only where somebody looks."""

import io
import json
import logging
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.cli.output import Output, as_command, encoded
from unbroken.cli.status import _loss
from unbroken.errors import BadUsage, StorageFailed, UnknownTopic, render
from unbroken.records.snapshot import RunState


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(28, "No space left on device")


def speaking(*, json: bool = False, quiet: bool = False, terminal: bool = False, **environ: str) -> Output:
    stream = Terminal if terminal else io.StringIO
    return Output(json=json, quiet=quiet, stdout=stream(), stderr=stream(), environ=environ)


def said(output: Output) -> tuple[str, str]:
    assert isinstance(output.stdout, io.StringIO)
    assert isinstance(output.stderr, io.StringIO)
    return output.stdout.getvalue(), output.stderr.getvalue()


def never() -> str:
    raise AssertionError("text that nobody sees is not made")


def test_a_document_has_its_schema_first_and_all_else_in_order() -> None:
    output = speaking(json=True)
    output.document("unbroken.x/1", {"b": {"z": 1, "a": Path("runs/a")}, "a": [{"d": 1, "c": None}]}, never)
    out, err = said(output)
    assert err == ""
    assert out.endswith("}\n")
    assert [*json.loads(out)] == ["schema", "a", "b"]
    assert [*json.loads(out)["b"]] == ["a", "z"]
    assert [*json.loads(out)["a"][0]] == ["c", "d"]
    assert json.loads(out)["b"]["a"] == "runs/a"


def test_text_is_printed_unchanged_with_one_newline() -> None:
    for text in ("one\ntwo", "one\ntwo\n"):
        output = speaking()
        output.document("unbroken.x/1", {}, text.__str__)
        assert said(output) == ("one\ntwo\n", "")


def test_quiet_keeps_the_result() -> None:
    output = speaking(quiet=True)
    output.note("by the way")
    output.document("unbroken.x/1", {}, lambda: "result")
    assert said(output) == ("result\n", "")


def test_a_note_goes_to_standard_error_and_never_beside_json() -> None:
    output = speaking()
    output.note("by the way")
    assert said(output) == ("", "by the way\n")
    output = speaking(json=True)
    output.note("by the way")
    assert said(output) == ("", "")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_invalid_json_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encoded("unbroken.x/1", {"loss": [value]})


def test_a_value_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError, match="a set cannot be written"):
        encoded("unbroken.x/1", {"names": {1, 2}})


facts = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text().filter(lambda key: key != "schema"), facts, max_size=5))
def test_every_document_is_ascii_and_comes_back_equal(given_facts: dict[str, Any]) -> None:
    text = encoded("unbroken.x/1", given_facts)
    assert text.isascii()
    assert json.loads(text) == {"schema": "unbroken.x/1", **given_facts}


def test_an_error_is_text_on_standard_error_or_the_one_document() -> None:
    error = UnknownTopic(topic="lr", nearest=("optimizer",))
    output = speaking()
    output.error(error)
    assert said(output) == ("", render(error) + "\n")
    output = speaking(json=True)
    output.error(error)
    out, err = said(output)
    assert err == ""
    assert json.loads(out)["kind"] == "unknown-topic"


def test_an_error_is_marked_on_a_terminal_unless_color_is_refused() -> None:
    output = speaking(terminal=True)
    output.error(UnknownTopic(topic="lr"))
    assert said(output)[1].startswith("\x1b[1;31merror[unknown-topic]\x1b[0m: ")
    output = speaking(terminal=True, NO_COLOR="1")
    output.error(UnknownTopic(topic="lr"))
    assert "\x1b" not in said(output)[1]


def test_json_has_no_color_on_a_terminal() -> None:
    assert speaking(terminal=True).style.color
    assert not speaking(terminal=True, json=True).style.color


def test_progress_is_drawn_on_a_terminal() -> None:
    output = speaking(terminal=True, TERM="xterm")
    with output.progress("verifying", 3) as advance:
        advance(3)
    out, err = said(output)
    assert "verifying" in err
    assert out == ""


@pytest.mark.parametrize("silent", [{"json": True}, {"quiet": True}, {"terminal": False}])
def test_progress_is_silent_where_it_would_not_be_seen(silent: dict[str, Any]) -> None:
    output = speaking(**{"terminal": True, **silent})
    with output.progress("verifying", 3, is_bytes=True) as advance:
        advance(3)
    assert said(output) == ("", "")


def test_a_full_disk_behind_standard_output_is_reported_as_a_storage_error() -> None:
    output = Output(json=False, quiet=False, stdout=FullDisk(), stderr=sys.stderr, environ={})
    with pytest.raises(StorageFailed, match="No space left on device"):
        output.document("unbroken.x/1", {}, lambda: "result")


def test_verbose_shows_the_log_and_contradicts_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("unbroken")
    handlers, level = list(logger.handlers), logger.level

    @as_command("talk")
    def talk(output: Output) -> None:
        logging.getLogger("unbroken.x").debug("a detail")
        output.document("unbroken.x/1", {}, lambda: "done")

    try:
        talk.main(["-v"], standalone_mode=False)
        assert capsys.readouterr() == ("done\n", "DEBUG unbroken.x: a detail\n")
    finally:
        logger.handlers, logger.level = handlers, level
    with pytest.raises(BadUsage, match="--quiet and --verbose"):
        talk.main(["-v", "-q"], standalone_mode=False)


def test_status_says_of_which_step_a_loss_is() -> None:
    assert _loss(RunState(step=8, loss=2.5, loss_step=8)) == ", loss 2.5000"
    assert _loss(RunState(step=9, loss=2.5, loss_step=8)) == ", loss 2.5000 at step 8"
    assert _loss(RunState(step=9)) == ""
