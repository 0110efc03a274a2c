"""The mutations of a stranger's habits: one section per row U1 to U17."""

from tests.mutation.table import Mutation, one

_EXTREME = "tests/format/test_extreme_numbers.py::"
_QUOTING = "tests/unit/quoting/test_quoting.py::"
_SCRIPT = "tests/unit/launch/slurm/test_script.py::"
_SWEEP = "tests/unit/store/test_sweep.py::"

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
)
