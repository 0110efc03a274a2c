"""The mutations of a stranger's habits: one section per row U1 to U17."""

from tests.mutation.table import Mutation, one

_STATE = "tests/unit/state/"
_WRAPPED = "tests/exact/test_wrapped.py::"
_DRAW_ON = "test_stateful_loader.py::test_workers_draw_on_after_a_resume_as_if_nothing_had_happened"
_LEFT = "tests/unit/loop/test_left_early.py::"
_CARRY = "tests/unit/loop/test_carry.py::"
_MICRO = "tests/unit/loop/test_micro_batches.py::"

HABITS: tuple[Mutation, ...] = (
    # ---- U1 ----
    one("a loop that is left saves nothing", "loop/job.py",
         "            self._save_left()\n", "            pass\n",
         f"{_LEFT}test_the_last_completed_step_is_saved_and_the_run_is_done[end-break-6]"),
    one("a completed body counts as unfinished", "loop/body.py",
         "return Left(True if made in self._seen and not has_more else None)", "return Left(False)",
         f"{_LEFT}test_the_last_completed_step_is_saved_and_the_run_is_done[end-break-6]"),
    one("an exception is taken for a break", "loop/run.py",
         "if job.is_in_body and not _is_raising(sys._getframe(1)):", "if job.is_in_body:",
         f"{_LEFT}test_an_exception_is_no_break"),
    one("a given up step keeps its draws", "loop/body.py",
         "            self._cursor.stand_at(edge.mark)\n", "            pass\n",
         f"{_LEFT}test_a_step_that_was_given_up_is_computed_again_from_its_start"),
    one("a given up step keeps its random numbers", "loop/job.py",
         "rng = None if left.is_complete else self.body.rng_at_edge", "rng = None",
         f"{_LEFT}test_a_step_that_was_given_up_is_computed_again_from_its_start"),
    one("an unfinished step is resumed without a word", "loop/resume.py",
         "        _require_finished(target, settings)\n", "",
         f"{_LEFT}test_what_cannot_be_put_back_is_refused_until_accepted"),
    # ---- U2 ----
    one("carried values not brought back", "loop/carry.py",
         "        if name in self._waiting:\n", "        if False:\n",
         f"{_CARRY}test_a_prefetched_batch_is_used_after_a_resume"),
    one("a draw before the loop not noticed", "loop/habits.py",
         "            self._drawn_before += self._cursor.drawn - self._drawn\n", "            pass\n",
         f"{_CARRY}test_a_batch_fetched_before_the_loop_and_not_carried_is_said"),
    one("random numbers drawn before the loop change a resume", "loop/habits.py",
         "            restore_generators(self._rng)\n", "            pass\n",
         f"{_CARRY}test_random_numbers_drawn_before_the_loop_do_not_change_a_resumed_run"),
    # ---- U3 ----
    one("a save between backward and optimizer step", "loop/job.py",
         "pending = any(self.opened.world.all_gather(self.body.has_pending_gradients))", "pending = False",
         f"{_MICRO}test_interrupted_at_every_edge_it_ends_with_the_same_bits"),
    one("pending gradients left out of a save", "loop/job.py",
         "        self.body.gradients.is_wanted = pending\n", "        self.body.gradients.is_wanted = False\n",
         f"{_MICRO}test_a_save_that_waits_too_long_takes_the_gradients_along"),
    one("a skipped step counts as none", "loop/body.py",
         "                    self._steps[number] = max(self._steps[number], before + 1)\n",
         "                    pass\n",
         f"{_MICRO}test_a_step_that_a_loss_scaler_skips_counts"),
    # ---- U4 ----
    # ---- U5 ----
    # ---- U6 ----
    # ---- U7 ----
    # ---- U8 ----
    # ---- U9 ----
    # ---- U10 ----
    one("worker RNG state not restored", "state/loaders.py",
         "_set_worker_rng(waiting.pop(), (dataset, fetcher.collate_fn))\n", "waiting.pop()\n",
         f"{_STATE}{_DRAW_ON}[from its own state]"),
    one("persistent workers kept over epochs", "state/cursor.py",
         "            renew(self.loader)\n            self._began", "            self._began",
         f"{_STATE}{_DRAW_ON}[replayed]"),
    # ---- U11 ----
    # ---- U12 ----
    one("the console is silent", "loop/console.py",
         "    logger.addHandler(console)\n", "",
         "tests/e2e/test_console.py::test_start_saves_stop_resume_and_end_are_seen"),
    Mutation("the console speaks beside a script's own logging",
         (("loop/console.py", " or logger.hasHandlers():", ":"),
          ("loop/console.py", "        if logging.getLogger().handlers:\n", "        if False:\n")),
         ("tests/e2e/test_console.py::test_a_script_with_its_own_logging_sees_each_line_once",)),
    # ---- U13 ----
    one("wrapped optimizer not unwrapped", "state/wrappers.py",
         "            thing = getattr(thing, attribute)\n", "            return thing\n",
         f"{_WRAPPED}test_wrapped_objects_and_own_generators_resume_bit_for_bit_under_a_strict_audit[accelerate]"),
    one("generators put back before the loader is replayed", "state/items.py",
         "    items += [ObjectItem(name, OwnRng(thing)) for", "    items[:0] = [ObjectItem(name, OwnRng(thing)) for",
         f"{_STATE}test_items.py::test_a_generator_comes_after_the_loader_that_draws_from_it"),
    one("broken state_dict found at the first save only", "state/capture.py",
         "_asked(item), allow_pickle", "item.take(), allow_pickle",
         f"{_WRAPPED}test_what_would_fail_at_the_first_save_is_refused_at_entry_in_one_line"),
    one("audit_ignore not looked at", "state/audit.py",
         "    wanted = [each for each in found if each.called not in ignore]\n", "    wanted = found\n",
         f"{_WRAPPED}test_one_name_of_the_audit_can_be_silenced"),
    # ---- U14 ----
    # ---- U15 ----
    one("staged bytes not compared with the fingerprint", "state/save.py",
         "        require_as_fingerprinted(work.plan, work.described, [each.sums for each in told], request.step)\n",
         "",
         f"{_STATE}test_written_during_save.py::test_a_save_of_weights_that_another_thread_writes_is_given_up"),
    one("contradicting checkpoint blamed on the load", "state/restore.py",
         "        world.from_first(lambda: _require_as_stored(source, plan.index, named))\n", "",
         f"{_STATE}test_written_during_save.py::"
         "test_a_checkpoint_that_contradicts_its_fingerprint_is_quarantined_at_resume"),
    # ---- U16 ----
    # ---- U17 ----
)  # fmt: skip
