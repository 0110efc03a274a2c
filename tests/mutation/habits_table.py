"""The mutations of a stranger's habits: one section per row U1 to U17."""

from tests.mutation.table import Mutation, one

_STATE = "tests/unit/state/"

HABITS: tuple[Mutation, ...] = (
    # ---- U1 ----
    # ---- U2 ----
    # ---- U3 ----
    # ---- U4 ----
    # ---- U5 ----
    # ---- U6 ----
    # ---- U7 ----
    # ---- U8 ----
    # ---- U9 ----
    # ---- U10 ----
    # ---- U11 ----
    # ---- U12 ----
    # ---- U13 ----
    # ---- U14 ----
    # ---- U15 ----
    one("staged bytes not compared with the fingerprint", "state/save.py",
        "        require_as_fingerprinted(work.plan, work.described, [each.sums for each in told], request.step)\n", "",
        f"{_STATE}test_written_during_save.py::test_a_save_of_weights_that_another_thread_writes_is_given_up"),
    one("contradicting checkpoint blamed on the load", "state/restore.py",
        "        world.from_first(lambda: _require_as_stored(source, plan.index, named))\n", "",
        f"{_STATE}test_written_during_save.py::"
        "test_a_checkpoint_that_contradicts_its_fingerprint_is_quarantined_at_resume"),
    # ---- U16 ----
    # ---- U17 ----
)
