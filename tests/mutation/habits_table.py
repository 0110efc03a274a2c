"""The mutations of a stranger's habits: one section per row U1 to U17."""

from tests.mutation.table import Mutation, one

_STATE = "tests/unit/state/"
_DRAW_ON = "test_stateful_loader.py::test_workers_draw_on_after_a_resume_as_if_nothing_had_happened"

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
    one(
        "worker RNG state not restored",
        "state/loaders.py",
        "                _set_worker_rng(waiting.pop(), (dataset, fetcher.collate_fn))\n",
        "                waiting.pop()\n",
        f"{_STATE}{_DRAW_ON}[from its own state]",
    ),
    one(
        "persistent workers kept over epochs",
        "state/cursor.py",
        "            renew(self.loader)\n            self._began",
        "            self._began",
        f"{_STATE}{_DRAW_ON}[replayed]",
    ),
    # ---- U11 ----
    # ---- U12 ----
    # ---- U13 ----
    one(
        "wrapped optimizer not unwrapped",
        "state/wrappers.py",
        "            thing = getattr(thing, attribute)\n",
        "            return thing\n",
        "tests/exact/test_wrapped.py::test_wrapped_objects_and_own_generators_resume_bit_for_bit_under_a_strict_audit",
    ),
    one(
        "broken state_dict found at the first save only",
        "state/capture.py",
        "_asked(item), allow_pickle",
        "item.take(), allow_pickle",
        "tests/exact/test_wrapped.py::test_what_would_fail_at_the_first_save_is_refused_at_entry_in_one_line",
    ),
    one(
        "audit_ignore not looked at",
        "state/audit.py",
        "    wanted = [each for each in found if each.called not in ignore]\n",
        "    wanted = found\n",
        "tests/exact/test_wrapped.py::test_one_name_of_the_audit_can_be_silenced",
    ),
    # ---- U14 ----
    # ---- U15 ----
    one(
        "staged bytes not compared with the fingerprint",
        "state/save.py",
        "        require_as_fingerprinted(work.plan, work.described, [each.sums for each in told], request.step)\n",
        "",
        f"{_STATE}test_written_during_save.py::test_a_save_of_weights_that_another_thread_writes_is_given_up",
    ),
    one(
        "contradicting checkpoint blamed on the load",
        "state/restore.py",
        "        world.from_first(lambda: _require_as_stored(source, plan.index, named))\n",
        "",
        f"{_STATE}test_written_during_save.py::"
        "test_a_checkpoint_that_contradicts_its_fingerprint_is_quarantined_at_resume",
    ),
    # ---- U16 ----
    # ---- U17 ----
)
