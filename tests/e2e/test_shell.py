"""The tool as a process: what it says, where, and with which exit code."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Tool
from unbroken.cli.commands import COMMANDS
from unbroken.version import VERSION

TOOL = [sys.executable, "-m", "unbroken"]
# Command lines that must start without torch, every command at least once except those of ``MAY_LOAD_TORCH``; each
# succeeds beside ``a_run``.
HERE = "/FOLDER"  # stands for the folder of the test
TORCH_FREE = [
    ["--version"],
    ["--help"],
    ["explain"],
    ["explain", "torn-checkpoint"],
    ["explain", "optimizer.learning_rate"],
    ["explain", "--json"],
    ["completion", "bash"],
    ["init", "--preset", "tiny"],
    ["doctor", "run", "--no-torch", "--json"],
    *(["status", "run"], ["status", "run", "--json"], ["ls", "run"], ["ls", "run", "--json"], ["show", "run"]),
    *(["verify", "run", "--full"], ["diff", "run", "run"], ["prune", "run", "--dry-run"], ["pin", "run"]),
    *(["run", "-m", "this"], ["launch", "-m", "this"], ["train", "--help"]),
    *(
        ["plan", "run.yaml", "--step-time", "1", "--save-time", "1", "--json"],
        ["slurm", "init", "run.yaml"],
        ["kubernetes", "run.yaml", "--image", "i", "--claim", "c"],
    ),
    *(["stop", "run"], ["release", "run"], ["stop", "run", "--json"], ["outcome", "run"], ["outcome", "run", "--json"]),
    *(["mirror", "run", "--to", f"file://{HERE}/mirror", "--dry-run"], ["fetch", "--help"]),
    *(["unpin", "run"], ["seal", "run/checkpoints/checkpoint-7"], ["validate", "run.yaml", "--no-data", "--json"]),
]
# Commands that compute with a model or read tokenized data.
MAY_LOAD_TORCH = {
    *("demo", "tokenizer", "tokenize", "data"),
    *("evaluate", "generate", "batch-generate", "export", "import", "prove", "replay"),
}
SHOW_MODULES = """
import sys
from unbroken.cli.main import main
code = main(sys.argv[1:])
sys.stderr.write("MODULES " + " ".join(sorted(sys.modules)))
sys.exit(code)
"""


@pytest.fixture
def a_run(tmp_path: Path) -> Path:
    """A folder with a config, and a run with one sealed checkpoint."""
    checkpoint = tmp_path / "run" / "checkpoints" / "checkpoint-7"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.pt").write_bytes(b"bytes")
    (tmp_path / "run" / ".run_state.json").write_text('{"status": "completed"}')
    for arguments in (["seal", str(checkpoint)], ["init", "--preset", "tiny", "-o", str(tmp_path / "run.yaml")]):
        subprocess.run([*TOOL, *arguments], check=True, stdout=subprocess.DEVNULL)
    return tmp_path


def loaded_by(arguments: list[str], folder: Path) -> set[str]:
    """The modules a command leaves in ``sys.modules``."""
    command = [sys.executable, "-c", SHOW_MODULES, *(each.replace(HERE, str(folder)) for each in arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    return set(ended.stderr.partition("MODULES ")[2].split())


@pytest.mark.promise("G11")
@pytest.mark.parametrize("arguments", TORCH_FREE, ids=" ".join)
def test_a_torch_free_command_loads_neither_torch_nor_numpy_nor_rich(arguments: list[str], a_run: Path) -> None:
    assert not {"torch", "numpy", "rich"} & loaded_by(arguments, a_run)


def test_every_command_is_watched_for_what_it_loads() -> None:
    torch_free = {arguments[0] for arguments in TORCH_FREE if not arguments[0].startswith("-")}
    assert torch_free == COMMANDS.keys() - MAY_LOAD_TORCH


def test_the_modules_of_a_command_are_seen_at_all(tmp_path: Path) -> None:
    assert {"click", "unbroken.cli.explain"} <= loaded_by(["explain"], tmp_path)


def test_the_version_is_answered_before_click_is_loaded(tmp_path: Path) -> None:
    assert not {"click", "json", "unbroken.errors"} & loaded_by(["--version"], tmp_path)


def test_listing_the_commands_loads_none_of_them(tmp_path: Path) -> None:
    assert not {"unbroken.cli.explain", "unbroken.cli.init", "unbroken.config"} & loaded_by(["--help"], tmp_path)


def test_the_version_is_one_line(unbroken: Tool) -> None:
    ended = unbroken("--version")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"unbroken {VERSION}\n", "")


def test_the_installed_command_is_the_module() -> None:
    script = Path(sys.executable).parent / "unbroken"
    assert subprocess.check_output([script, "--version"], text=True) == f"unbroken {VERSION}\n"


@pytest.mark.parametrize("arguments", [["--json", "--version"], ["--version", "--json"]], ids=" ".join)
def test_the_version_is_a_document_too(unbroken: Tool, arguments: list[str]) -> None:
    assert json.loads(unbroken(*arguments).stdout) == {"schema": "unbroken.version/1", "version": VERSION}


def test_without_a_command_the_help_is_shown_and_the_exit_code_says_that_nothing_was_done(unbroken: Tool) -> None:
    ended = unbroken()
    assert ended.returncode == 2
    assert ended.stdout == unbroken("--help").stdout


@pytest.mark.parametrize("arguments", [["--json", "explain", "bad-usage"], ["explain", "bad-usage", "--json"]])
def test_json_may_stand_before_or_after_the_command(unbroken: Tool, arguments: list[str]) -> None:
    ended = unbroken(*arguments)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads(ended.stdout)["schema"] == "unbroken.explain/1"


@pytest.mark.parametrize("arguments", [["-q", "explain", "bad-usage"], ["explain", "--quiet", "bad-usage"]])
def test_quiet_may_stand_before_or_after_the_command(unbroken: Tool, arguments: list[str]) -> None:
    assert unbroken(*arguments).stdout == unbroken("explain", "bad-usage").stdout


MISTAKES = [
    (["explian"], "unknown-command", "did you mean explain?"),
    (["zzz"], "unknown-command", "no command 'zzz'"),
    (["--jsno"], "bad-usage", "did you mean --json?"),
    (["explain", "--quite"], "bad-usage", "did you mean --quiet?"),
    (["explain", "one", "two"], "bad-usage", "unexpected extra argument"),
    (["completion"], "bad-usage", "missing argument SHELL"),
    (["completion", "tcsh"], "bad-usage", "'tcsh' is not one of"),
    (["explain", "torn-checkpont"], "unknown-topic", "did you mean torn-checkpoint?"),
    (["explain", "optimizer.lerning_rate"], "unknown-topic", "did you mean optimizer.learning_rate?"),
    (["explain", "../errors/torn-checkpoint"], "unknown-topic", "torn-checkpoint"),
    (["explain", ""], "unknown-topic", "''"),
]


@pytest.mark.parametrize(("arguments", "kind", "words"), MISTAKES, ids=lambda each: str(each))
def test_a_mistake_is_one_clear_error_of_at_most_eight_lines(
    unbroken: Tool, arguments: list[str], kind: str, words: str
) -> None:
    ended = unbroken(*arguments)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith(f"error[{kind}]: ")
    assert words in ended.stderr
    assert len(ended.stderr.splitlines()) <= 8
    assert "Traceback" not in ended.stderr
    assert "\x1b" not in ended.stderr


@pytest.mark.parametrize(("arguments", "kind", "words"), MISTAKES, ids=lambda each: str(each))
def test_a_mistake_is_one_document_with_json(unbroken: Tool, arguments: list[str], kind: str, words: str) -> None:
    ended = unbroken("--json", *arguments)
    assert ended.returncode == 2
    assert ended.stderr == ""
    document = json.loads(ended.stdout)
    assert (document["schema"], document["kind"], document["exit_code"]) == ("unbroken.error/1", kind, 2)


def test_what_follows_two_dashes_is_no_option(unbroken: Tool) -> None:
    ended = unbroken("explain", "--", "--json")
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert "called '--json'" in ended.stderr


def test_the_headline_of_an_error_can_be_pasted_as_a_topic(unbroken: Tool) -> None:
    assert unbroken("explain", "error[run-held]:").stdout == unbroken("explain", "run-held").stdout


def test_every_listed_topic_has_a_text(unbroken: Tool) -> None:
    listed = json.loads(unbroken("explain", "--json").stdout)
    assert "exit-codes" in listed["pages"]
    assert "run-held" in listed["errors"]
    assert "optimizer.learning_rate" in listed["config"]
    text = unbroken("explain").stdout
    assert all(topic in text for topics in ("errors", "pages", "config") for topic in listed[topics])


def on_a_terminal(arguments: list[str], **environ: str) -> str:
    """What a command says to a terminal."""
    clean = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    master, slave = pty.openpty()
    try:
        subprocess.run([*TOOL, *arguments], stdout=slave, stderr=slave, check=False, env={**clean, **environ})
        return os.read(master, 65536).decode()
    finally:
        os.close(master)
        os.close(slave)


def test_a_terminal_gets_color_unless_it_is_refused() -> None:
    colored = on_a_terminal(["explian"], TERM="xterm")
    assert "\x1b[1;31merror[unknown-command]" in colored
    plain = on_a_terminal(["explian"], TERM="xterm", NO_COLOR="1")
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == plain


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "said").mkdir()
    script = f"{' '.join(TOOL)} explain 2>{tmp_path}/said/errors | true; echo ${{PIPESTATUS[0]}}"
    # The reader is gone before the first byte comes: `true` reads nothing, and the writer starts slowly.
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout == "141\n"
    assert (tmp_path / "said" / "errors").read_text() == ""


@pytest.mark.parametrize("arguments", [["explain"], ["--version"], ["--json", "explain"]], ids=" ".join)
def test_a_full_disk_behind_a_redirect_is_reported(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run([*TOOL, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 74
    assert ended.stderr.startswith("error[storage-failed]: ")
    assert "Traceback" not in ended.stderr


def test_closed_streams_are_no_bug() -> None:
    script = f"{' '.join(TOOL)} explain >&- 2>&-"
    assert subprocess.run(["bash", "-c", script], check=False).returncode == 0


def test_a_name_that_is_no_utf_8_is_shown_and_does_not_crash() -> None:
    command = [*map(os.fsencode, TOOL), b"explain", b"caf\xe9"]
    for extra in ([], [b"--json"]):
        ended = subprocess.run([*command, *extra], capture_output=True, check=False)
        assert ended.returncode == 2
        assert b"caf\\udce9" in ended.stdout + ended.stderr


def test_an_interrupt_ends_the_tool_with_130_and_without_a_traceback() -> None:
    script = (
        "import os, signal, sys, unbroken.cli.group as group\n"
        "from unbroken.cli.main import main\n"
        "group.ROOT.get_command = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.exit(main(['explain']))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + signal.SIGINT, "", "")


BROKEN = """
import sys, unbroken.cli.group as group
from unbroken.cli.main import main
def broken(*_): raise KeyError("step\\nand more")
group.ROOT.get_command = broken
sys.exit(main(sys.argv[1:]))
"""


def test_a_bug_is_reported_as_ours_without_a_traceback() -> None:
    command = [sys.executable, "-c", BROKEN, "explain"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error[internal-error]: this is a bug in unbroken: KeyError")
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) <= 8


def test_a_bug_shows_its_traceback_on_request() -> None:
    command = [sys.executable, "-c", BROKEN, "explain", "--json"]
    env = {**os.environ, "UNBROKEN_TRACEBACK": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert ended.returncode == 1
    assert "in broken" in ended.stderr
    assert json.loads(ended.stdout)["kind"] == "internal-error"


def completed(words: str) -> list[str]:
    """What bash would offer after these words."""
    typed = words.split(" ")
    variables = {"_UNBROKEN_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(typed) - 1)}
    ended = subprocess.run(TOOL, capture_output=True, text=True, check=True, env={**os.environ, **variables})
    return [line.partition(",")[2] for line in ended.stdout.splitlines()]


def test_the_shell_completes_commands_options_and_topics() -> None:
    assert completed("unbroken expl") == ["explain"]
    assert completed("unbroken --vers") == ["--version"]
    assert completed("unbroken explain --js") == ["--json"]
    assert completed("unbroken explain torn") == ["torn-checkpoint"]
    assert completed("unbroken completion z") == ["zsh"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_names_the_tool(unbroken: Tool, shell: str) -> None:
    script = unbroken("completion", shell).stdout
    assert "_UNBROKEN_COMPLETE" in script
    assert "unbroken" in script


def test_bash_accepts_the_completion_script(unbroken: Tool) -> None:
    script = unbroken("completion", "bash").stdout + "\ncomplete -p unbroken\n"
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert "_unbroken_completion" in ended.stdout
