"""The mutations of trackers."""

from tests.mutation.table import Mutation, one

_FOLLOWING = "tests/unit/trackers/test_following.py::"
_ONCE = f"{_FOLLOWING}test_steps_computed_again_are_sent_once_and_the_id_stays"
_FAILING = f"{_FOLLOWING}test_a_failing_tracker_changes_no_bit_and_is_counted"

TRACKERS: tuple[Mutation, ...] = (
    one(
        "a step that is computed again sent twice",
        "trackers/sender.py",
        "[row for row in rows if row.step > self.sent and row.values]",
        "[row for row in rows if row.values]",
        _ONCE,
    ),
    one(
        "a new tracker run for every job",
        "trackers/following.py",
        "ids.get(each.name) or secrets.token_hex(_ID_BYTES)",
        "secrets.token_hex(_ID_BYTES)",
        _ONCE,
    ),
    one(
        "what was sent not written down",
        "trackers/sender.py",
        "            self.mark(self.sent)\n",
        "            pass\n",
        f"{_FOLLOWING}test_a_tracker_that_cannot_tell_is_sent_what_was_not_written_down",
    ),
    one(
        "what a tracker lost never sent again",
        "trackers/sender.py",
        "            self.sent = shown\n",
        "            pass\n",
        f"{_FOLLOWING}test_what_the_tracker_lost_is_sent_again_from_the_records",
    ),
    one(
        "steps shown before a checkpoint commits them",
        "trackers/following.py",
        'target=step if mode == "committed" else None',
        "target=None",
        f"{_FOLLOWING}test_committed_steps_alone_are_shown",
    ),
    one(
        "a run that went back shown on top of what it left",
        "records/tracker_marks.py",
        "            ids.clear()\n",
        "            pass\n",
        f"{_FOLLOWING}test_a_run_that_goes_back_gets_a_new_run_with_its_whole_past",
    ),
    one(
        "no tracker id in a checkpoint",
        "loop/edge.py",
        "            metadata[TRACKERS] = dict(ids)\n",
        "            pass\n",
        f"{_FOLLOWING}test_a_run_that_lost_its_records_finds_its_tracker_in_the_checkpoint",
    ),
    one(
        "the error of a tracker ends its thread",
        "trackers/sender.py",
        "            except Exception as raised:  # noqa: BLE001",
        "            except MemoryError as raised:  # noqa: BLE001",
        _FAILING,
    ),
    one(
        "libraries that draw in the process of the training",
        "trackers/named.py",
        "    if known.draws and importlib",
        "    if False and importlib",
        "tests/unit/trackers/test_apart.py::test_a_library_that_draws_random_numbers_gets_a_process_of_its_own[trackio]",
    ),
    one(
        "a secret in the message of a tracker",
        "trackers/sender.py",
        "self.error = hide_secrets(text",
        "self.error = str(text",
        _FAILING,
    ),
    one(
        "the rows of a failed call sent again",
        "trackers/sender.py",
        "self.sent if shown is None else max(self.sent, shown)",
        "self.sent",
        f"{_FOLLOWING}test_a_failure_in_the_middle_of_a_batch_doubles_nothing",
    ),
    one(
        "what kept steps back forgotten when the run is finished",
        "trackers/sender.py",
        "        self.error = self.error or behind\n",
        "        pass\n",
        f"{_FOLLOWING}test_a_tracker_that_took_no_step_is_behind_though_its_run_was_finished",
    ),
    one(
        "a name that MLflow refuses sent as it is",
        "trackers/mlflow.py",
        "zip(_names(row.values), row.values.values(), strict=True)",
        "row.values.items()",
        "tests/unit/trackers/test_mlflow.py::test_no_name_keeps_the_steps_back",
    ),
    one(
        "a step of TensorBoard's in many events",
        "trackers/tensorboard.py",
        "            self._writer.file_writer.add_summary(Summary(value=parts), row.step)\n",
        "            for part in parts:\n"
        "                self._writer.file_writer.add_summary(Summary(value=[part]), row.step)\n",
        "tests/unit/trackers/test_tensorboard.py::test_a_step_that_a_kill_cuts_is_sent_again_with_all_its_metrics",
    ),
    one(
        "a drill shown as the real run",
        "loop/opened_run.py",
        "checkpoints=None, trackers=())",
        "checkpoints=None)",
        f"{_FOLLOWING}test_a_drill_sends_nothing",
    ),
    one(
        "a generator moved by the import of a tracker",
        "loop/trackers.py",
        "        restore_rng(before, devices)\n",
        "        pass\n",
        f"{_FOLLOWING}test_a_library_that_draws_when_it_is_imported_moves_no_generator",
    ),
    one(
        "a loop with DCP shows steps before a checkpoint commits them",
        "frameworks/options.py",
        "    return Settings(**{**default, **options})\n",
        '    return Settings(**{**default, **options, "tracker_mode": "live"})\n',
        "tests/unit/frameworks/test_dcp.py::test_a_tracker_shows_each_step_once_in_one_run",
    ),
)
