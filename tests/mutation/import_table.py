"""The mutations of importing other tools' checkpoints, and of the save planner."""

from tests.mutation.table import Mutation, one

_RESOLVE = "tests/unit/store/test_foreign.py::"
_READ = "tests/unit/foreign/test_read.py::"
_IMPORT = "tests/unit/foreign/test_import.py::"
_CHOICES = "tests/unit/foreign/test_choices.py::"
_LOAD = "tests/unit/foreign/test_load_foreign.py::"
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
    # ---- two sources of one item ----
    one(
        "the last of two keys wins",
        "foreign/items.py",
        "        elif name not in self.items:",
        "        elif True:",
        f"{_CHOICES}test_two_keys_with_one_item_are_an_error_that_names_both_and_how_to_choose[model]",
    ),
    one(
        "bits are compared as numbers",
        "foreign/items.py",
        "    return torch.equal(*raw)",
        "    return torch.equal(one, other)",
        f"{_CHOICES}test_equal_numbers_with_other_bits_are_not_the_same",
    ),
    one(
        "the pickle wins over safetensors",
        "foreign/read.py",
        '_WEIGHTS_ORDER: Final = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")',
        '_WEIGHTS_ORDER: Final = (".bin", ".bin.index.json", ".safetensors", ".safetensors.index.json")',
        f"{_CHOICES}test_safetensors_win_over_a_pickle_beside_them_and_the_other_is_named",
    ),
    one(
        "names that collide without wrappers are let through",
        "foreign/items.py",
        "        if len(held) > 1\n",
        "        if False\n",
        f"{_CHOICES}test_names_that_are_the_same_without_wrappers_are_refused_by_name",
    ),
    one(
        "the last pipeline stage wins",
        "foreign/read.py",
        "not is_same(mine[name], more[name])]",
        "False]",
        f"{_CHOICES}test_pipeline_stages_that_both_have_a_parameter_must_agree",
    ),
    one(
        "a missing optimizer file is not mentioned",
        "foreign/read.py",
        "    if not ranks and world is None:",
        "    if False:",
        f"{_CHOICES}test_weights_without_their_optimizer_file_say_so",
    ),
    one(
        "buffers that are not saved are imported",
        "foreign/pickles.py",
        "if name not in unsaved}",
        "}",
        f"{_CHOICES}test_a_pickled_module_is_read_as_its_weights_and_never_constructed",
    ),
    one(
        "a part of a pickled module is lost",
        "foreign/pickles.py",
        "        elif inner is not None:",
        "        elif False:",
        f"{_CHOICES}test_a_pickled_module_with_a_part_that_is_none_is_not_imported_in_part",
    ),
    # ---- loaded and started from, without an import ----
    one(
        "tied tensors are not completed",
        "foreign/staged.py",
        "for name in names if held and name not in state}",
        "for name in names if False}",
        f"{_LOAD}test_weights_alone_need_no_step_and_a_tied_tensor_no_second_name",
    ),
    one(
        "a start from another tool guesses step 0",
        "foreign/staged.py",
        "    if needs_step and step is None:",
        "    if False:",
        f"{_LOAD}test_a_run_does_not_guess_the_step_of_another_tool",
    ),
    one(
        "what was staged is left in the run",
        "loop/resume.py",
        "        staged.files.remove_tree(staged.root)",
        "        pass",
        f"{_LOAD}test_a_run_starts_from_a_checkpoint_of_another_tool_and_keeps_nothing_of_it",
    ),
    one(
        "names are not mapped to the trainer's model",
        "foreign/staged.py",
        "isinstance(item.module, MapsForeign)",
        "False",
        f"{_NAMES}test_the_model_of_the_trainer_loads_what_gpt_simple_wrote[False]",
    ),
    one(
        "a GPT-Simple run that computes otherwise is loaded",
        "gpt/foreign_names.py",
        "_other_gpt_simple(source, model) or ",
        "",
        f"{_NAMES}test_the_model_of_the_trainer_loads_what_gpt_simple_wrote[False]",
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
    one(
        "tensors beside the weights are left out silently",
        "foreign/read.py",
        "(why := _why_unread(name, contents)) is not None:",
        "False:",
        f"{_CHOICES}test_files_with_tensors_beside_the_weights_are_named_as_left_out",
    ),
    one(
        "tensors outside the prefix are left out silently",
        "foreign/read.py",
        "            contents.left_out |= _outside(selection.prefix, name, state)\n",
        "",
        f"{_CHOICES}test_tensors_outside_the_prefix_are_named_as_left_out",
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
