"""Off Linux the package says so, and what helps, before anything else fails.

No other system is here to run on: a process believes that it is one, and lacks the modules that only Unix has.
"""

import json
import subprocess
import sys

import pytest

from unbroken.version import VERSION

ELSEWHERE = """
import sys
sys.platform = {platform!r}
if sys.platform == "win32":
    sys.modules.update(dict.fromkeys(("fcntl", "grp", "pwd", "resource", "termios")))
{rest}
"""
CALL = "from unbroken.cli.main import main; sys.exit(main(sys.argv[1:]))"


def elsewhere(platform: str, rest: str, *words: str) -> "subprocess.CompletedProcess[str]":
    program = ELSEWHERE.format(platform=platform, rest=rest)
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("platform", "helps"), [("darwin", "docker run"), ("win32", "wsl --install")])
def test_off_linux_a_command_says_so_and_what_helps(platform: str, helps: str) -> None:
    ended = elsewhere(platform, CALL, "ls", ".", "--json")
    said = json.loads(ended.stdout)
    assert (ended.returncode, said["kind"], said["exit_code"]) == (2, "platform-unsupported", 2), ended.stderr
    assert platform in said["message"] and said["help"][0]["command"].startswith(helps)


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_off_linux_an_import_of_a_name_says_so(platform: str) -> None:
    ended = elsewhere(platform, "from unbroken import Run")
    assert ended.returncode == 1
    assert f"PlatformUnsupported: unbroken runs on Linux only; this is {platform}" in ended.stderr


def test_the_version_is_answered_everywhere() -> None:
    ended = elsewhere("win32", CALL, "--version")
    assert (ended.returncode, ended.stdout) == (0, f"unbroken {VERSION}\n")
