"""Which tests prove which entry: the rules that every pass obeys (R), the passes before autograd (PRE), the pattern
matcher (PM), and what is known of nodes and their order (MD). An entry without a test fails here, and so does a name
without a test.

A proof is a file of tests, a class in it, or one test.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent

# Entries with parts that stand on their own are listed part by part.
PARTS = {"PM-6": ("a", "b", "c"), "PM-7": ("a", "b")}
NUMBERED = [f"R{n}" for n in range(1, 11)]
NUMBERED += [f"PRE-{n:02}" for n in range(1, 35)]
NUMBERED += [f"PM-{n}" for n in range(1, 18)]
NUMBERED += [f"MD-{n}" for n in range(1, 5)]
ENTRIES = [entry + part for entry in NUMBERED for part in PARTS.get(entry, ("",))]

PROOFS: dict[str, tuple[str, ...]] = {
    # The rules.
    "R1": (
        "pre_grad/test_soundness.py::TestReadTime",
        "pre_grad/test_soundness.py::TestSeveral::test_read_before_and_after_a_write",
        "pre_grad/test_soundness.py::TestHeldByTheModule::test_a_write_to_what_would_be_read_is_seen_and_nothing_is_left_behind",
        "pre_grad/test_effects.py::test_a_write_is_seen",
        "pre_grad/test_effects.py::test_functions_that_nobody_knows_may_write",
    ),
    "R2": (
        "pre_grad/test_soundness.py::TestAlias",
        "pre_grad/test_soundness.py::TestReshapes",
        "pre_grad/test_soundness.py::TestCopiesThatBecomeViews",
    ),
    "R3": (
        "pre_grad/test_soundness.py::TestUsers",
        "pre_grad/test_soundness.py::test_what_nobody_reads_is_dropped",
    ),
    "R4": (
        "pre_grad/test_soundness.py::TestValues::test_dtype_of_the_result",
        "pre_grad/test_soundness.py::TestValues::test_agree",
        "pre_grad/test_soundness.py::TestValues::test_autocast_is_on_where_it_is_on",
    ),
    "R5": (
        "pre_grad/test_arguments.py",
        "golden/test_golden.py::test_calls_that_a_pass_cannot_read_are_left_alone",
    ),
    "R6": (
        "pre_grad/test_soundness.py::TestValues::test_missing_value",
        "pre_grad/test_soundness.py::TestValues::test_reshaped_in_place",
        "pre_grad/test_soundness.py::TestLayout::test_values_further_down_are_refreshed",
        "golden/test_golden.py::test_calls_that_a_pass_cannot_read_are_left_alone",
    ),
    "R7": ("pre_grad/test_soundness.py::TestLayout",),
    "R8": (
        "pre_grad/test_soundness.py::TestParts",
        "pre_grad/test_soundness.py::TestModes",
        "pre_grad/test_soundness.py::TestSeveral::test_parts_are_not_written",
        "pre_grad/test_soundness.py::TestSeveral::test_random_readers_do_not_move",
        "pre_grad/test_effects.py::test_random",
        "pre_grad/test_effects.py::test_modes_are_seen",
    ),
    "R9": (
        "pre_grad/test_soundness.py::test_sizes_may_vary_and_no_guard_is_added",
        "pre_grad/test_soundness.py::test_what_needs_a_guard_is_refused",
        "pre_grad/test_soundness.py::test_a_guard_that_a_pass_adds_is_seen",
        "pre_grad/test_soundness.py::TestValues::test_varying_sizes",
    ),
    "R10": (
        "pre_grad/test_driver.py::TestPlan::test_names_are_unique_and_groups_exist",
        "pre_grad/test_driver.py::TestStage::test_edits_the_module_it_is_given",
        "pre_grad/test_driver.py::TestStage::test_the_limit_counts_rewrites",
        "pre_grad/test_driver.py::TestStage::test_the_same_rewrites_in_the_same_order_every_time",
        "pre_grad/test_driver.py::TestStage::test_rewrites_are_on_record",
        "pre_grad/test_soundness.py::test_the_limit_stops_rewrites",
        "unit/test_passes.py::test_disabled_pass_is_left_out",
        "pre_grad/test_planted.py",
    ),
    # The stage.
    "PRE-01": ("pre_grad/test_driver.py",),
    "PRE-02": ("pre_grad/test_pre_dispatch.py",),
    "PRE-03": (
        "pre_grad/test_normalise.py::TestKeywords",
        "pre_grad/test_normalise.py::test_both_are_idempotent_together",
    ),
    "PRE-04": ("pre_grad/test_normalise.py::TestForms", "pre_grad/test_arguments.py"),
    "PRE-32": ("pre_grad/test_numeric_check.py", "unit/test_bisection.py"),
    # For a device.
    "PRE-05": ("pre_grad/test_sink_cat.py",),
    "PRE-06": ("pre_grad/test_transposes.py::TestLinearOutput",),
    "PRE-07": ("pre_grad/test_transposes.py::TestLinearInput",),
    "PRE-08": ("pre_grad/test_transposes.py::TestMatmul",),
    "PRE-09": ("pre_grad/test_remove_identity.py",),
    "PRE-10": ("pre_grad/test_fold_conv_bn.py",),
    "PRE-11": ("pre_grad/test_scale_conv_by_bn.py",),
    # Many small ops.
    "PRE-12": ("pre_grad/test_groups.py", "pre_grad/test_batch_pointwise.py"),
    "PRE-13": ("pre_grad/test_batch_linear.py",),
    "PRE-14": ("pre_grad/test_batch_linear_lhs.py",),
    "PRE-15": ("pre_grad/test_batch_layernorm.py",),
    "PRE-16": ("pre_grad/test_batch_pointwise.py",),
    "PRE-17": ("pre_grad/test_batch_options.py",),
    # Splits and joins.
    "PRE-18": ("pre_grad/test_splits.py::TestDropWholeSplits",),
    "PRE-19": ("pre_grad/test_splits.py::TestMergeNestedSplits",),
    "PRE-20": ("pre_grad/test_splits.py::TestMergeSplitItems",),
    "PRE-21": ("pre_grad/test_splits.py::TestCatOfItemsToSlice",),
    "PRE-22": (
        "pre_grad/test_split_joins.py::TestSimplifySplitJoins",
        "pre_grad/test_split_joins.py::test_every_pair_of_dimensions_of_a_split",
        "pre_grad/test_split_joins.py::test_counts_of_the_peers_table",
    ),
    "PRE-23": ("pre_grad/test_splits.py::TestSplitSqueezeToUnbind",),
    "PRE-24": (
        "pre_grad/test_split_joins.py::TestDropUnbindJoins",
        "pre_grad/test_split_joins.py::test_every_pair_of_dimensions_of_an_unbind",
    ),
    "PRE-25": (
        "pre_grad/test_runs.py::TestMatrix",
        "pre_grad/test_runs.py::TestModels::test_slices_of_three_splits",
        "pre_grad/test_runs.py::TestFaultsOfThePeer::test_other_dimension_than_the_split",
    ),
    "PRE-26": (
        "pre_grad/test_runs.py::TestMatrix",
        "pre_grad/test_runs.py::TestModels::test_views_of_two_unbinds",
        "pre_grad/test_runs.py::TestFaultsOfThePeer::test_unbind_cat_two_dimensions_apart",
    ),
    "PRE-27": (
        "pre_grad/test_runs.py::TestMatrix",
        "pre_grad/test_runs.py::TestModels::test_pairs_of_six_splits",
        "pre_grad/test_runs.py::TestFaultsOfThePeer::test_split_stack_two_dimensions_apart",
    ),
    "PRE-28": (
        "pre_grad/test_runs.py::TestMatrix",
        "pre_grad/test_runs.py::TestModels::test_a_stack_of_an_unbind",
        "pre_grad/test_runs.py::TestFaultsOfThePeer::test_unbind_stack_along_another_dimension",
    ),
    "PRE-29": (
        "pre_grad/test_runs.py::TestReshapes",
        "pre_grad/test_runs.py::TestFaultsOfThePeer::test_reshape_of_sections_wider_than_one",
    ),
    "PRE-30": ("pre_grad/test_einsum_to_pointwise.py",),
    "PRE-31": ("pre_grad/test_lift_quantise.py",),
    "PRE-33": ("pre_grad/test_cleanups.py",),
    "PRE-34": ("pre_grad/test_cleanups.py::TestPrivateKernels",),
    # The pattern matcher.
    "PM-1": ("pattern/test_match.py::TestExpressions",),
    "PM-2": ("pattern/test_match.py::TestUsers",),
    "PM-3": ("pattern/test_match.py::TestKeywords",),
    "PM-4": ("pattern/test_match.py::TestCommutative",),
    "PM-5": (
        "pattern/test_match.py::TestExpressions::test_several_ends",
        "pattern/test_match.py::TestExpressions::test_an_end_that_nobody_needs",
        "pattern/test_match.py::TestExpressions::test_an_end_that_was_tried_and_failed_leaves_nothing_behind",
        "pattern/test_traced.py::TestAfterAutograd::test_several_results",
        "pattern/test_traced.py::TestAfterAutograd::test_several_results_come_before_the_first_of_them",
    ),
    "PM-6a": ("pattern/test_match.py::TestTable",),
    "PM-6b": ("pattern/test_traced.py::TestAfterAutograd::test_replaced", "pattern/test_traced.py::TestRegister"),
    "PM-6c": ("pattern/test_lowering.py",),
    "PM-7a": (
        "pattern/test_traced.py::TestAfterAutograd::test_replaced",
        "pattern/test_traced.py::TestAfterAutograd::test_numbers_that_are_parameters",
    ),
    "PM-7b": ("pattern/test_traced.py::TestJoint",),
    "PM-8": (
        "pattern/test_traced.py::TestAfterAutograd::test_constants_are_held_against_the_real_thing",
        "pattern/test_traced.py::TestAfterAutograd::test_constants_are_held_against_the_real_thing_with_a_kept_text_too",
        "pattern/test_traced.py::TestAfterAutograd::test_what_cannot_be_traced_is_no_match",
        "pattern/test_traced.py::TestAfterAutograd::test_the_check_decides",
        "pattern/test_traced.py::TestJoint::test_whole_numbers_where_a_gradient_is_expected",
    ),
    "PM-9": (
        "pattern/test_traced.py::TestAfterAutograd::test_sizes_that_vary",
        "pattern/test_traced.py::TestAfterAutograd::test_a_check_of_sizes_that_vary_must_be_proved",
    ),
    "PM-10": (
        "pattern/test_match.py::TestTable::test_duplicates",
        "pattern/test_match.py::TestText",
        "pattern/test_traced.py::TestLazy::test_the_kept_text_is_what_a_trace_gives",
        "pattern/test_traced.py::TestLazy::test_equal_filters_with_other_constants_are_two_patterns",
    ),
    "PM-11": ("pattern/test_traced.py::TestLazy",),
    "PM-12": (
        "pattern/test_match.py::TestTable::test_from_last_to_first_and_in_order",
        "pattern/test_match.py::TestTable::test_stops_when_the_node_is_gone",
        "pattern/test_match.py::TestTable::test_other_nodes_are_not_looked_at",
    ),
    "PM-13": ("pattern/test_match.py::TestBarriers",),
    "PM-14": (
        "pattern/test_traced.py::TestAfterAutograd::test_results_by_index",
        "pattern/test_traced.py::TestAfterAutograd::test_provenance_moves",
        "pattern/test_traced.py::TestAfterAutograd::test_an_input_that_stands_too_late",
        "pattern/test_traced.py::TestAfterAutograd::test_what_a_replacement_refers_to_gets_names_of_its_own",
        "pattern/test_traced.py::TestAfterAutograd::test_a_result_that_is_none",
        "pattern/test_traced.py::TestAfterAutograd::test_what_the_replacement_computes_for_nobody_is_left_out",
    ),
    "PM-15": (
        "pattern/test_traced.py::TestAfterAutograd::test_nested_arguments_of_a_replacement",
        "pattern/test_traced.py::TestAfterAutograd::test_arguments_of_a_replacement_that_are_numbers_of_the_graph",
        "pattern/test_traced.py::TestAfterAutograd::test_a_replacement_that_writes",
        "pattern/test_traced.py::TestAfterAutograd::test_a_replacement_that_does_not_fit_says_why_and_changes_nothing",
    ),
    "PM-16": (
        "pattern/test_match.py::TestTable::test_says_why_not",
        "pattern/test_match.py::TestTable::test_says_why_not_in_the_log",
        "pattern/test_match.py::TestTable::test_the_environment_says_where",
        "pattern/test_match.py::TestTable::test_nothing_is_written_unless_somebody_asks",
        "pattern/test_match.py::TestTable::test_other_nodes_are_not_looked_at",
    ),
    "PM-17": (
        "pre_grad/test_arguments.py",
        "pattern/test_match.py::TestTable::test_an_option_is_asked_for_by_name",
        "pattern/test_traced.py::TestRegister::test_only_with_an_option",
        "pattern/test_traced.py::TestLazy::test_methods_of_objects",
        "pattern/test_traced.py::TestAfterAutograd::test_nested_arguments_of_a_replacement",
        "pattern/test_match.py::TestBarriers",
        "unit/test_graph.py::test_a_copy_has_graphs_of_its_own_and_shares_what_they_hold",
    ),
    # Values, order, observation.
    "MD-1": (
        "unit/test_graph.py::test_refresh_recomputes_what_an_edit_made_stale",
        "unit/test_graph.py::test_refresh_of_one_edit_in_a_long_chain_stops_where_nothing_changes",
        "unit/test_graph.py::test_refresh_of_what_was_changed_back_reaches_its_users",
        "unit/test_graph.py::test_refresh_of_what_stands_elsewhere_reaches_its_views",
        "unit/test_graph.py::test_refresh_of_new_memory_that_no_view_shows_stops",
        "unit/test_graph.py::test_refresh_after_an_edit_inside_a_branch_reaches_those_who_read_the_branch",
        "unit/test_graph.py::test_refresh_hands_strides_into_branches",
        "unit/test_graph.py::test_refresh_hands_the_strides_of_rows_into_what_runs_for_each",
        "unit/test_graph.py::test_refresh_refuses_other_sizes_for_a_branch",
        "unit/test_graph.py::test_refresh_keeps_the_symbols_of_sizes_that_only_running_tells",
        "pattern/test_lowering.py::test_values_are_told_by_the_calls_and_never_by_the_function",
    ),
    "MD-2": ("pre_grad/test_driver.py::TestSort",),
    "MD-3": ("unit/test_passes.py", "pre_grad/test_driver.py::TestStage"),
    "MD-4": ("unit/test_size_values.py",),
}


@cache
def names_in(file: str) -> frozenset[str]:
    """The tests of a file, each with the class around it: read, not run."""
    found = set()
    for outer in ast.parse((TESTS / file).read_text()).body:
        inner = outer.body if isinstance(outer, ast.ClassDef) else [outer]
        prefix = f"{outer.name}::" if isinstance(outer, ast.ClassDef) else ""
        found |= {
            prefix + each.name for each in inner if isinstance(each, ast.FunctionDef) and each.name[:5] == "test_"
        }
    return frozenset(found)


def proved_by(proof: str) -> list[str]:
    """The tests that a proof names; none if it names what is not there."""
    file, _, name = proof.partition("::")
    if not (TESTS / file).is_file():
        return []
    return [test for test in names_in(file) if name in ("", test) or test.startswith(f"{name}::")]


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_has_a_test(entry: str) -> None:
    assert PROOFS.get(entry)


def test_no_entry_is_made_up() -> None:
    assert set(PROOFS) == set(ENTRIES)


@pytest.mark.parametrize("proof", sorted({proof for proofs in PROOFS.values() for proof in proofs}))
def test_every_test_that_is_named_exists(proof: str) -> None:
    assert proved_by(proof)


@pytest.mark.parametrize(
    "proof", ["pre_grad/test_gone.py", "unit/test_graph.py::test_gone", "unit/test_graph.py::test_re"]
)
def test_a_name_without_a_test_is_seen(proof: str) -> None:
    assert not proved_by(proof)
