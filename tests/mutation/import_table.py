"""The mutations of importing other tools' checkpoints, and of the save planner."""

from tests.mutation.table import Mutation, one

_RESOLVE = "tests/unit/store/test_foreign.py::"
_READ = "tests/unit/foreign/test_read.py::"
_IMPORT = "tests/unit/foreign/test_import.py::"
_NAMES = "tests/unit/gpt/test_foreign_names.py::"
_PLANNERS = "tests/unit/state/test_planners.py::"

IMPORTS: tuple[Mutation, ...] = (
    # ---- M1, M2, M3, M5, M6 ----
    one(
        "the older folder name is not read",
        "store/foreign.py",
        'r"(?:dcp|dist_ckpt)_([0-9]{6,18})"',
        'r"(?:dcp)_([0-9]{6,18})"',
        f"{_RESOLVE}test_a_file_a_folder_and_its_parent_name_the_same_checkpoints",
    ),
    one(
        "the model file is preferred at one step",
        "store/foreign.py",
        'fitting = [each for each in fitting if each.kind == "dcp"] or fitting',
        'fitting = [each for each in fitting if each.kind == "model"] or fitting',
        f"{_RESOLVE}test_dcp_is_looked_for_first_and_what_is_named_wins",
    ),
    one(
        "a folder without meta is chosen",
        "store/foreign.py",
        'return f"meta_{found[1]}.json" not in nodes and files.find(parent / name / "meta.json") is None',
        "return False",
        f"{_RESOLVE}test_a_folder_without_meta_is_not_chosen_but_can_be_named",
    ),
    one(
        "another kind is taken instead",
        "store/foreign.py",
        "        if require_kind not in (None, named.kind):",
        "        if False:",
        f"{_RESOLVE}test_a_required_kind_is_never_substituted",
    ),
    one(
        "an older step of the kind is taken instead",
        "store/foreign.py",
        "    newest = [each for each in found if each.step in (None, wanted)]",
        "    newest = [each for each in found if require_kind in (None, each.kind)]",
        f"{_RESOLVE}test_a_required_kind_is_never_substituted",
    ),
    one(
        "a checkpoint without a step is chosen among others",
        "store/foreign.py",
        "if len(found) > 1 and any(each.step is None for each in found):",
        "if False:",
        f"{_RESOLVE}test_a_parent_that_is_not_clear_is_an_error_that_lists_the_candidates",
    ),
    one(
        "missing rank files are not noticed",
        "foreign/read.py",
        'files.problems.append(f"optim_{digits}_rank{rank}.pt: is missing")',
        "pass",
        f"{_READ}test_every_missing_or_damaged_file_is_in_one_error",
    ),
    one(
        "shards of one rank are taken for the whole optimizer",
        "foreign/read.py",
        "if not all(is_same(states[0], other) for other in states[1:]):",
        "if False:",
        f"{_READ}test_optimizer_files_that_differ_by_rank_are_shards_and_not_imported",
    ),
    one(
        "numbers of an optimizer are matched by count alone",
        "state/numbered.py",
        "        changed += _other_shapes(",
        "        _ = _other_shapes(",
        f"{_IMPORT}test_a_numbered_optimizer_fits_the_live_one_or_is_an_error",
    ),
    one(
        "a missing RNG state is not named",
        "state/restore.py",
        "    if trainer.values.get(RNG) == NO_RNG:",
        "    if False:",
        f"{_IMPORT}test_both_layouts_continue_in_a_run_with_the_same_bits[model]",
    ),
    # ---- hostile and damaged files ----
    one(
        "checksums of zip files are not verified",
        "foreign/pickles.py",
        "            self._check_zip(path)\n",
        "",
        f"{_READ}test_a_flipped_bit_is_noticed_though_torch_loads_it",
    ),
    one(
        "a file that changes while it is read is not noticed",
        "foreign/pickles.py",
        "if found is None or (found.size_bytes, found.modified_ns) != before:",
        "if found is None:",
        f"{_READ}test_a_checkpoint_that_changes_while_it_is_read_is_an_error",
    ),
    one(
        "the index of DCP is opened with any class",
        "foreign/dcp.py",
        "        if is_dtype or is_record or (module, name) in _OTHERS:",
        "        if True:",
        f"{_READ}test_a_pickle_that_would_run_code_is_not_run[False]",
    ),
    one(
        "a short shard is not noticed",
        "foreign/dcp.py",
        "        elif found.size_bytes < end:",
        "        elif False:",
        f"{_READ}test_missing_short_and_outside_files_of_dcp_are_all_named",
    ),
    # ---- names ----
    one(
        "query, key and value rows in another order",
        "gpt/foreign_names.py",
        "            heads = (names.query, names.key, names.value)",
        "            heads = (names.query, names.value, names.key)",
        f"{_NAMES}test_a_run_of_gpt_simple_has_its_logits_step_and_moments",
    ),
    one(
        "gate and up in another order",
        "gpt/foreign_names.py",
        "                gated = (names.gate, names.up)",
        "                gated = (names.up, names.gate)",
        f"{_NAMES}test_kempnerforge_has_its_logits_with_the_model_of_a_config",
    ),
    one(
        "a run of GPT-Simple does not name the import",
        "errors/config.py",
        'command = f"unbroken import {quoted(self.run)} {quoted(new)}"',
        'command = "unbroken explain gpt-simple-run"',
        f"{_NAMES}test_a_run_of_gpt_simple_in_output_dir_names_the_import",
    ),
    one(
        "numbered moments follow the order of a sorted file",
        "gpt/foreign_names.py",
        "        order.sort(key=_llama_order)\n",
        "        pass\n",
        f"{_NAMES}test_the_moments_of_a_llama_are_those_of_its_parameters_though_its_file_is_sorted",
    ),
    one(
        "a Llama that computes otherwise is imported",
        "gpt/foreign_names.py",
        "return _other_llama(source, model) or _other_gpt_simple(source, model)",
        "return _other_gpt_simple(source, model)",
        f"{_NAMES}test_a_config_that_computes_otherwise_than_the_llama_is_an_error",
    ),
    # ---- M28 ----
    one(
        "measured speeds have no effect",
        "state/planners.py",
        "speeds = self.bytes_per_s if len(self.bytes_per_s) == len(load) else [1.0] * len(load)",
        "speeds = [1.0] * len(load)",
        f"{_PLANNERS}test_bytes_are_balanced_by_default_and_time_by_measured_speed",
    ),
    one(
        "a piece without a writer is lost",
        "state/pieces.py",
        "    require_holders(writers, shared)\n",
        "",
        f"{_PLANNERS}test_a_planner_that_would_lose_a_piece_is_an_error[None-no rank]",
    ),
    one(
        "the planner of the settings is not used",
        "loop/opening.py",
        "        planner=settings.planner,\n",
        "",
        f"{_PLANNERS}test_a_run_saves_with_another_planner_and_resumes_without_it",
    ),
)
