"""The mutations: which text of the source is replaced by what, and which quick tests must notice.

Those of store, records and saves stand here, the others in tables of their own.
"""

from dataclasses import dataclass

_OPERATIONS = "tests/crash/test_every_operation.py::"
_HINT = "tests/crash/test_latest_link.py::"
_EVIDENCE = "tests/crash/test_evidence.py::"
_LEASE = "tests/crash/test_lease.py::"
_RECORDS = "tests/crash/test_records.py::"
_PROMISED = "test_each_event_that_promised_something_is_there_from_the_moment_write_returned"


def _kill(scene: str) -> str:
    return f"{_OPERATIONS}test_a_kill_at_any_operation_leaves_the_old_state_or_the_new_one[{scene}]"


def _cut(scene: str) -> str:
    return f"{_OPERATIONS}test_a_power_cut_at_any_operation_leaves_the_old_state_or_the_new_one[{scene}]"


_FAILED = "tests/unit/loop/test_failed_saves.py::"
_GIVEN_UP = "tests/distributed/test_failed_saves.py::test_a_first_save_that_one_rank_cannot_copy_is_given_up_by_all"
_LATE_MANIFEST = """\
    name = _publish(store, draft, stem)
    store.files.write_new(store.path(name) / MANIFEST, [encoded])
    store.files.sync_directory(store.path(name))
    return name
"""
_MACHINE = "tests/property/test_store_machine.py"


@dataclass(frozen=True)
class Mutation:
    """One guarantee broken on purpose.

    Attributes:
        title: the guarantee that is gone.
        replacements: file below the package, text that stands there exactly once, text instead.
        caught_by: the tests of which at least one must fail.
    """

    title: str
    replacements: tuple[tuple[str, str, str], ...]
    caught_by: tuple[str, ...]

    def __str__(self) -> str:
        return self.title


def one(title: str, file: str, old: str, new: str, *caught_by: str) -> Mutation:
    return Mutation(title, ((file, old, new),), caught_by)


STORE = (
    # ---- syncs ----
    one("file not synced", "files.py",
         "            self.disk.sync_file(handle)\n        except BaseException:",
         "            pass\n        except BaseException:",
         _cut("save")),
    one("part directories not synced", "store/commit.py",
         "        files.sync_directory(directory)\n", "        pass\n", _cut("save")),
    one("draft directory not synced", "store/commit.py",
         "    files.sync_directory(draft.path)\n", "", _cut("save")),
    one("parent not synced after the rename", "files.py",
         "            self._sync_names(target.parent)\n", "", _cut("save")),
    one("store's own directory not durable", "store/commit.py",
         "files.make_directory(store.root, durable=True)", "files.make_directory(store.root)", _cut("first save")),
    one("lease not durable", "files.py",
         "            self._sync_names(path.parent)\n            return True", "            return True",
         f"{_LEASE}test_a_power_cut_never_takes_back_a_number_that_was_given"),
    one("sealed bytes not synced", "store/seal.py",
         "        files.sync_existing(directory / name)\n", "        pass\n", _cut("seal")),
    one("sealed folder's name not synced", "store/seal.py",
         "(*sorted(above, reverse=True), directory.parent)", "sorted(above, reverse=True)", _cut("seal")),
    # ---- order ----
    Mutation("manifest written after the rename", (
        ("store/commit.py", "    files.write_new(draft.path / MANIFEST, [encoded])\n", ""),
        ("store/commit.py", "    return _publish(store, draft, stem)\n", _LATE_MANIFEST),
    ), (_kill("save"),)),
    one("old ones deleted before the commit", "store/commit.py",
         "    return _publish(store, draft, stem)\n",
         "    for node in store.files.list_directory(store.root):\n"
         "        if (store.path(node.name) / MANIFEST) and node.name.startswith('checkpoint-2'):\n"
         "            store.files.remove_tree(store.path(node.name))\n"
         "    return _publish(store, draft, stem)\n",
         _kill("save")),
    one("sweep before the hint", "store/sweep.py",
         "    point_latest(store, committed, job=job)\n    if keeps",
         "    early = decide(candidates(store, scan(store).committed), tuple(policies))\n"
         "    sweep(store, early.released, is_live=is_live)\n"
         "    point_latest(store, committed, job=job)\n    if keeps",
         _kill("save that releases old ones")),
    one("checkpoint removed under its own name", "store/sweep.py",
         "    store.files.publish(store.path(name), trash)\n", "    trash = store.path(name)\n",
         _kill("save that releases old ones")),
    Mutation("abandoned ones moved before the record", (
        ("store/rewind.py", "        record_rewind(store, target",
         "        move_abandoned(store, newer)\n        record_rewind(store, target"),
        ("store/rewind.py", "        move_abandoned(store, newer)\n    return newer", "    return newer"),
    ), (_kill("rewind"),)),
    # ---- evidence ----
    one("evidence not looked at", "store/commit.py", "    if problems:\n", "    if problems and False:\n",
         f"{_EVIDENCE}test_a_commit_without_evidence_is_refused_and_the_next_one_works"),
    one("digest not compared", "store/check.py",
         "if len(view) != block.end - block.start or digest_bytes(view) != block.expected:",
         "if len(view) != block.end - block.start:",
         f"{_HINT}test_a_damaged_newest_one_costs_one_look_and_is_kept_with_its_reason"),
    one("latest trusted", "store/choose.py",
         "choose(newest_first(store, scan(store).committed), lambda",
         "choose(sorted(newest_first(store, scan(store).committed),"
         " key=lambda name: name != scan(store).latest), lambda",
         f"{_HINT}test_a_resume_takes_the_newest_whatever_latest_says"),
    one("bytes that nobody reads not proven", "state/restore.py",
         "    if not is_partial:\n"
         "        verify_unread(source.store, source.name, source.manifest, plan.index, plan.places, world)\n", "",
         "tests/unit/loop/test_resume.py::"
         "test_one_bit_of_any_part_is_seen_even_where_no_job_has_a_use_for_it[state/.metadata]"),
    one("unread bytes shared out with holes", "state/read.py",
         "unread[world.rank :: world.size]", "unread[1 :: world.size]",
         "tests/distributed/test_resize.py::"
         "test_damage_to_the_record_of_a_rank_that_is_no_more_is_seen_by_those_that_are"),
    one("damaged one deleted instead of moved", "store/choose.py",
         "    store.files.publish(store.path(name), directory / aside)\n",
         "    store.files.remove_tree(store.path(name))\n",
         f"{_HINT}test_a_damaged_newest_one_costs_one_look_and_is_kept_with_its_reason"),
    one("abandoned ids forgotten", "store/scan.py", "given_up = abandoned_ids(store)", "given_up = {}",
         f"{_HINT}test_after_a_rewind_a_crash_and_a_new_branch_the_abandoned_one_is_never_chosen"),
    one("fence not asked", "store/commit.py", "    if fence is not None:\n", "    if False:\n",
         f"{_LEASE}test_a_job_that_was_taken_for_dead_commits_nothing"),
    # ---- keep and sweep ----
    one("unusable ones counted", "store/keep.py", "policy.keeps(usable)", "policy.keeps(newest_first)",
         "tests/property/test_keep.py::test_the_last_k_usable_steps_are_kept_whatever_else_was_saved"),
    one("newest usable one released", "store/keep.py",
         "    if usable:\n        reasons", "    if False:\n        reasons", _MACHINE),
    one("one that the job resumed from released", "store/keep.py",
         "    if resume_target is not None:\n", "    if False:\n", _MACHINE),
    one("nan taken for the best", "store/keep.py", "if math.isfinite(c.metrics.get(self.metric, math.nan))",
         "if self.metric in c.metrics",
         "tests/property/test_keep.py::test_the_best_measured_one_is_kept_and_nan_is_never_best"),
    one("pins not honoured", "store/keep.py", "(*(policies or (LastK(None),)), Pinned(), NotYetMirrored())",
         "(*(policies or (LastK(None),)), NotYetMirrored())",
         "tests/property/test_keep.py::test_what_must_never_be_deleted_is_never_released"),
    one("missing mirror copies not honoured", "store/keep.py",
         "(*(policies or (LastK(None),)), Pinned(), NotYetMirrored())", "(*(policies or (LastK(None),)), Pinned())",
         "tests/property/test_keep.py::test_what_must_never_be_deleted_is_never_released"),
    one("draft of a live job swept", "store/sweep.py",
         "for t in inventory.torn if not is_live(t.name)}", "for t in inventory.torn}", _kill("sweep")),
    one("users' files swept", "store/sweep.py", "    if foreign:\n", "    if foreign and False:\n",
         f"{_EVIDENCE}test_a_checkpoint_with_a_users_file_in_it_is_left_whole"),
    one("folder without a manifest swept", "store/sweep.py",
         "if name not in committed:\n        return \"it is not a committed checkpoint\", 0\n    if holds",
         "if name not in committed:\n        return None, 0\n    if holds",
         f"{_EVIDENCE}test_a_sweep_refuses_to_remove_a_users_folder"),
    one("run swept like a checkpoint", "store/sweep.py",
         "    if holds_store(store.files, store.path(name)):\n", "    if False:\n",
         "tests/e2e/test_seal.py::test_prune_never_removes_a_run_nor_the_folder_it_names"),
    one("run sealed like a checkpoint", "store/seal.py",
         "    if holds_checkpoints(store.files, directory):\n", "    if False:\n",
         "tests/unit/store/test_seal.py::test_a_run_is_not_sealed_as_one_checkpoint"),
    one("scratch of records left", "store/scan.py", "leftover=(*leftover, *_scratch_of_records(store, nodes)),",
         "leftover=tuple(leftover),", _kill("pin")),
    # ---- the records of a run ----
    one("facts of the journal not synced", "records/jsonl.py",
         "            self._appender.sync()\n", "            pass\n", f"{_RECORDS}{_PROMISED}"),
    one("name of the journal not synced", "files.py",
         "                self.files._sync_names(self.path.parent)\n", "                pass\n",
         f"{_RECORDS}{_PROMISED}"),
    one("line added behind a torn one", "records/jsonl.py", "append(before + data)", "append(data)",
         "tests/unit/records/test_journal.py::"
         "test_a_line_that_a_crash_tore_is_counted_and_the_next_writer_begins_behind_it[Tail.HALF]"),
    one("steps computed twice not compared", "records/metrics.py",
         "bits[name] != before.bits[name]", "bits[name] != bits[name]",
         "tests/unit/records/test_metrics.py::test_one_wrong_bit_is_reported_with_its_step"),
    one("lost steps before the last lines of a file forgotten", "records/jsonl.py",
         "    while tail_bytes < size_bytes and not _begins_early(path, size_bytes - tail_bytes, is_early, files):\n",
         "    while False:\n",
         "tests/unit/records/test_metrics.py::test_the_end_of_the_files_is_enough_to_know_what_was_lost"),
    one("outcome of an earlier job taken for this one's", "records/outcome.py",
         'history.last("job-end", job=job)', 'history.last("job-end")',
         "tests/unit/records/test_outcome.py::test_the_outcome_is_derived_from_lease_journal_and_snapshot"),
    one("request for an earlier job followed", "records/stop.py",
         "found.job < self._job", "found.job < 0",
         "tests/unit/records/test_stop.py::test_a_request_for_an_earlier_job_stops_no_later_one"),
    one("a signal that only the newest job of a process hears", "records/stop.py",
        "        for each in (self, *_installed):\n",
        "        for each in (self,):\n",
        "tests/unit/records/test_stop.py::test_a_signal_stops_every_job_of_the_process_whichever_ends_first"),
    one("the handlers of a newer job, gone with those of an older one", "records/stop.py",
        "            if over is not None:\n",
        "            if False and over is not None:\n",
        "tests/unit/records/test_stop.py::test_a_signal_stops_every_job_of_the_process_whichever_ends_first"),
    # ---- a save that fails ----
    one("copies not agreed by all ranks", "state/save.py",
         "thread = self._world.all_or_none(begin_mine)", "thread = begin_mine()", _GIVEN_UP),
    one("copies that nobody writes not released", "state/save.py",
         "                staged.release()\n            raise\n        paused_s",
         "                pass\n            raise\n        paused_s", _GIVEN_UP),
    one("state that cannot be taken ends training", "state/save.py",
         "return not isinstance(cause, InternalError | PeerLost)", "return False",
         f"{_FAILED}test_a_host_without_memory_costs_the_save_and_the_next_one_finds_some"),
    one("error of an object's own ends the save only", "state/save.py",
         "return not isinstance(cause, InternalError | PeerLost)", "return True",
         "tests/distributed/test_failed_saves.py::test_an_error_of_an_objects_own_in_a_save_ends_all"),
    one("last save's refusal swallowed", "loop/edge.py",
         "        refused = self.settle_last()\n        if refused is not None:\n",
         "        refused = self.settle_last()\n        if False:\n",
         f"{_FAILED}test_the_last_save_of_a_job_that_cannot_be_made_is_an_error"),
    Mutation("generators taken before the objects' states", (
        ("state/capture.py", "    states = {item.name: item.take() for item in items}\n",
         "    early = generators()\n    states = {item.name: item.take() for item in items}\n"),
        ("state/capture.py", "flatten(called, generators(), allow", "flatten(called, early, allow"),
    ), ("tests/unit/state/test_rng.py::test_an_object_that_draws_in_state_dict_shifts_no_draw_of_a_resume",)),
    one("a metric of an earlier step counts for a checkpoint", "loop/edge.py",
         "self.logged.of_step(self.step).items()", "self.logged.latest.items()",
         "tests/unit/loop/test_run.py::"
         "test_the_best_by_a_metric_that_is_logged_now_and_then_is_the_checkpoint_of_the_step_it_was_logged_for"),
    # ---- names of earlier versions ----
    one("an old name below a list is not read", "store/old_names.py",
         '("eras.*", "on_dry", "on_exhausted")', '("eras", "on_dry", "on_exhausted")',
         "tests/unit/store/test_old_names.py::test_a_stream_of_the_first_version_is_read_as_today_s"),
    one("a record with an old and a new name is read", "store/old_names.py",
         "    if new in value:\n        raise", "    if False:\n        raise",
         "tests/unit/store/test_old_names.py::test_a_name_of_today_in_an_old_record_is_refused"),
    # ---- the save plan ----
    one("a save plan ignores how much a rank already writes", "state/planners.py",
         "chosen = min(ranks, key=lambda rank: (busy_s[rank] + size / speeds[rank], rank))", "chosen = ranks[0]",
         "tests/property/test_save_plan.py::test_the_plan_is_the_one_made_piece_by_piece"),
    one("two tensors that share memory on one rank only are written once", "state/pieces.py",
         'is_one = twin.way is mine.way and mine.same_as == [other if same_as else "" for same_as in twin.same_as]',
         "is_one = twin.way is mine.way",
         "tests/property/test_save_plan.py::test_the_plan_is_the_one_made_piece_by_piece"),
    one("a description is reused although the pieces lie elsewhere", "state/description.py",
         "plan is not self._plan or places != self._places", "plan is not self._plan",
         "tests/unit/state/test_description.py::test_a_save_whose_pieces_lie_elsewhere_is_described_again"),
    one("a description is reused although the plan is another", "state/description.py",
         "plan is not self._plan or places != self._places", "places != self._places",
         "tests/unit/state/test_description.py::test_a_save_with_another_plan_is_described_again"),
    # ---- names ----
    one("climbing names accepted", "store/names.py", ' or ".." in pieces', "",
         f"{_EVIDENCE}test_a_part_cannot_be_written_outside_its_draft"),
    one("the tail of a direct write left out", "files.py",
         "written += done + self._write_all(handle, data[done:])", "written += done or self._write_all(handle, data)",
         "tests/unit/test_files.py::test_a_file_written_past_the_page_cache_has_all_bytes"),
    one("one buffer for the block on its way and the next", "store/parts.py",
         "                block, other, filled = other, block, 0\n", "                filled = 0\n",
         "tests/unit/store/test_parts.py::test_a_large_part_is_what_a_small_one_would_be"),
    one("memory made ready and not used", "state/stage.py",
         "        if self._preparing is not None or self._arenas:\n            return\n", "        return\n",
         "tests/unit/state/test_stage.py::test_memory_that_was_made_ready_is_that_of_the_first_save"),
    one("part written into a draft of its own", "store/commit.py",
         "        if files.find(self.path) is None:\n", "        if False:\n",
         f"{_EVIDENCE}test_a_part_is_not_written_where_the_draft_is_not_seen"),
)  # fmt: skip
