"""``unbroken doctor`` as users call it: real ranks over gloo, real file systems, real signals."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tool
from tests.e2e.test_exfat import exfat as exfat  # a fixture
from tests.patience import PATIENCE_S
from unbroken.cli.explain import error_pages, finding_pages
from unbroken.doctor.file_system import PREFIX
from unbroken.prove.small_disk import fill

FILES_ONLY = "--no-torch"


def parsed(ended: "subprocess.CompletedProcess[str]", code: int = 0) -> dict[str, dict[str, Any]]:
    """The findings of a call with ``--json``, by subject."""
    assert ended.returncode == code, ended.stdout + ended.stderr
    document = json.loads(ended.stdout)
    assert document["schema"] == "unbroken.doctor/1" and document["is_sound"] is (code == 0)
    known = {*error_pages(), *finding_pages()}
    assert all((each["kind"] in known) != (each["level"] == "ok") for each in document["findings"])
    return {each["subject"]: each for each in document["findings"]}


@pytest.mark.promise("X1")
def test_this_machine_is_exact_and_the_result_is_kept(unbroken: Tool, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    cache = tmp_path / "cache"
    ended = unbroken("doctor", "runs", "--json", env={"XDG_CACHE_HOME": str(cache), "GLOO_SOCKET_IFNAME": "lo"})
    found = parsed(ended)
    assert not ended.stderr and not list((tmp_path / "runs").iterdir())
    combinations = found["exact"]["values"]["combinations"]
    assert {(each["layout"], each["dtype"], each["verdict"]) for each in combinations} == {
        (layout, dtype, "exact") for layout in ("replicated", "sharded") for dtype in ("float32", "bfloat16", "float16")
    }
    assert found["gloo"]["level"] == "ok" and found["torch"]["values"]["version"]
    assert [path.suffix for path in cache.rglob("*") if path.is_file()] == [".json"]


def test_gloo_without_its_interface_is_one_problem_beside_the_rest(unbroken: Tool, tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path), "GLOO_SOCKET_IFNAME": "nosuch0"}
    found = parsed(unbroken("doctor", "--json", env=env), 3)
    assert {subject for subject, each in found.items() if each["level"] == "problem"} == {"gloo"}
    assert found["gloo"]["kind"] == "gloo-unreachable" and found["exact"]["level"] == "ok"


def test_a_torch_that_does_not_import_is_one_problem_beside_the_rest(unbroken: Tool, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text(
        "raise ImportError('libtorch_cpu.so: cannot open shared object file')\n"
    )
    found = parsed(unbroken("doctor", "--json", env={"PYTHONPATH": str(tmp_path / "broken")}), 3)
    assert found["torch"]["kind"] == "torch-broken" and "libtorch_cpu.so" in found["torch"]["text"]
    assert found["rename"]["level"] == "ok"


def test_all_problems_are_shown_at_once_on_80_columns(unbroken: Tool, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text(f"raise ImportError({'no libtorch ' * 20!r})\n")
    ended = unbroken("doctor", "nowhere", env={"PYTHONPATH": str(tmp_path / "broken")})
    assert ended.returncode == 3
    assert max(map(len, ended.stdout.splitlines())) <= 80
    assert [line for line in ended.stdout.splitlines() if "unbroken explain" in line and "path-missing" in line]
    assert ended.stdout.endswith("2 problems\n")


def test_without_torch_it_neither_imports_nor_starts_anything(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "subprocess.Popen = None\n"
        "from unbroken.cli.main import main\n"
        f"code = main(['doctor', {str(tmp_path)!r}, '--no-torch', '--json'])\n"
        "assert code == 0 and 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", STUCK, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        ends_at = time.monotonic() + PATIENCE_S
        while not list(tmp_path.glob(f"{PREFIX}*/speed")) and time.monotonic() < ends_at:
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 128 + number
    assert not list(tmp_path.iterdir())


# The command as it is, but the measurement of the speed has begun and does not end.
STUCK = """
import sys, time
from pathlib import Path
import unbroken.doctor.file_system as file_system
from unbroken.cli.main import main

def endless(scratch, **_):
    (scratch / "speed").write_bytes(b"half")
    time.sleep(600)

file_system.write_speed = endless
sys.exit(main(["doctor", sys.argv[1], "--no-torch"]))
"""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory with room for nothing but a few small files."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=40", "tmpfs", str(mounted)], check=True)
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


@pytest.mark.needs("root")
@pytest.mark.promise("U16")
def test_a_small_full_and_read_only_tmpfs_are_clear_findings(unbroken: Tool, small: Path) -> None:
    (small / "mine").write_text("mine")
    found = parsed(unbroken("doctor", small, FILES_ONLY, "--json"), 3)
    assert found["file system"]["kind"] == "in-memory" and found["free space"]["kind"] == "no-room"
    assert found["disk speed"]["kind"] == "not-measured" and found["rename"]["level"] == "ok"
    assert fill(small) > 0
    found = parsed(unbroken("doctor", small, FILES_ONLY, "--json"), 3)
    assert found["rename"]["kind"] == "no-room"
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    found = parsed(unbroken("doctor", small, FILES_ONLY, "--json"), 3)
    assert found["writing"]["kind"] == "not-writable"
    assert {path.name for path in small.iterdir()} == {"mine", ".ballast"} and (small / "mine").read_text() == "mine"


@pytest.mark.needs("root", "loop", "exfat")
@pytest.mark.promise("U16")
def test_exfat_has_neither_hard_links_nor_symlinks(unbroken: Tool, exfat: Path) -> None:
    found = parsed(unbroken("doctor", exfat, FILES_ONLY, "--json"))
    notes = {each["kind"] for each in found.values() if each["level"] == "note"}
    assert {"no-hard-links", "no-symlinks"} <= notes <= {"no-hard-links", "no-symlinks", "not-measured"}
    assert not list(exfat.iterdir())
