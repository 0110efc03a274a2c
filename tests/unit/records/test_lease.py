"""Who holds a run: one winner, dead holders replaced, live ones never."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest

from unbroken.errors import LeaseLost, RunGone, RunHeld, render
from unbroken.records.lease import (
    DEFAULT_TTL_S,
    Holder,
    Lease,
    Standing,
    acquire,
    draft_judge,
    read_current,
    release,
    release_expired,
    renew,
    require_held,
)
from unbroken.records.process import host_name, process_of, process_started, this_holder

RELEASED = {
    "schema": "unbroken.lease/1",
    "token": "a",
    "holder": {"host": "h", "pid": 1, "process_started": "x"},
    "taken_at_s": 0,
    "renewed_at_s": 0,
    "ttl_s": 1,
    "is_released": True,
}


def take(run: Path, *, pid: int = 10, now_s: float = 0.0, alive: bool = False, host: str = "here") -> Lease:
    """Take a run as process ``pid``; ``alive`` is what is known of the one before."""

    def seen(holder: Holder) -> str | None:
        if holder.host != "here":
            return None
        return f"t{holder.pid}" if alive else ""

    return acquire(run, Holder(host, pid, f"t{pid}"), token=f"k{pid}", now_s=now_s, process_of=seen)


def test_a_run_that_was_never_held_is_free_and_the_first_job_is_number_one(tmp_path: Path) -> None:
    assert read_current(tmp_path) is None
    lease = take(tmp_path)
    assert (lease.number, lease.job) == (1, "j0001_k10")
    assert read_current(tmp_path) == lease


def test_a_live_holder_is_never_replaced_and_is_named(tmp_path: Path) -> None:
    take(tmp_path, pid=10)
    with pytest.raises(RunHeld) as held:
        take(tmp_path, pid=11, now_s=10_000.0, alive=True)
    assert held.value.exit_code == 7
    assert (held.value.path, held.value.proof) == (tmp_path, "process")
    assert len(render(held.value).splitlines()) <= 8


def test_a_dead_holder_on_this_host_is_replaced_at_once(tmp_path: Path) -> None:
    take(tmp_path, pid=10)
    assert take(tmp_path, pid=11, now_s=0.1, alive=False).number == 2


def test_a_process_number_used_again_is_not_the_holder(tmp_path: Path) -> None:
    lease = take(tmp_path, pid=10)
    assert lease.standing(lambda holder: "t10") is Standing.ALIVE
    assert lease.standing(lambda holder: "started later") is Standing.GONE


@pytest.mark.promise("U6")
def test_a_holder_on_another_host_is_never_judged_by_a_clock(tmp_path: Path) -> None:
    lease = take(tmp_path, host="there", now_s=100.0)
    for now_s in (0.0, 100.0, 1e9):
        with pytest.raises(RunHeld, check=lambda each: each.proof == "unknown") as held:
            take(tmp_path, pid=11, now_s=now_s)
        assert held.value.help()[-1].command == f"unbroken release {tmp_path}"
    assert lease.standing(lambda holder: None) is Standing.UNKNOWN
    assert lease.seems_live(now_s=50.0) and lease.seems_live(now_s=300.0) and not lease.seems_live(now_s=1000.0)


def test_a_released_run_is_free_at_once_even_for_another_host(tmp_path: Path) -> None:
    lease = take(tmp_path, host="there", now_s=0.0)
    release(tmp_path, lease, now_s=1.0)
    assert take(tmp_path, pid=11, now_s=1.5).number == 2


def test_whoever_was_replaced_can_neither_renew_nor_release_nor_commit(tmp_path: Path) -> None:
    old = take(tmp_path, pid=10)
    new = take(tmp_path, pid=11)
    for move in (
        lambda: renew(tmp_path, old, now_s=1.0),
        lambda: release(tmp_path, old, now_s=1.0),
        lambda: require_held(tmp_path, old),
    ):
        with pytest.raises(LeaseLost, check=lambda lost: (lost.mine, lost.current) == (1, 2)):
            move()
    require_held(tmp_path, new)
    assert read_current(tmp_path) == new


def test_a_lease_that_vanished_is_lost(tmp_path: Path) -> None:
    lease = take(tmp_path)
    (tmp_path / ".lease" / "000001.json").unlink()
    with pytest.raises(RunGone, check=lambda gone: (gone.job, gone.is_there) == (1, True)):
        require_held(tmp_path, lease)
    (tmp_path / ".lease").rmdir()
    tmp_path.rmdir()
    with pytest.raises(RunGone, check=lambda gone: (gone.job, gone.is_there) == (1, False)):
        renew(tmp_path, lease, now_s=1.0)
    assert not tmp_path.exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "{}",
        "[" * 60_000,
        '{"schema":"unbroken.lease/2"}',
        json.dumps({"schema": "unbroken.lease/1", "token": "a", "holder": {}}),
        json.dumps({**RELEASED, "taken_at_s": float("nan")}),
        json.dumps({**RELEASED, "renewed_at_s": 10**400}),
        json.dumps({**RELEASED, "renewed_at_s": 1e308}),
        json.dumps({**RELEASED, "ttl_s": 1e9}),
    ],
    ids=["empty", "cut", "null", "bare", "deep", "newer", "holder", "nan", "huge", "far", "endless"],
)
@pytest.mark.promise("U6")
def test_a_lease_that_cannot_be_read_is_held_and_not_free(tmp_path: Path, text: str) -> None:
    take(tmp_path)
    path = tmp_path / ".lease" / "000001.json"
    path.write_text(text)
    os.utime(path, (1000.0, 1000.0))
    with pytest.raises(RunHeld, check=lambda each: each.proof == "unknown"):
        take(tmp_path, pid=11, now_s=1001.0)
    damaged = read_current(tmp_path)
    assert damaged is not None and damaged.ttl_s == DEFAULT_TTL_S
    live = draft_judge(tmp_path, is_live=lambda lease: lease.standing(process_of) is not Standing.GONE)
    assert live("j0001_k10") and not live("j0000_old")
    os.utime(path, (1001.0, 1001.0))
    assert read_current(tmp_path) != damaged, "whoever rewrites it gives a sign of life"
    with pytest.raises(RunHeld):
        release_expired(tmp_path, damaged, by="x")
    os.utime(path, (1000.0, 1000.0))
    release_expired(tmp_path, damaged, by="x")
    assert take(tmp_path, pid=11, now_s=1.0).number == 2


@pytest.mark.promise("U6")
def test_a_lease_of_an_older_version_is_read(tmp_path: Path) -> None:
    take(tmp_path)
    (tmp_path / ".lease" / "000001.json").write_text(json.dumps({**RELEASED, "is_released": False}))
    found = read_current(tmp_path)
    assert found == Lease(1, "a", Holder("h", 1, "x"), 0.0, 0.0, ttl_s=1.0)
    assert replace(found, holder=replace(this_holder(), scope=None)).standing(process_of) is Standing.UNKNOWN


def test_other_files_beside_the_leases_are_not_counted(tmp_path: Path) -> None:
    take(tmp_path)
    for name in ("²²²²²².json", "7.json", "notes.txt", "000009.json.bak", "-00001.json"):
        (tmp_path / ".lease" / name).write_text("{}")
    (tmp_path / ".lease" / "000008.json").mkdir()
    found = read_current(tmp_path)
    assert found is not None and found.number == 1


def test_old_leases_are_tidied_and_numbers_never_go_back(tmp_path: Path) -> None:
    for number in range(1, 13):
        assert take(tmp_path, pid=number).number == number
    assert [path.name for path in sorted((tmp_path / ".lease").iterdir())] == [
        f"{number:06}.json" for number in range(8, 13)
    ]


def test_only_the_current_live_job_may_still_be_writing(tmp_path: Path) -> None:
    asked: list[Lease] = []

    def is_live(lease: Lease) -> bool:
        asked.append(lease)
        return True

    assert draft_judge(tmp_path, is_live=is_live)("anyone")
    old, new = take(tmp_path, pid=10), take(tmp_path, pid=11)
    live = draft_judge(tmp_path, is_live=is_live)
    assert not live(old.job) and not asked, "a lease is watched only where it matters"
    assert live(new.job) and live(new.job) and asked == [new]
    assert not draft_judge(tmp_path, is_live=lambda lease: False)(new.job)


@pytest.mark.parametrize("round_", range(5))
def test_of_many_threads_that_want_a_run_one_gets_it(tmp_path: Path, round_: int) -> None:
    together = Barrier(8)

    def contend(pid: int) -> bool:
        together.wait()
        try:
            take(tmp_path, pid=pid, alive=True)
        except RunHeld:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(contend, range(8))) == 1
    assert [path.name for path in (tmp_path / ".lease").iterdir()] == ["000001.json"]


CONTENDER = """
import sys, time
from pathlib import Path
from unbroken.errors import RunHeld
from unbroken.records.lease import acquire
from unbroken.records.process import process_of, this_holder
print("ready", flush=True)
sys.stdin.readline()
try:
    acquire(Path(sys.argv[1]), this_holder(), token=sys.argv[2], now_s=time.time(), process_of=process_of)
except RunHeld:
    print("held", flush=True)
else:
    print("won", flush=True)
    sys.stdin.readline()
"""


def test_of_two_processes_one_wins_and_when_it_is_killed_the_next_one_does(tmp_path: Path) -> None:
    def contender(name: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", CONTENDER, str(tmp_path), name]
        started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert started.stdout is not None and started.stdout.readline() == "ready\n"
        return started

    def answer(of: "subprocess.Popen[str]") -> str:
        assert of.stdout is not None
        return of.stdout.readline().strip()

    def go(*contenders: "subprocess.Popen[str]") -> None:
        for each in contenders:
            assert each.stdin is not None
            each.stdin.write("go\n")
            each.stdin.flush()

    pair = [contender("a"), contender("b")]
    third, fourth = contender("c"), contender("d")
    try:
        go(*pair)
        assert sorted(map(answer, pair)) == ["held", "won"]
        go(third)
        assert answer(third) == "held"
        for each in pair:
            each.kill()
            each.wait()
        go(fourth)
        assert answer(fourth) == "won"
        found = read_current(tmp_path)
        assert found is not None and (found.number, found.token) == (2, "d")
    finally:
        for each in (*pair, third, fourth):
            each.kill()
            each.communicate()


def test_this_process_is_alive_and_one_that_ended_is_not() -> None:
    me = this_holder()
    assert me.pid == os.getpid() and process_of(me) == me.process_started != ""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert process_started(ended.pid) == ""


def test_a_zombie_has_ended() -> None:
    zombie = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert zombie.stdout is not None
    zombie.stdout.read()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert process_started(zombie.pid) == ""
    zombie.stdout.close()
    zombie.wait()


@pytest.mark.promise("U6")
def test_only_the_same_boot_machine_and_pid_namespace_can_be_seen() -> None:
    me = this_holder()
    name, namespace = host_name().partition("/")[0], (me.scope or "").partition("-")[0]
    assert process_of(replace(me, process_started="gone")) == me.process_started
    # Another boot, another machine, a clone of this machine, another PID namespace, an older version, a damaged record.
    for host in (f"{name}/00000000", name, "elsewhere/00000000", "elsewhere"):
        assert process_of(replace(me, host=host)) is None
    for scope in (f"{namespace}-00000000", f"1-{(me.scope or '').partition('-')[2]}", None):
        assert process_of(replace(me, scope=scope)) is None
    assert process_of(replace(me, pid=0)) is None and process_of(replace(me, pid=10**12)) == ""
