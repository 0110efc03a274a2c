"""The mutations of a stranger's habits: one section per row U1 to U17."""

from tests.mutation.table import Mutation, one

_STATE = "tests/unit/state/"
_WRAPPED = "tests/exact/test_wrapped.py::"
_DRAW_ON = "test_stateful_loader.py::test_workers_draw_on_after_a_resume_as_if_nothing_had_happened"
_EXTREME = "tests/format/test_extreme_numbers.py::"
_QUOTING = "tests/unit/quoting/test_quoting.py::"
_SCRIPT = "tests/unit/launch/slurm/test_script.py::"
_SWEEP = "tests/unit/store/test_sweep.py::"
_LEFT = "tests/unit/loop/test_left_early.py::"
_CARRY = "tests/unit/loop/test_carry.py::"
_MICRO = "tests/unit/loop/test_micro_batches.py::"
_PROVEN = "tests/unit/data/test_proven.py::"
_LEASE = "tests/unit/run/test_lease.py::"
_WATCHED = "tests/unit/run/test_takeover.py::"
_HELD = "tests/e2e/test_lease.py::"
_PATHS = "tests/unit/loop/test_paths.py::"
_SYSTEMS = "tests/crash/test_file_systems.py::"

_SIGNALS = "tests/distributed/test_stop_signals.py::"
_FIRST_FAILURE = "tests/distributed/test_first_failure.py::"
_MANY_RUNS = "tests/distributed/test_many_runs.py::"
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
    one("loader workers killed by the signal that stops the run", "loop/workers.py",
        "            signal.signal(each, ignore)\n", "            pass\n",
        f"{_SIGNALS}test_a_stop_signal_ends_in_one_shutdown_checkpoint[both groups, persistent]"),
    one("workers that were lost in a stop not replaced", "state/cursor.py",
        "            self._replace_workers()\n", "            raise\n",
        f"{_SIGNALS}test_workers_that_are_lost_in_a_stop_are_replaced_and_the_run_stays_exact[1]"),
    # ---- U5 ----
    one("the echo recorded instead of the first failure", "loop/peers.py",
        "            if first is not None:\n", "            if False:\n",
        f"{_FIRST_FAILURE}test_an_exception_inside_backward_is_recorded_with_its_rank[1-ddp]"),
    one("a lost peer not recognised in the script's own collectives", "loop/peers.py",
        "        if is_torchs and any(words in said.lower() for words in _LOST):\n", "        if False:\n",
        f"{_FIRST_FAILURE}test_only_what_torch_says_of_a_lost_peer_is_one"),
    # ---- U6 ----
    one("process numbers of another PID namespace taken for ours", "run/process.py",
         "(holder.host, holder.scope) != (host_name(), pid_scope())", "holder.host != host_name()",
         f"{_LEASE}test_only_the_same_boot_machine_and_pid_namespace_can_be_seen"),
    one("a PID namespace left out of who a job is", "run/process.py",
         'return f"{namespace}-{hashlib', 'return f"0-{hashlib',
         f"{_HELD}test_a_job_in_another_pid_namespace_keeps_its_run_until_it_is_gone[0.0]"),
    one("a lease judged by the clocks of two machines", "run/lease.py",
         "        started = process_of(self.holder) if process_of else None\n",
         "        started = process_of(self.holder) if process_of else None\n"
         "        if started is None and __import__('time').time() - self.renewed_at_s > self.ttl_s:\n"
         "            return Standing.GONE\n",
         f"{_WATCHED}test_a_holder_that_renews_keeps_its_run_whatever_its_clock_says[0.0]"),
    one("a renewal that only a clock shows", "run/lease.py",
         "renewed_at_s=now_s, renewals=lease.renewals + 1)\n    _write", "renewed_at_s=now_s)\n    _write",
         f"{_WATCHED}test_a_holder_that_renews_keeps_its_run_whatever_its_clock_says[0.0]"),
    one("a run released without watching", "cli/release.py",
         "    if standing is Standing.ALIVE:\n", "    if False:\n",
         f"{_HELD}test_release_watches_first_and_frees_what_nobody_renews"),
    one("a repeated link taken for another's", "files.py",
         "            return self._is_same(path, self.disk.status(beside))\n", "            return False\n",
         f"{_SYSTEMS}test_a_link_that_a_network_file_system_made_twice_is_known_as_our_own"),
    # ---- U7 ----
    one("a run that moves with the working directory", "run/layout.py",
         "    return Path(text).absolute()\n", "    return Path(text)\n",
         f"{_PATHS}test_a_relative_run_stays_where_it_was_named"),
    one("an empty path taken for the working directory", "run/layout.py",
         '    if not text:\n        raise BadRunPath(path=text, problem="empty")\n', "",
         f"{_PATHS}test_a_bad_path_is_one_clear_error_and_nothing_is_written"),
    one("a run that is gone made anew by its records", "run/lines.py",
         "if self._within is not None and self._files.find(self._within) is None:", "if False:",
         f"{_PATHS}test_a_run_that_is_moved_or_deleted_is_said_as_that_at_once[delete]"),
    one("a run that is gone trained on", "run/renewal.py",
         "if waited_s < every_s and is_present(self._run_directory, self._lease, self._files):",
         "if waited_s < every_s:",
         f"{_PATHS}test_a_run_that_is_moved_or_deleted_is_said_as_that_at_once[move]"),
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
    one("worker RNG state not restored", "state/loaders.py",
         "_set_worker_rng(waiting.pop(), (dataset, fetcher.collate_fn))\n", "waiting.pop()\n",
         f"{_STATE}{_DRAW_ON}[from its own state]"),
    one("persistent workers kept over epochs", "state/cursor.py",
         "            renew(self.loader)\n            self._began", "            self._began",
         f"{_STATE}{_DRAW_ON}[replayed]"),
    # ---- U11 ----
    one("a stream does not verify what it reads unless asked", "data/stream.py",
         "        check_reads: bool = True,\n", "        check_reads: bool = False,\n",
         f"{_PROVEN}test_a_loop_does_not_get_damaged_data"),
    one("the trainer does not verify what it reads unless asked", "config/data.py",
         '        "read",\n        "Verify', '        "quick",\n        "Verify',
         f"{_PROVEN}test_the_trainer_ends_at_damaged_data"),
    one("checksums taken of shards that are not what they are listed as", "data/proven.py",
         "        self._require_listed([number for number in numbers if number not in self._proven])\n", "",
         f"{_PROVEN}test_damage_from_before_the_first_read_is_found"),
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
    one("hooks on the optimizer left behind", "state/stage.py",
        "            handle.remove()\n", "            pass\n",
        f"{_MANY_RUNS}test_fifty_runs_in_one_process_leave_nothing_behind[1]"),
    one("a Run entered again on a state that has moved", "loop/run.py",
        "        if opened.restored is None and trained > 0:\n", "        if False:\n",
        f"{_MANY_RUNS}test_entering_again_without_a_checkpoint_is_refused_once_the_state_has_moved"),
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
    one("nothing swept where there are no symlinks", "files.py",
         '                self._degrade("symlinks", link.parent,', "                raise\n"
         '                self._degrade("symlinks", link.parent,',
         f"{_SYSTEMS}test_saves_are_swept_and_what_is_lacking_is_said_once[vfat]"),
    one("no run where directories cannot be synced", "files.py",
         "            if refusal.errno not in _NO_DIRECTORY_SYNC:\n", "            if True:\n",
         f"{_SYSTEMS}test_saves_are_swept_and_what_is_lacking_is_said_once[no directory fsync]"),
    one("a lease that two can take where there are no hard links", "files.py",
         "return self._claim_empty(beside, path) if is_contested else self._move_to_free(beside, path)",
         "return not self._rename(beside, path)",
         f"{_SYSTEMS}test_of_two_contenders_one_gets_the_run_on_every_file_system[vfat]"),
    one("a repeated rename taken for a failure", "files.py",
         "            if not self._is_same(target, moved):\n", "            if True:\n",
         f"{_SYSTEMS}test_saves_are_swept_and_what_is_lacking_is_said_once[nfs that asks twice]"),
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
