"""The mutations of a stranger's habits: one section per row U1 to U17."""

from tests.mutation.table import Mutation, one

_LEASE = "tests/unit/run/test_lease.py::"
_WATCHED = "tests/unit/run/test_takeover.py::"
_HELD = "tests/e2e/test_lease.py::"
_PATHS = "tests/unit/loop/test_paths.py::"
_SYSTEMS = "tests/crash/test_file_systems.py::"

HABITS: tuple[Mutation, ...] = (
    # ---- U1 ----
    # ---- U2 ----
    # ---- U3 ----
    # ---- U4 ----
    # ---- U5 ----
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
    # ---- U9 ----
    # ---- U10 ----
    # ---- U11 ----
    # ---- U12 ----
    # ---- U13 ----
    # ---- U14 ----
    # ---- U15 ----
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
)  # fmt: skip
