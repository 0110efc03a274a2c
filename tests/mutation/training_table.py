"""The mutations of training: the canonical fold, the model."""

from tests.mutation.table import one

_PACKING = "tests/unit/gpt/test_packing.py::"
_FOLD = "tests/unit/exact/test_reduction.py::"
_SMALL_WORLD = "tests/exact/test_small_world.py::test_three_ranks_give_the_bits_of_one"

TRAINING = (
    # ---- the same bits on any number of ranks ----
    one("lanes of a round added in another order", "exact/reduction.py",
         "flight.received.view(self._ranks.size, -1)[: self._present]:",
         "flight.received.view(self._ranks.size, -1)[: self._present].flip(0):",
         f"{_FOLD}test_lanes_are_added_in_their_order_whichever_rank_adds"),
    one("lanes of shards added in another order", "exact/sharded.py",
         "received.view(self._ranks.size, -1)[: self._round.present]:",
         "received.view(self._ranks.size, -1)[: self._round.present].flip(0):", _SMALL_WORLD),
    one("zeros of an idle rank added", "exact/reduction.py",
         "flight.received.view(self._ranks.size, -1)[: self._present]:",
         "flight.received.view(self._ranks.size, -1):",
         f"{_FOLD}test_a_rank_without_a_lane_adds_nothing_not_even_a_zero"),
    one("spare lane counted", "exact/sharded.py",
         "received.view(self._ranks.size, -1)[: self._round.present]:",
         "received.view(self._ranks.size, -1):", _SMALL_WORLD),
    one("first lane added to zero", "exact/reduction.py",
         "            self.total.copy_(part)\n", "            self.total.zero_().add_(part)\n",
         f"{_FOLD}test_the_first_lane_is_taken_as_it_is_and_a_new_step_begins_afresh"),
    one("sum of the step before kept", "exact/reduction.py",
         "            mine.reset()\n", "            pass\n", _SMALL_WORLD),
    one("lane seeded by rank", "exact/reducer.py",
         "            generators.enter(at)\n", "            generators.enter(plan.rank)\n", _SMALL_WORLD),
    one("lane seeded without its step", "exact/generators.py",
         'f"{seed}/{step}/{lane}"', 'f"{seed}/{lane}"',
         "tests/unit/exact/test_generators.py::"
         "test_a_lanes_numbers_follow_from_seed_step_and_lane_alone"),
    one("generators kept by the lanes", "exact/generators.py",
         "        restore_generators(self._before, self._devices)\n", "        pass\n",
         "tests/unit/exact/test_generators.py::"
         "test_after_the_lanes_the_generators_go_on_as_if_there_had_been_none"),
    one("norm added shard by shard", "exact/norm.py",
         "    return fold(_whole(sums, heights, ranks)).sqrt()\n",
         "    return fold(ranks.gathered(torch.cat(sums).sum().view(1)).view(-1)).sqrt()\n", _SMALL_WORLD),
    one("parameters left in lower precision", "exact/precision.py",
         "                parameter.data = kept\n", "                pass\n",
         "tests/unit/exact/test_reducer.py::"
         "test_in_lower_precision_lanes_compute_in_it_and_the_parameters_stay_as_they_are"),
    one("fused optimizer on the CPU accepted", "exact/reducer.py",
         'if group.get("fused") and', "if False and",
         "tests/unit/exact/test_optimizers.py::test_one_that_is_fused_on_the_cpu_does_not_and_is_refused"),
    one("more ranks than lanes accepted", "exact/lanes.py",
         "        if self.size > self.lanes:\n", "        if False:\n",
         "tests/unit/exact/test_lanes.py::test_more_ranks_than_lanes_is_refused_with_both_numbers"),
    one("another arithmetic accepted", "exact/numerics.py",
         "    if refused:\n", "    if False:\n",
         "tests/unit/exact/test_numerics.py::test_each_difference_is_named_with_both_values"),
    one("other lanes accepted", "exact/reducer.py",
         "        if differences:\n", "        if False:\n",
         "tests/unit/exact/test_reducer.py::test_a_checkpoint_of_other_lanes_is_refused_and_of_the_same_is_taken"),
    # ---- the model ----
    one("documents see each other", "gpt/mask.py",
         "return ((doc_ids[:, :, None] == doc_ids[:, None, :]) & past)[:, None]",
         "return ((doc_ids[:, :, None] == doc_ids[:, :, None]) & past)[:, None]",
         f"{_PACKING}test_a_packed_document_has_the_logits_it_has_alone"),
    one("labels not shifted", "gpt/loss.py", "return F.pad(labels[:, 1:], (0, 1), value=IGNORED)", "return labels",
         "tests/unit/gpt/test_model.py::test_loss_and_gradients_are_those_of_the_logits[defaults]"),
    one("a shard initialised as if it were the whole", "gpt/initialization.py",
         "torch.arange(offsets[0] + first, offsets[0] + first + len(slab), device=box.device)",
         "torch.arange(first, first + len(slab), device=box.device)",
         "tests/unit/gpt/test_initialization.py::test_a_box_has_the_values_it_has_in_the_whole"),
    one("an export under its own name from the start", "gpt/export.py",
         'path.with_name(f".{path.name}.partial")', "path",
         "tests/crash/test_export.py::test_an_export_is_there_whole_or_not_at_all"),
    one("angles rounded with the weights", "gpt/model.py",
         "        self.place_angles()\n        return self\n", "        return self\n",
         "tests/unit/gpt/test_model.py::test_a_change_of_dtype_and_an_empty_device_leave_the_angles_right"),
)  # fmt: skip
