"""The tree of processes, as the kernel tells of it."""

import os

from unbroken.launch.processes import Process, below, child_ranks, living


def test_descendants_are_found_at_any_depth_and_no_others() -> None:
    tree = {pid: Process(pid, parent, 1) for pid, parent in [(2, 1), (3, 2), (4, 3), (5, 1), (6, 9)]}
    assert below(2, tree) == [3, 4]
    assert sorted(below(1, tree)) == [2, 3, 4, 5]
    assert below(4, tree) == []


def test_workers_are_the_children_that_lead_a_session() -> None:
    tree = {each.pid: each for each in (Process(10, 9, 10), Process(11, 9, 9), Process(12, 10, 12))}
    assert child_ranks(9, tree) == [10]


def test_this_process_is_among_the_living_below_its_parent() -> None:
    me = living()[os.getpid()]
    assert me.parent == os.getppid() and me.session == os.getsid(0)
    assert os.getpid() in below(os.getppid(), living())
