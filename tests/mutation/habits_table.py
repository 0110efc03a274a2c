"""The mutations of a stranger's habits: one section per row U1 to U17."""

from tests.mutation.table import Mutation, one

_EXTREME = "tests/format/test_extreme_numbers.py::"
_QUOTING = "tests/unit/quoting/test_quoting.py::"
_SCRIPT = "tests/unit/launch/slurm/test_script.py::"
_SWEEP = "tests/unit/store/test_sweep.py::"
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
    one("a line break in a run directory that becomes a shell command", "launch/slurm/script.py",
         "    _require_one_line(work, request)\n    header", "    header",
         f"{_SCRIPT}test_a_run_directory_that_would_break_a_comment_line_is_refused_by_name"),
    one("a control character printed into a script", "quoting/shell.py",
         "    if text.isprintable():\n        # Imported", "    if text:\n        # Imported",
         f"{_QUOTING}test_a_quoted_word_is_one_printable_line"),
    one("a variable of the pod's in a run directory", "launch/kubernetes/pods.py",
         "{_literal(program.run)}", "{program.run}",
         "tests/unit/launch/test_kubernetes.py::test_what_a_user_gives_reaches_the_pod_exactly"),
    one("a text from outside that steers the terminal", "cli/output.py",
         "shown = for_terminal(text)", "shown = text",
         "tests/format/test_hostile_texts.py::test_no_command_lets_a_hostile_text_steer_the_terminal"),
    one("an error whose path forges a line", "errors/tree.py",
         'f"  {label:<4} {printable(text)}"', 'f"  {label:<4} {text}"',
         f"{_QUOTING}test_an_error_takes_one_line_a_field_whatever_a_path_is_called"),
    one("a log message that steers the terminal", "quoting/log.py",
         "    found.addFilter(_SAFE_MESSAGES)\n", "",
         f"{_QUOTING}test_a_log_message_cannot_steer_whoever_s_handler_shows_it"),
    one("a user's dot names swept", "store/names.py",
         'if found and _marked(found["stem"]) == name else None', "if found else None",
         f"{_SWEEP}test_a_users_dot_names_survive_every_sweep"),
    one("drafts of any name taken for ours", "store/names.py",
         'if found is None or (stem is None and not is_leased(found["job"])):', "if found is None:",
         f"{_SWEEP}test_a_users_dot_names_survive_every_sweep"),
    one("scratch files of dead jobs left", "run/leftovers.py",
         "            files.remove_file(path)\n", "            pass\n",
         "tests/unit/run/test_leftovers.py"),
    one("scratch files of a living job swept", "run/leftovers.py",
         ">= holder,", "> holder,", "tests/unit/run/test_leftovers.py"),
    one("numbers of records not bounded", "store/fields.py",
         "return float(value) if -MOST_NUMBER <= value <= MOST_NUMBER else None", "return float(value)",
         f"{_EXTREME}test_a_record_with_an_extreme_number_is_told_by_every_command[lease]"),
    one("instants beyond the calendar believed", "store/fields.py",
         "found is not None and 0 <= found <= LATEST_S", "found is not None",
         "tests/unit/store/test_fields.py::test_whole_numbers_and_instants_are_bounded"),
    one("a world that no cluster has counted through", "store/emergency.py",
         'body.whole(name, below=MOST_RANKS) for name in ("rank", "world")',
         'body.whole(name) for name in ("rank", "world")',
         f"{_EXTREME}test_a_world_of_pointers_that_no_cluster_has_is_not_counted_through"),
)  # fmt: skip
