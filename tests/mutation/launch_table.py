"""The mutations of launching: what is started, how an end is judged, and when a job is started again."""

from tests.mutation.table import Mutation, one

_KUBERNETES = "tests/unit/launch/test_kubernetes.py::"
_NOTICES = "tests/unit/launch/test_spot_notices.py::"
_WATCH = "tests/unit/launch/test_spot_watch.py::"
_POLICY = f"{_KUBERNETES}test_a_clean_stop_resumes_a_crash_is_counted_and_what_a_user_decides_ends_it[job]"

_DECISIONS = "tests/unit/launch/test_decisions.py::"
_COMMAND = "tests/unit/launch/test_command.py::"
_CONNECTION = "tests/distributed/test_connection.py::"
_TAKEOVER = "tests/unit/records/test_takeover.py::"

HERE = (
    # ---- job after job ----
    one("a run that somebody stopped started again", "launch/restarts.py",
         'FOLLOWED: Final = frozenset({"walltime", "asked"})',
         'FOLLOWED: Final = frozenset({"walltime", "asked", "flag"})',
         f"{_DECISIONS}test_until_done_the_class_decides_and_a_requested_stop_ends_it"),
    one("a run that a person must look at started again", "launch/restarts.py",
         '    if outcome.outcome_class != "again":\n        return False\n', "",
         f"{_DECISIONS}test_until_done_the_class_decides_and_a_requested_stop_ends_it"),
    one("an error of the user's own code restarted", "launch/restarts.py",
         ' and outcome.outcome_class == "again"\n', "\n",
         f"{_DECISIONS}test_only_what_another_start_may_mend_is_started_again"),
    one("a job that dies before it names its run started for ever", "launch/restarts.py",
         " and (last.is_run_known or most is None)", " and last.is_run_known",
         f"{_DECISIONS}test_until_done_there_is_no_limit_while_the_run_gets_further"
         "_and_no_endless_loop_while_it_does_not"),
    one("the step before the deadly one blamed", "launch/restarts.py",
         "{reached[0] + 1:,}", "{reached[0]:,}", f"{_DECISIONS}test_a_step_that_every_job_died_in_is_named"),
    one("a step that was cut taken for a whole one", "launch/job_files.py",
         '.split(b"\\n")[:-1]', '.split(b"\\n")',
         "tests/unit/launch/test_steps_file.py::test_the_last_whole_line_counts"),
    one("a signal answered by torchrun's handler while it ends", "launch/agent.py",
         "        signal.signal(each, signal.SIG_IGN)\n", "        pass\n",
         "tests/unit/launch/test_agent.py::test_a_signal_that_comes_while_the_agent_ends_leaves_no_traceback"),
    one("a mistake before the run is open taken for a crash", "launch/uncaught.py",
         "    sys.excepthook = report_and_show\n", "",
         "tests/e2e/test_supervise_restarts.py::test_a_mistake_before_the_run_is_open_is_not_tried_again"
         "[raise NameError('modle')-1-1]"),
    one("a failure of the machine before the run is open not tried again", "launch/uncaught.py",
         "(OSError, RuntimeError, MemoryError, EOFError)", "()",
         "tests/e2e/test_supervise_restarts.py::test_a_mistake_before_the_run_is_open_is_not_tried_again"
         "[raise OSError(116, 'Stale file handle')-1-3]"),
    # ---- torchrun ----
    one("a rank that torchrun ended itself blamed", "launch/agent.py",
         "    if failure.code == -signal.SIGTERM:\n        return 2\n", "",
         "tests/unit/launch/test_agent.py::test_what_torchrun_did_itself_is_never_the_cause"),
    one("ranks of a new world meet in the store of the old one", "launch/command.py",
         '            environment[OWN_STORE] = "1"\n', "            pass\n",
         f"{_COMMAND}test_agents_that_meet_restart_by_themselves_and_look_for_no_key_of_an_earlier_world"),
    one("a run taken from a holder elsewhere that lives", "records/takeover.py",
         "return Standing.ALIVE if self.is_renewed else Standing.UNKNOWN", "return Standing.UNKNOWN",
         f"{_TAKEOVER}test_a_holder_that_renews_keeps_its_run_whatever_its_clock_says"),
    one("another system taken for Linux", "cli/main.py",
         "if sys.platform == SUPPORTED else _refuse_platform(args)", "",
         "tests/unit/cli/test_platform.py::test_off_linux_a_command_says_so_and_what_helps[darwin-docker run]"),
    # ---- connecting ----
    one("a connection used that goes to somebody else", "connection.py",
         "            _require_tokens(group, token, rank, size)\n            return group\n",
         "            return group\n",
         f"{_CONNECTION}test_ranks_that_reached_a_stranger_connect_again[group of a run]"),
    one("the token of another job accepted", "connection.py",
         "if answer != token + other]", "if False]",
         f"{_CONNECTION}test_ranks_that_never_connect_end_with_one_error[token]"),
    one("ranks that wait for one that has given up", "connection.py",
         "        if attempt.check([_FAILED]):\n", "        if False:\n",
         f"{_CONNECTION}test_one_rank_that_could_not_connect_lets_all_try_again_at_once"),
    one("a rank that died while it connected not named", "connection.py",
         "        raise PeerLost(rank=rank, symptom=said) from late\n", "        raise late\n",
         f"{_CONNECTION}test_a_rank_that_dies_while_it_connects_is_a_lost_peer"),
    one("the timeout of connecting kept for later exchanges", "connection.py",
         "        torch_private.set_timeout(group, timeout_s)\n", "        pass\n",
         f"{_CONNECTION}test_the_short_timeout_of_connecting_does_not_end_a_later_exchange[this torch]"),
    one("a short timeout given to a torch that keeps it", "connection.py",
         "seconds=seconds if torch_private.can_set_timeout() else timeout_s)", "seconds=seconds)",
         f"{_CONNECTION}test_the_short_timeout_of_connecting_does_not_end_a_later_exchange[torch before 2.13]"),
)  # fmt: skip

CLUSTERS = (
    # ---- Kubernetes ----
    one("a halted run started again by its cluster", "launch/kubernetes/documents.py",
         "NEEDS_ATTENTION: Final = (2, 3, 4, 5, 6, 8)", "NEEDS_ATTENTION: Final = (2, 3, 5, 8)", _POLICY),
    one("a halt forgiven because its machine was drained", "launch/kubernetes/documents.py",
         '"values": sorted(codes)}\n', '"values": sorted(codes)}\n\n\n_rules = lambda rules=_rules: rules()[::-1]\n',
         _POLICY),
    one("a clean stop counted as a crash", "launch/kubernetes/documents.py",
         '{"action": "Ignore", "onExitCodes"', '{"action": "Count", "onExitCodes"', _POLICY),
    one("a run that would be lost with its pod", "launch/kubernetes/options.py",
         "posixpath.normpath(posixpath.join(mount, run))", "posixpath.join(mount, run)",
         f"{_KUBERNETES}test_a_run_that_would_be_lost_with_its_pod_is_refused"),
    # ---- spot notices ----
    one("a notice that stops nothing", "records/stop.py",
         "(notice := self._notices.look()) is not None", "(notice := self._notices.look()) is None",
         f"{_WATCH}test_a_job_stops_by_a_notice_and_knows_when_the_machine_goes"),
    one("the metadata service asked without its token", "launch/spot/services.py",
         'headers={"X-aws-ec2-metadata-token": self._token}', "headers={}",
         f"{_WATCH}test_a_service_that_has_no_notice_gives_none_and_one_that_has_gives_it[aws]"),
    one("a token that has expired kept", "launch/spot/services.py",
         "            self._token = None\n            response", "            response",
         f"{_WATCH}test_a_token_that_has_expired_is_replaced_and_the_notice_is_heard"),
    one("a neighbour's notice taken for this machine's", "launch/spot/notices.py",
         " and machine in _resources(event)", "",
         f"{_NOTICES}test_azure_events_of_other_machines_and_pauses_are_no_notice"),
    one("only the first rank of the world listens", "launch/spot/watch.py",
         '_LOCAL_RANKS: Final = ("LOCAL_RANK", ', '_LOCAL_RANKS: Final = ("RANK", "LOCAL_RANK", ',
         f"{_NOTICES}test_the_first_process_of_each_node_listens_and_its_neighbours_do_not"),
    one("whatever address is named asked for notices", "launch/spot/services.py",
         "    if not found.is_loopback and str(found) != STANDARD:\n", "    if False:\n",
         f"{_NOTICES}test_no_other_address_is_ever_contacted"),
)  # fmt: skip

_SLURM_JOB = "tests/e2e/test_slurm_job.py::"
_SLURM_DECIDE = "tests/unit/launch/slurm/test_decide.py::"

SLURM = (
    one("a job submitted that would be warned as it begins", "launch/slurm/submit.py",
         "    if lead_given is not None:\n", "    if False:\n",
         "tests/e2e/test_slurm_job.py::test_a_job_that_would_be_warned_as_it_begins_is_never_submitted"),
    one("a halted run queued again", "launch/slurm/decide.py",
         '    if outcome.verdict != "again":\n', '    if outcome.verdict not in ("again", "look"):\n',
         f"{_SLURM_DECIDE}test_only_again_is_queued_again"),
    one("a job queued again for an outcome that is not its own", "launch/slurm/decide.py",
         "outcome.job is None or outcome.job <= job_before", "outcome.job is None",
         f"{_SLURM_DECIDE}test_an_outcome_of_an_earlier_job_says_nothing_of_this_one"),
    one("the warning kept to itself", "launch/slurm/job.py",
         "                self._warn(child, number)\n", "",
         f"{_SLURM_JOB}test_the_warning_reaches_the_run_through_its_directory_and_the_job_is_queued_again"),
    one("all tasks of an array queued again", "records/process.py",
         'name = f"{array}_{task}" if array and task else job', "name = job",
         f"{_SLURM_JOB}test_of_an_array_only_the_task_itself_is_queued_again"),
    one("a job whose last save outlasts its limit left alone", "launch/slurm/job.py",
         " and reason != _OUT_OF_TIME", "",
         f"{_SLURM_JOB}test_a_job_whose_last_save_outlasts_its_time_limit_is_queued_again"),
    one("jobs that only dump taken for jobs in vain", "launch/slurm/decide.py",
         '("commit", "emergency-resume")', '("commit",)',
         f"{_SLURM_DECIDE}test_jobs_that_only_dump_bring_the_run_further_and_are_queued_again"),
    one("what saves have taught forgotten", "launch/slurm/submit.py",
         "learned_reserve(events)", "learned_reserve(())",
         "tests/unit/launch/slurm/test_script.py::test_the_lead_is_learned_from_the_slowest_save_of_any_run"),
    one("a limit that was moved not noticed", "launch/slurm/end_time.py",
         "        if answer != self._known_s:\n", "        if self._known_s is None:\n",
         "tests/unit/launch/slurm/test_end_time.py::test_a_limit_that_is_moved_is_reported_and_one_that_stays_is_not"),
)  # fmt: skip

_DUMPS = "tests/unit/store/test_emergency.py::"
_EMERGENCY = "tests/unit/loop/test_emergency.py::"
_DUMP_CRASHES = "tests/crash/test_emergency.py::"

EMERGENCY = (
    one("an emergency save of some ranks accepted", "store/dumps.py",
         "        lacking = sorted(set(range(dump_set.world_size)) - ranks.keys())\n",
         "        lacking: list[int] = []\n",
         f"{_DUMPS}test_a_step_of_which_one_rank_has_none_is_skipped_with_the_reason"),
    one("dumps of two jobs put together", "store/dumps.py",
         "        return DumpSet(self.step, self.job, self.world_size)\n\n    def store",
         '        return DumpSet(self.step, "", self.world_size)\n\n    def store',
         f"{_DUMPS}test_dumps_of_two_jobs_or_of_two_worlds_are_never_put_together"),
    one("a dump of another host accepted", "store/dumps.py",
         "            elif is_shared or same_host(found.host, host):\n", "            elif True:\n",
         f"{_DUMPS}test_a_dump_of_another_host_is_refused_with_its_host_and_its_path"),
    one("a copy called one before it is proven", "store/dump_copies.py",
         "        _require_same(draft, manifest)\n", "",
         f"{_DUMP_CRASHES}test_a_copy_with_other_bytes_is_never_reported_as_a_copy"),
    one("a restart reads the config file anew", "gpt/__main__.py",
         "taken_over(os.environ) if options.launched else load(", "load(",
         "tests/unit/gpt/test_rank.py::test_a_rank_trains_with_the_config_that_its_launcher_has_read"),
    one("a refused copy called one", "loop/emergency.py",
         'what="copy", error=refused.kind, reason=refused.message)\n            return None\n',
         'what="copy", error=refused.kind, reason=refused.message)\n            return str(shared)\n',
         f"{_EMERGENCY}test_a_copy_that_was_refused_is_never_called_one_and_the_dump_counts_all_the_same[a file]"),
    one("a pointer that a power cut takes back", "store/dumps.py",
         "scratch=scratch(pointer.job, path.stem))\n", "scratch=scratch(pointer.job, path.stem), durable=False)\n",
         f"{_DUMP_CRASHES}test_after_every_crash_there_is_the_old_dump_or_the_new_one_and_each_is_whole"),
    one("a dump from before the run went back accepted", "loop/emergency.py",
         'is_new = settings.resume != "auto"', "is_new = False",
         f"{_EMERGENCY}test_a_run_that_goes_back_leaves_its_dumps_behind"),
    one("a dump of a job that was left behind accepted", "loop/emergency.py",
         "    return lambda dump_set: dump_set.step > step and (number_of(dump_set.job) or 0) >= number\n",
         "    return lambda dump_set: dump_set.step > step\n",
         f"{_EMERGENCY}test_the_dump_of_a_job_that_a_later_one_has_left_behind_is_not_used"),
    one("a window too small for a save used for one", "records/deadline.py",
         "left_s >= (UNMEASURED_S if costs.save_s is None else _LONGER * costs.save_s + _OUTCOME_S):", "True:",
         "tests/unit/records/test_grace.py"),
    one("a rank that leaves because its deadline is known", "records/deadline.py",
         "unmeasured_s = (UNMEASURED_S if grace_s is None else grace_s) / 2\n",
         "unmeasured_s = left_s if grace_s is None else grace_s / 2\n",
         "tests/unit/records/test_grace.py::test_the_ranks_are_waited_for_until_a_dump_would_no_longer_fit"),
    one("a rank that leaves though nobody is to end", "loop/emergency.py",
         "return is_over and self._stops.look() is not None\n", "return is_over\n",
         "tests/distributed/test_emergency.py"
         "::test_a_deadline_that_is_far_away_lets_no_rank_leave_while_it_waits_for_another"),
    one("a halt that a small window makes a job to be queued again", "loop/edge.py",
         "        if self.halting is not None:\n            # Not", "        if False:\n            # Not",
         f"{_EMERGENCY}test_a_halt_in_a_window_too_small_for_a_save_is_dumped_and_stays_a_halt"),
)  # fmt: skip

LAUNCH: tuple[Mutation, ...] = (*HERE, *CLUSTERS, *SLURM, *EMERGENCY)
