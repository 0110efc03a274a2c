"""The mutations of the proof: bugs of a resume, planted one at a time, which `prove` or the exactness checker sees."""

from tests.mutation.table import Mutation, one

_DEMO = "tests/unit/prove/test_demo.py::"
_DRILLED = "tests/unit/loop/test_drilled_run.py::"

_TRAINERS = "tests/exact/test_checked_trainers.py::"
_KILLED = f"{_TRAINERS}test_a_trainer_that_is_killed_between_two_saves_is_exact"
_RESIZED = f"{_TRAINERS}test_a_trainer_with_dropout_that_resumes_with_more_ranks_is_exact"
_CHECKER = "tests/unit/testing/test_exactness.py::"

PROOF: tuple[Mutation, ...] = (
    # ---- bugs of a resume, planted behind every proof of the house, that the exactness checker must see ----
    one("optimizer state not restored", "state/restore.py",
         "        _verify_live(source, plan, world)\n",
         "        _verify_live(source, plan, world)\n"
         "        for item in items:\n"
         "            if item.name == 'optimizer':\n"
         "                item.optimizer.state.clear()\n",
         _KILLED),
    one("optimizer state not restored, under `unbroken prove`", "state/restore.py",
         "        _verify_live(source, plan, world)\n",
         "        _verify_live(source, plan, world)\n"
         "        for item in items:\n"
         "            if item.name == 'optimizer':\n"
         "                item.optimizer.state.clear()\n",
         "tests/e2e/test_prove.py::"
         "test_a_script_survives_a_chain_of_faults_bit_for_bit_and_its_real_run_is_not_touched"),
    one("generators restored before the data iterator exists", "loop/opening.py",
         "        world.all_or_none(lambda: _restore_rng(restored, settings))\n",
         "        world.all_or_none(lambda: _restore_rng(restored, settings))\n"
         "        for item in leased.items:\n"
         "            if item.name == 'data':\n"
         "                item.stateful.load_state_dict(item.stateful.state_dict())\n",
         _KILLED),
    one("cursor off by one", "state/cursor.py",
         "        for done in range(self.served):\n", "        for done in range(self.served - 1):\n", _KILLED),
    one("scheduler reset", "state/restore.py",
         "        item.give(plan.fresh.settle(item, cast(\"State\", state)))\n",
         "        if item.name != 'scheduler':\n"
         "            item.give(plan.fresh.settle(item, cast(\"State\", state)))\n",
         _KILLED),
    one("dropout that depends on the rank", "exact/reducer.py",
         "            rng.enter(at)\n", "            rng.enter(plan.rank)\n", _RESIZED),
    one("folders of a copied checkpoint not synced", "prove/replay.py",
         "        target.files.sync_directory(directory)\n", "        pass\n",
         "tests/crash/test_copied_checkpoint.py::test_a_copy_is_there_whole_or_not_at_all"),
    # ---- the checker itself ----
    one("one bit of a loss overlooked", "testing/exactness.py",
         "if row_a is not None and row_b is not None and bits_a == bits_b:",
         "if row_a is not None and row_b is not None and bits_a.keys() == bits_b.keys():",
         f"{_CHECKER}test_one_bit_of_one_loss_is_named_with_its_step_and_both_jobs"),
    one("proof of nothing accepted", "testing/exactness.py",
         "return not self.is_empty and self.first is None", "return self.first is None",
         f"{_CHECKER}test_two_runs_with_nothing_to_compare_prove_nothing"),
    one("generators never compared", "testing/states.py",
         'if found is None or drawn is None or found["name"] in drawn:', "if found is None:",
         f"{_CHECKER}test_only_a_generator_that_was_used_counts"),
    # ---- drills, and the prover ----
    one("drill writes into the real run", "loop/opened_run.py",
         "        return self.drill.directory or directory, changed\n", "        return directory, changed\n",
         f"{_DRILLED}test_a_directory_that_is_requested_under_a_drill_is_not_even_made"),
    one("fault told as done that never struck", "records/drill.py",
         "if files.find(marks / mark_of(at)) is not None)", "if marks)",
         "tests/unit/prove/test_save_phases.py::"
         "test_faults_are_let_into_the_one_disk_of_the_house_and_only_those_of_this_rank"),
    one("times taken for a proof", "testing/exactness.py",
         "        if not bits_a and not bits_b:\n", "        if False:\n",
         f"{_CHECKER}test_two_runs_that_logged_times_alone_prove_nothing"),
    one("drill passed by where it cannot be read", "records/drill.py",
         '        raise DrillUnreadable(path=path, reason=f"it cannot be read ({refused.cause})") from refused\n',
         "        return None\n",
         f"{_DRILLED}test_a_job_whose_drill_cannot_be_read_does_not_start"),
    one("two uninterrupted runs not compared", "prove/baseline.py",
         "    if found.is_equal:\n", "    if found is not None:\n",
         "tests/unit/prove/test_baseline.py::test_two_uninterrupted_runs_that_differ_are_no_baseline"),
    one("chain proven without a look at its bits", "prove/chain.py",
         "self.comparison is not None and self.comparison.is_equal", "self.comparison is not None",
         "tests/unit/prove/test_report.py::test_a_chain_with_other_bits_fails_and_prints_how_to_reproduce_it"),
    one("job that begins anew taken for one that resumed", "prove/chain.py",
         "report.went_on_from < expected:", "report.went_on_from < 0:",
         "tests/e2e/test_prove.py::test_a_script_that_starts_over_fails_although_its_bits_are_the_same"),
    # ---- the demo ----
    one("demo content whatever the bits", "prove/demo_report.py",
         "return 0 if self.is_equal else EXIT_DIFFERS", "return 0",
         f"{_DEMO}test_one_bit_of_one_loss_is_exit_code_3_and_the_step_is_named"),
    one("demo takes a folder that is not its own", "prove/demo_setup.py",
         "    if others or (names and LEASES not in names):\n", "    if others:\n",
         f"{_DEMO}test_a_folder_of_anybody_else_is_refused_and_nothing_of_it_is_touched[runs]"),
    one("only the launcher killed", "prove/job_process.py",
         "processes.send([*recorded, *reversed(victims)], signal.SIGKILL)",
         "processes.send([self.pid], signal.SIGKILL)",
         "tests/e2e/test_prove_jobs.py::"
         "test_a_kill_reaches_what_stands_in_a_session_of_its_own_and_leaving_does_the_same"),
    one("a resume at the very end taken for a proof", "testing/interrupted.py",
         "any(0 < step < last for", "any(0 < step <= last for",
         "tests/unit/testing/test_interrupted.py::test_a_chain_that_resumed_only_at_its_end_proves_nothing"),
    one("a recomputed checkpoint called a shutdown", "loop/opened_run.py",
         " else drill.stops_as\n", " else SHUTDOWN\n",
         "tests/unit/loop/test_drilled_run.py::"
         "test_a_drill_that_ends_where_the_script_continues_calls_its_last_save_as_the_script_would"),
)  # fmt: skip
