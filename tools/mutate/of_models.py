# SPDX-License-Identifier: Apache-2.0
"""Changes of the model, its caches and their parts, and of the lazy prefill."""

from __future__ import annotations

from tools.mutate.change import Change

OF_MODELS = (
    Change(
        "tied_embedding_ignored",
        "A model that shares its embedding is declared with an unembedding of its own.",
        "tsjax/model/transformer.py",
        "unembed=None if tied else unembed,",
        "unembed=unembed,",
        ("tests/test_checkpoint.py::test_every_tensor_arrives_bit_by_bit[qwen2-1-changes3]",),
    ),
    Change(
        "rows_of_a_narrow_cache_rounded_late",
        "Keys and values are rounded in the cache alone: the rows of a pass see wider ones.",
        "tsjax/model/transformer.py",
        "k, v = rounded_rows(jnp.stack([k, v]))",
        "k, v = k, v",
        (
            "tests/test_narrow_cache.py::test_the_cache_of_a_prefilled_text_is_that_of_its_rounded_rows",
        ),
    ),
    Change(
        "yarn_factor_dropped",
        "YaRN interpolates no frequency.",
        "tsjax/model/layers.py",
        "return frequencies / rope.factor * ramp + frequencies * (1 - ramp)",
        "return frequencies * ramp + frequencies * (1 - ramp)",
        ("tests/test_goldens.py::test_model",),
    ),
    Change(
        "attention_factor_dropped",
        "YaRN's attention factor scales nothing.",
        "tsjax/model/layers.py",
        "scale = rope.attention_factor\n",
        "scale = 1.0\n",
        ("tests/test_goldens.py::test_model",),
    ),
    Change(
        "importance_of_one_query_head",
        "A kv head's importance is that of its first query head, not of all of its group.",
        "tsjax/model/passes.py",
        "queries.append(jnp.sum(grouped, axis=3))",
        "queries.append(grouped[:, :, :, 0])",
        ("tests/test_acceptance.py::test_importance_is_that_of_all_query_heads_of_a_group",),
    ),
    Change(
        "rest_left_out",
        "No pass sees the tokens that are summed up beside its cache.",
        "tsjax/model/passes.py",
        "rest=rest[layer] if rest else None",
        "rest=None",
        (
            "tests/test_drafts.py"
            "::test_drafts_that_see_the_rest_see_everything_where_all_tokens_count_alike",
        ),
    ),
    Change(
        "heads_not_chained",
        "Each of TokenSwift's heads begins with the model's own state.",
        "tsjax/model/heads.py",
        "hidden, state = add_rms_norm(hidden, deeper, head.norm_out, cfg.norm_eps)",
        "_, state = add_rms_norm(hidden, deeper, head.norm_out, cfg.norm_eps)",
        ("tests/test_drafts.py::test_perfect_heads_are_accepted_in_full",),
    ),
    Change(
        "int8_scales_halved",
        "What one step of an int8 value is worth is half of what it should be.",
        "tsjax/model/int8.py",
        "return Int8Matrix(values, jnp.squeeze(scales, axes))",
        "return Int8Matrix(values, jnp.squeeze(scales, axes) / 2)",
        ("tests/test_int8.py::test_each_output_has_its_scale",),
    ),
    Change(
        "pieces_of_a_narrow_parameter_swapped",
        "Where parts of a parameter have several formats, the second tensor goes into the first.",
        "tsjax/files/tensor_names.py",
        'path, start = f"{entry.path}.{number}" if some[1:] else entry.path, stop',
        'path, start = f"{entry.path}.{number}" if some[1:] else entry.path, start',
        ("tests/test_narrow_weights.py::test_stored_blocks_keep_their_numbers[mixed]",),
    ),
    Change(
        "rows_of_heads_stay_in_pairs",
        "Stored blocks of Llama's queries and keys keep the order that the file has.",
        "tsjax/files/gguf_numbers.py",
        "return {part: wanted(array, start, stop) for part, array in found.items()}",
        "return {part: array[: stop - start] for part, array in found.items()}",
        ("tests/test_narrow_weights.py::test_stored_blocks_keep_their_numbers[mixed]",),
    ),
    Change(
        "a_narrow_model_gets_an_int8_copy",
        "Drafts in int8 round a model that is narrow already.",
        "tsjax/files/checkpoint.py",
        "missing = self.params.drafts is None and not self.cfg.is_narrow",
        "missing = self.params.drafts is None",
        ("tests/test_narrow_weights.py::test_methods_say_what_plain_decoding_says[int8-float32]",),
    ),
    Change(
        "narrow_bytes_not_counted",
        "The formula of costs takes narrow weights for wide ones.",
        "tsjax/methods/devices.py",
        "return _size(model) if name == WIDE else FORMATS[name].bits_of_weight / 8",
        "return _size(model)",
        ("tests/test_narrow_weights.py::test_costs_count_what_a_pass_reads[int8]",),
    ),
    # --- parts of a cache, on a mesh -------------------------------------------------------------
    Change(
        "wrong_slot_on_a_mesh",
        "A part of a cache that is dealt out gets its row one slot early.",
        "tsjax/model/parts.py",
        "slots = lax.div(start[None] + first, jnp.int32(parts)).reshape(-1)",
        "slots = lax.div(start[None] + 0 * first, jnp.int32(parts)).reshape(-1)",
        ("tests/test_parts.py::test_rows_are_written_where_they_belong",),
    ),
    Change(
        "parts_count_their_tokens_wrongly",
        "The last part, not the first, has the token that does not go round.",
        "tsjax/model/parts.py",
        "after = parts - 1 - jnp.arange(parts, dtype=jnp.int32)",
        "after = jnp.arange(parts, dtype=jnp.int32)",
        ("tests/test_parts.py::test_counts_positions_and_order",),
    ),
    Change(
        "fresh_rows_seen_by_each_part",
        "Every part of a cache sees the rows of a pass, not the first alone.",
        "tsjax/model/parts.py",
        "parts) & first[:, None, None]\n",
        "parts) & (first | True)[:, None, None]\n",
        ("tests/test_parts.py::test_attention_is_that_of_the_whole_cache",),
    ),
    # --- the lazy prefill ------------------------------------------------------------------------
    Change(
        "lazy_prefill_forgets_positions",
        "Tokens of a stage are rotated by their order in a pass, not by their positions.",
        "tsjax/lazy/stages.py",
        "weights, state.kv, hidden, safe, causal, plan.stages[stage]",
        "weights, state.kv, hidden, 0 * safe + index, causal, plan.stages[stage]",
        ("tests/test_pruning.py::test_sets_and_logits_are_those_of_the_oracle",),
    ),
    Change(
        "revival_brings_nothing",
        "Where prompt tokens are to come back in batches, none does.",
        "tsjax/lazy/revival.py",
        "wanted = best_tokens(scores, lacking, jnp.full_like(n, lazy.revive_rows))",
        "wanted = best_tokens(scores, lacking, jnp.zeros_like(n))",
        ("tests/test_pruning.py::test_sets_and_logits_are_those_of_the_oracle",),
    ),
    Change(
        "sinks_may_be_pruned",
        "A lazy prefill chooses without keeping the first and the last tokens of a prompt.",
        "tsjax/lazy/choice.py",
        "best = best_tokens(jnp.where(always, jnp.inf, scores), candidates, count)",
        "best = best_tokens(scores, candidates, count)",
        ("tests/test_pruning.py::test_sets_and_logits_are_those_of_the_oracle",),
    ),
)
