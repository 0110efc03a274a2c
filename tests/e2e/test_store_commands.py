"""The store's commands as a user calls them: text, JSON, exit codes, and mistakes."""

import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tool
from tests.format.make_golden import GOLDEN
from unbroken.records.lease import acquire, renew
from unbroken.records.process import this_holder
from unbroken.store.manifest import Tensor, decode, encode

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with seven checkpoints, a quarantined one, two abandoned ones, a torn draft and a user's folder."""
    shutil.copytree(GOLDEN, tmp_path / "run", symlinks=True)
    (tmp_path / "run/checkpoints/.tmp-j0009_x-90-1").mkdir()
    (tmp_path / "run/checkpoints/mine").mkdir()
    (tmp_path / "run/checkpoints/mine/notes.txt").write_text("mine")
    return tmp_path / "run"


def stamped(root: Path) -> dict[str, tuple[int, int, int]]:
    """Every name below a directory with its size, its time and its inode."""
    found = {path: path.lstat() for path in root.rglob("*")}
    return {str(path): (status.st_size, status.st_mtime_ns, status.st_ino) for path, status in found.items()}


def document(unbroken: Tool, *arguments: str, code: int = 0) -> dict[str, Any]:
    """The one JSON document that a command prints."""
    ended = unbroken(*arguments, "--json")
    assert (ended.returncode, ended.stderr) == (code, ""), ended
    said: dict[str, Any] = json.loads(ended.stdout)
    assert next(iter(said)) == "schema"
    return said


def damage(run: Path) -> None:
    part = run / "checkpoints/checkpoint-50/state/__0_0.distcp"
    data = bytearray(part.read_bytes())
    data[3] ^= 1
    part.write_bytes(data)


def test_ls_lists_everything_newest_first(unbroken: Tool, run: Path) -> None:
    ended = unbroken("ls", "run")
    assert ended.returncode == 0
    lines = ended.stdout.splitlines()
    assert lines[0].split() == ["step", "name", "saved", "size", "parts", "state", "kept", "because", "note"]
    assert [line.split()[1] for line in lines[1:4]] == ["final", "checkpoint-50", "checkpoint-40"]
    said = document(unbroken, "ls", "run")
    assert said["schema"] == "unbroken.ls/1" and said["store"] == "run/checkpoints"
    assert [entry["state"] for entry in said["entries"]] == [
        *["committed"] * 7,
        *("torn", "quarantined", "abandoned", "abandoned", "foreign"),
    ]
    assert said["entries"][0]["kept_because"] == ["newest usable", "all are kept"]


def test_ls_of_an_empty_store_is_no_error(unbroken: Tool, tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    assert document(unbroken, "ls", "run")["entries"] == []


def test_show_finds_a_checkpoint_by_every_kind_of_name(unbroken: Tool, run: Path) -> None:
    for reference in ("run@10", "run/checkpoints/checkpoint-10", "run/checkpoints@checkpoint-10"):
        said = document(unbroken, "show", reference)
        assert (said["schema"], said["name"], said["step"]) == ("unbroken.show/2", "checkpoint-10", 10)
    assert said["metrics"] == {"accuracy": 0.125, "best": "-inf", "loss": 2.5, "worst": "nan"}
    assert said["parts"][0]["name"] == "empty"
    assert document(unbroken, "show", "run")["name"] == "final"
    assert document(unbroken, "show", "run@latest")["name"] == "final"
    shown = document(unbroken, "show", "run@10", "--tensors")["tensors"]["embed.weight"]
    assert (shown["dtype"], shown["shape"]) == ("bfloat16", [4, 8])
    assert document(unbroken, "show", "run@20", "--tensors")["tensors"] == {}


def test_verify_checks_a_run_and_names_the_damage(unbroken: Tool, run: Path) -> None:
    ended = unbroken("verify", "run", "--full")
    assert ended.returncode == 0 and len(ended.stdout.splitlines()) == 7
    damage(run)
    assert unbroken("verify", "run").returncode == 0
    ended = unbroken("verify", "run", "--full")
    assert ended.returncode == 3 and "Traceback" not in ended.stderr
    said = document(unbroken, "verify", "run@50", "--full", code=3)
    assert said["schema"] == "unbroken.verify/1" and said["is_sound"] is False
    [checkpoint] = said["checkpoints"]
    [finding] = checkpoint["findings"]
    assert (checkpoint["name"], finding["part"], finding["cause"]) == ("checkpoint-50", "state/__0_0.distcp", "damaged")
    assert document(unbroken, "verify", "run@40", "--sampled", "--num-workers", "2")["is_sound"] is True


def test_verify_of_a_store_without_a_checkpoint_exits_with_5(unbroken: Tool, tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    ended = unbroken("verify", "run")
    assert ended.returncode == 5 and ended.stderr.startswith("error[no-usable-checkpoint]")
    assert document(unbroken, "verify", "run", code=5)["kind"] == "no-usable-checkpoint"


def test_a_newer_format_is_reported_and_not_called_damaged(unbroken: Tool, run: Path) -> None:
    path = run / "checkpoints/checkpoint-50/manifest.json"
    path.write_bytes(path.read_bytes().replace(b"unbroken.checkpoint/2", b"unbroken.checkpoint/3"))
    [verified] = document(unbroken, "verify", "run@50", code=3)["checkpoints"]
    assert [each["cause"] for each in verified["findings"]] == ["unknown-format"]
    assert document(unbroken, "show", "run@50", code=3)["kind"] == "format-unknown"
    [line] = [line for line in unbroken("ls", "run").stdout.splitlines() if " checkpoint-50 " in line]
    assert "damaged" not in line


def test_diff_exits_by_what_it_finds(unbroken: Tool, run: Path) -> None:
    same = document(unbroken, "diff", "run@10", "run@10")
    assert (same["compared"], same["is_same"]) == ("tensor", True)
    said = document(unbroken, "diff", "run@checkpoint-20", "run@20", code=3)
    assert (said["compared"], said["is_same"]) == ("part", False)
    said = document(unbroken, "diff", "run@20", "run@10", code=3)
    assert (said["schema"], said["compared"], said["is_same"]) == ("unbroken.diff/1", "part", False)
    assert said["only_in_a"] == ["trainer_state.json"] and "empty" in said["only_in_b"]


@pytest.mark.promise("C17")
def test_a_dry_run_of_prune_changes_nothing_and_shows_what_prune_then_does(unbroken: Tool, run: Path) -> None:
    before = stamped(run)
    results = document(unbroken, "prune", "run", "--keep-last-k", "1", "--keep-milestone-every", "40", "--dry-run")
    assert stamped(run) == before
    assert results["schema"] == "unbroken.prune/2" and results["dry_run"] is True
    done = document(unbroken, "prune", "run", "--keep-last-k", "1", "--keep-milestone-every", "40")
    assert done["removed"] == results["removed"]
    assert done["removed"] == ["checkpoint-10", "checkpoint-20.2", "checkpoint-30-shutdown", "checkpoint-50"]
    left = {path.name for path in (run / "checkpoints").iterdir()}
    assert {"final", "checkpoint-40", "checkpoint-20", "mine", "quarantine", "abandoned", "latest"} <= left
    assert not left & set(done["removed"])
    assert unbroken("verify", "run", "--full").returncode == 0
    again = document(unbroken, "prune", "run", "--keep-last-k", "1", "--keep-milestone-every", "40")
    assert again["removed"] == []


def test_prune_without_a_policy_removes_no_checkpoint(unbroken: Tool, run: Path) -> None:
    before = stamped(run)
    assert document(unbroken, "prune", "run")["removed"] == []
    assert stamped(run) == before


@pytest.mark.promise("C17")
def test_prune_does_not_count_a_newest_checkpoint_that_only_looks_whole(unbroken: Tool, run: Path) -> None:
    shutil.rmtree(run / "checkpoints/final")
    damage(run)
    ended = unbroken("prune", "run", "--keep-last-k", "1")
    assert ended.returncode == 0
    assert "checkpoint-50" in ended.stderr
    assert (run / "checkpoints/checkpoint-40").exists(), "the last good one"
    assert (run / "checkpoints/checkpoint-50").exists(), "damaged ones are for the quarantine"


@pytest.mark.promise("C11")
def test_prune_keeps_what_a_link_beside_the_checkpoints_leads_to(unbroken: Tool, run: Path) -> None:
    (run / "checkpoints/mine/best.ckpt").symlink_to("../checkpoint-40/manifest.json")
    said = document(unbroken, "prune", "run", "--keep-last-k", "1")
    assert {"name": "checkpoint-40", "reason": "mine/best.ckpt is a link to it"} in said["not_removed"]
    assert (run / "checkpoints/mine/best.ckpt").exists()
    assert not (run / "checkpoints/checkpoint-50").exists()


def test_prune_keeps_the_best(unbroken: Tool, run: Path) -> None:
    kept = document(unbroken, "prune", "run", "--keep-best", "loss:max", "--dry-run")["kept"]
    assert kept["checkpoint-10"] == ["best loss"]
    kept = document(unbroken, "prune", "run", "--keep-every-seconds", "3600", "--dry-run")["kept"]
    assert kept["checkpoint-10"] == ["every 3,600 s"]


def test_torn_drafts_are_removed_only_when_no_writer_is_left(unbroken: Tool, run: Path) -> None:
    draft = run / "checkpoints/.tmp-j0009_x-90-1"
    assert [each["name"] for each in document(unbroken, "prune", "run")["not_removed"]] == [draft.name]
    assert draft.exists()
    lease = acquire(run, this_holder(), token="x", now_s=0.0)
    draft.rename(run / f"checkpoints/.tmp-{lease.job}-90-1")
    inside = unbroken("prune", run / "checkpoints", "--include-torn")
    assert inside.returncode == 0 and (run / f"checkpoints/.tmp-{lease.job}-90-1").exists()
    (run / "checkpoints/.tmp-j0000_old-90-1").mkdir()
    assert document(unbroken, "prune", "run")["removed"] == [".tmp-j0000_old-90-1"]
    shutil.rmtree(run / ".lease")
    assert document(unbroken, "prune", "run", "--include-torn")["removed"] == [f".tmp-{lease.job}-90-1"]


def test_from_inside_the_store_a_live_jobs_draft_is_as_safe_as_from_outside(
    unbroken: Tool, run: Path, tmp_path: Path
) -> None:
    lease = acquire(run, this_holder(), token="x", now_s=0.0)
    draft = run / f"checkpoints/.tmp-{lease.job}-90-1"
    draft.mkdir()
    (tmp_path / "link").symlink_to("run/checkpoints")
    assert unbroken("prune", "link", "--include-torn").returncode == 0
    assert draft.exists()
    assert document(unbroken, "status", "link")["status"] == "running"


def test_pins_are_set_and_taken_back(unbroken: Tool, run: Path) -> None:
    assert [document(unbroken, "pin", "run@30", "--reason", "paper")["changed"] for _ in range(2)] == [True, False]
    assert document(unbroken, "prune", "run", "--keep-last-k", "1", "--dry-run")["kept"]["checkpoint-30-shutdown"] == [
        "pinned"
    ]
    for changed in (True, False):
        said = document(unbroken, "unpin", "run@30")
        assert (said["schema"], said["changed"], said["pinned"]) == ("unbroken.pin/1", changed, False)


@pytest.mark.promise("G11")
def test_status_shows_who_holds_the_run_and_what_it_resumes_from(unbroken: Tool, run: Path) -> None:
    said = document(unbroken, "status", "run")
    assert said["schema"] == "unbroken.status/2" and said["status"] == "idle" and said["job"] is None
    assert (said["resumable_step"], said["torn"], said["quarantined"], said["abandoned"]) == (80, 1, 1, 2)
    holder = this_holder()
    acquire(run, holder, token="x", now_s=1_700_000_000.0)
    state = {"status": "running", "global_step": 85, "max_steps": 100, "loss": float("nan"), "pid": holder.pid}
    (run / ".run_state.json").write_text(json.dumps(state))
    said = document(unbroken, "status", "--output-dir", "run")
    assert (said["status"], said["step"], said["loss"], said["job"]["pid"]) == ("running", 85, None, holder.pid)
    assert unbroken("status", "run").returncode == 0
    (run / ".lease/000001.json").write_text("ruined")
    assert document(unbroken, "status", "run")["job"]["host"] == "an unknown host"


@pytest.mark.promise("G11")
def test_a_run_held_on_another_machine_is_shown_by_the_age_of_its_lease(unbroken: Tool, run: Path) -> None:
    ours = this_holder()
    # The very process exists here, but says nothing about a machine that cannot be seen.
    there = replace(ours, host="elsewhere/0123abcd")
    lease = acquire(run, there, token="x", now_s=time.time())
    said = document(unbroken, "status", "run")
    assert (said["status"], said["class"], said["job"]["host"]) == ("running", "held", "elsewhere/0123abcd")
    renew(run, lease, now_s=time.time() - lease.ttl_s - 1)
    assert document(unbroken, "status", "run")["status"] == "running", "its clock may be behind"
    renew(run, lease, now_s=time.time() - 3600)
    said = document(unbroken, "status", "run")
    assert (said["status"], said["class"], said["resumable_step"]) == ("crashed", "again", 80)
    assert said["job"]["liveness"] == "unknown"
    renew(run, lease, now_s=time.time())
    assert document(unbroken, "status", "run")["status"] == "running"
    # The same age on this machine, where the process can be seen to be gone: dead at once.
    renew(run, replace(lease, holder=replace(ours, process_started="long ago")), now_s=time.time())
    assert document(unbroken, "status", "run")["status"] == "crashed"


def test_status_of_a_run_that_has_saved_nothing_yet(unbroken: Tool, tmp_path: Path) -> None:
    acquire(tmp_path / "new", this_holder(), token="x", now_s=0.0)
    said = document(unbroken, "status", "new")
    assert (said["status"], said["resumable_step"]) == ("running", None)


MISTAKES = [
    ["ls", "nothing"],
    ["ls", "empty"],
    ["ls", "a-file"],
    ["ls"],
    ["ls", "run", "more"],
    ["ls", "x" * 300],
    ["show", "run@99"],
    ["show", "run@²"],
    ["show", "run@1__0"],
    ["show", "run@" + "9" * 5000],
    ["show", "run/checkpoints/checkpoint-99"],
    ["show", "run", "--tensor"],
    ["verify", "nothing", "--full"],
    ["verify", "run", "--num-workers", "0"],
    ["verify", "run", "--num-workers", "many"],
    ["diff", "run"],
    ["diff", "run", "nothing"],
    ["prune", "run", "--keep-last-k", "0"],
    ["prune", "run", "--keep-milestone-every", "-5"],
    ["prune", "run", "--keep-best", "loss:sideways"],
    ["prune", "run", "--keep-best", ":max"],
    ["prune", "run", "--keep-best", "los"],
    ["prune", "run", "--keep-last-k", "many"],
    ["prune", "empty"],
    ["pin", "run@99"],
    ["unpin", "nothing"],
    ["status"],
    ["status", "nothing"],
    ["status", "empty"],
    ["seal", "nothing"],
    ["seal", "empty"],
    ["seal", "a-file"],
    ["seal", "a-link"],
    ["seal", "run/checkpoints"],
    ["seal", "run/checkpoints/.tmp-j0009_x-90-1"],
    ["seal", "run/checkpoints/mine"],
    ["seal", "run/checkpoints/mine", "--step", "-1"],
    ["seal", "run/checkpoints/mine", "--step", "1", "--metric", "loss"],
    ["seal", "run/checkpoints/mine", "--step", "1", "--metric", "=1"],
    ["seal", "run", "--all", "--step", "5"],
    ["seal", "empty", "--all"],
    ["seal", "run/checkpoints/checkpoint-40", "--step", "41"],
]


@pytest.mark.parametrize("arguments", MISTAKES, ids=lambda arguments: " ".join(arguments)[:60])
def test_a_mistake_is_reported_in_a_few_lines_and_changes_nothing(
    unbroken: Tool, run: Path, tmp_path: Path, arguments: list[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a-file").write_text("")
    (tmp_path / "a-link").symlink_to("nowhere")
    before = stamped(tmp_path)
    ended = unbroken(*arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error[") and "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) <= 8
    assert stamped(tmp_path) == before


def test_a_damaged_record_or_manifest_is_reported_with_3(unbroken: Tool, run: Path) -> None:
    (run / "checkpoints/checkpoint-20/manifest.json").write_bytes(b"ruined")
    ended = unbroken("show", "run@checkpoint-20")
    assert ended.returncode == 3 and ended.stderr.startswith("error[manifest-damaged]")
    assert len(ended.stderr.splitlines()) <= 8
    listed = {entry["name"]: entry for entry in document(unbroken, "ls", "run")["entries"]}
    assert listed["checkpoint-20"]["state"] == "damaged" and listed["checkpoint-20"]["step"] is None
    (run / "checkpoints/.rewinds/000001.json").write_bytes(b"ruined")
    ended = unbroken("ls", "run")
    assert ended.returncode == 3 and len(ended.stderr.splitlines()) <= 8


def test_no_name_and_no_manifest_steers_the_terminal(unbroken: Tool, run: Path) -> None:
    evil = "evil\x1b[2J\udcff"
    (run / "checkpoints" / evil).mkdir()
    (run / "checkpoints/checkpoint-50" / evil).write_text("")
    path = run / "checkpoints/checkpoint-10/manifest.json"
    manifest = decode(path.read_bytes(), path)
    tensors = {"w\x1b[31m": Tensor("f\x07", (1,), "00")}
    path.write_bytes(encode(replace(manifest, job="j\x1b]0;x\x07", metadata={"a\x1b": "b\x1b"}, tensors=tensors)))
    for command in (
        ["ls", "run"],
        ["show", "run@10", "--tensors"],
        ["verify", "run"],
        ["prune", "run", "--keep-last-k", "1", "--dry-run"],
        ["diff", "run@10", "run@10"],
        ["status", "run"],
    ):
        ended = unbroken(*command)
        assert ended.returncode == 0, ended
        assert not {"\x1b", "\x07"} & set(ended.stdout + ended.stderr), command
    assert "evil\\x1b[2J\\udcff" in unbroken("ls", "run").stdout


def test_quiet_prints_the_result_alone_and_no_color_is_respected(unbroken: Tool, run: Path) -> None:
    for command in (["ls", "run"], ["verify", "run", "--full"], ["status", "run"], ["show", "run@10"]):
        quiet = unbroken(*command, "--quiet")
        assert (quiet.returncode, quiet.stderr) == (0, "") and quiet.stdout
        colored = unbroken(*command, env={"FORCE_COLOR": "1", "NO_COLOR": "1"})
        assert "\x1b" not in colored.stdout


def test_every_command_of_the_store_page_works_as_it_stands(unbroken: Tool, run: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    run.rename(tmp_path / "runs" / "a")
    for name in ("outputs/checkpoint-500", "outputs/checkpoint-1000", "outputs/best"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "model.pt").write_bytes(name.encode())
    page = (ROOT / "docs/store.md").read_text(encoding="utf-8")
    commands = re.findall(r"^unbroken ([^#\n]*?)(?: +# (.*))?$", page, re.MULTILINE)
    assert len(commands) > 12
    for command, note in commands:
        ended = unbroken(*command.split())
        expected = 3 if "exits with 3" in note else 0
        assert ended.returncode == expected, (command, ended.stderr)


def test_verify_names_a_checkpoint_of_ours_that_lost_its_manifest(unbroken: Tool, run: Path) -> None:
    lost = run / "checkpoints/checkpoint-50"
    (lost / "state/index.json").write_text("{}")
    (lost / "manifest.json").unlink()
    verified = document(unbroken, "verify", "run", code=3)["checkpoints"]
    [found] = [each for each in verified if each["name"] == "checkpoint-50"]
    assert [each["part"] for each in found["findings"]] == ["manifest.json"]
    [entry] = [each for each in document(unbroken, "ls", "run")["entries"] if each["name"] == "checkpoint-50"]
    assert (entry["state"], entry["note"]) == ("damaged", "manifest.json: is missing")
