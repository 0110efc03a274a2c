"""The mutations of a stranger's habits: one section per row U1 to U17."""

from tests.mutation.table import Mutation, one

_LEFT = "tests/unit/loop/test_left_early.py::"
_CARRY = "tests/unit/loop/test_carry.py::"
_MICRO = "tests/unit/loop/test_micro_batches.py::"
_HYPER = "tests/unit/loop/test_hyperparameters.py::"
_RESUME = "tests/unit/loop/test_resume.py::"
_STARTED = "tests/unit/launch/test_started.py::"

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
    one("changed hyperparameters not compared", "loop/resume.py",
         "    found.changes = script.changes(before or {})\n", "    found.changes = []\n",
         f"{_HYPER}test_each_changed_value_is_told_in_one_line_and_the_checkpoints_is_used"),
    one("live values compared in place of constructed ones", "state/hyperparameters.py",
         "_first_seen.get(thing, self._live[name])", "self._live[name]",
         f"{_HYPER}test_a_schedule_that_moves_the_rate_is_no_change[one cycle]"),
    one("schedule not stepped to where the script's values put it", "state/hyperparameters.py",
         "                        schedule.step()\n", "                        break\n",
         f"{_HYPER}test_the_scripts_values_are_put_in_place_as_if_the_schedule_had_them_from_the_start[5]"),
    one("accepted values forgotten by the next job", "launch/started.py",
         "    history = read_accepted(layout, files)\n", "    history = ()\n",
         f"{_STARTED}test_an_accepted_value_is_the_runs_until_another_one_is_accepted"),
    one("accepted values of the run before kept by a new start", "gpt/records.py",
         "    if files.find(layout.accepted) is not None:\n", "    if False:\n",
         f"{_STARTED}test_a_start_from_scratch_forgets_what_was_accepted_and_is_one_request_per_config"),
    one("steps of other settings compared", "run/metrics.py",
         "if before is None or before.settings != self.settings:", "if before is None:",
         f"{_HYPER}test_steps_are_compared_only_with_steps_of_the_same_hyperparameters"),
    one("accepted names forgotten before they are saved", "loop/opening.py",
         "accept=(*settings.accept, *before)", "accept=settings.accept",
         f"{_RESUME}test_what_was_accepted_about_a_checkpoint_stays_accepted_until_the_next_one"),
    # ---- U9 ----
    one("a request carried out at every job", "loop/resume.py",
         "followed = last if last is not None and last.asked == settings.resume else None", "followed = None",
         f"{_RESUME}test_a_rewind_happens_once_and_the_same_request_continues_its_branch"),
    one("a request without newer checkpoints not remembered", "store/rewind.py",
         "    if newer or asked is not None:\n", "    if newer:\n",
         f"{_RESUME}test_a_request_is_remembered_where_nothing_newer_stood"),
    one("newer checkpoints abandoned before the target is loaded", "loop/resume.py",
         "        return _Start(named=name, is_required=True)\n",
         "        rewind(store, names, target=name, job=job, at_ns=time.time_ns())\n"
         "        return _Start(named=name, is_required=True)\n",
         f"{_RESUME}test_a_target_that_cannot_be_loaded_abandons_nothing"),
    # ---- U10 ----
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
    # ---- U14 ----
    # ---- U15 ----
    # ---- U16 ----
    # ---- U17 ----
)  # fmt: skip
