# SPDX-License-Identifier: Apache-2.0
"""Changes of decoding: trees, the judge, what a step commits, and how logits become tokens."""

from __future__ import annotations

from tools.mutate.change import Change

OF_STEPS = (
    # --- trees and their judge -------------------------------------------------------------------
    Change(
        "accept_a_node_too_many",
        "The walk goes on to one node that its parent's target is not.",
        "tsjax/decoding/verification.py",
        "walked = jnp.all(chosen[:, None, :] | ~tree.mask, axis=2)",
        "walked = jnp.sum(~chosen[:, None, :] & tree.mask, axis=2) <= 1",
        ("tests/test_verification.py::test_the_walk_is_a_walk",),
    ),
    Change(
        "second_child_forgotten",
        "A tree of merged paths keeps the first of them alone.",
        "tsjax/decoding/tree.py",
        "    first = first_with(shared(paths, lengths), J)\n",
        "    first = first_with(shared(paths, lengths), J)\n    present &= first == 0\n",
        ("tests/test_tree.py::test_merge_paths",),
    ),
    Change(
        "node_sees_its_sibling",
        "In the pass over a tree each node sees all nodes before it.",
        "tsjax/decoding/verification.py",
        "        tree.mask,\n        cfg=cfg.model,\n",
        "        jnp.tril(jnp.ones(tree.mask.shape[1:], bool)),\n        cfg=cfg.model,\n",
        (
            "tests/test_verification.py"
            "::test_a_nodes_target_is_what_plain_decoding_says_after_its_text",
        ),
    ),
    Change(
        "tree_nodes_one_position_off",
        "Drafted nodes are rotated as if they stood one position later.",
        "tsjax/decoding/verification.py",
        "positions = state.kv.length[:, None] + tree.depths",
        "positions = state.kv.length[:, None] + tree.depths + (tree.depths > 0)",
        (
            "tests/test_verification.py"
            "::test_a_nodes_target_is_what_plain_decoding_says_after_its_text",
        ),
    ),
    Change(
        "noise_of_the_root_for_all",
        "Every node of a tree is judged with the noise of the root's successor.",
        "tsjax/decoding/sampling.py",
        "return logits + jnp.take_along_axis(noise, depths[..., None], axis=1)",
        "return logits + noise[:, :1]",
        ("tests/test_verification.py::test_a_nodes_scores_are_those_of_its_text_alone",),
    ),
    Change(
        "deep_noise_shifted",
        "Noise that no draft had is that of one position later.",
        "tsjax/decoding/verification.py",
        "first, size = state.length + known, cfg.model.vocab_size",
        "first, size = state.length + known + (known > 0), cfg.model.vocab_size",
        (
            "tests/test_method_contract.py::test_the_tokens_and_log_probabilities_are_those_of_plain_decoding[tokenswift]",
        ),
    ),
    # --- what a step commits ---------------------------------------------------------------------
    Change(
        "learn_skipped",
        "A method's memory does not learn what a step has found.",
        "tsjax/decoding/step.py",
        "memory=method.learn(model, params, memory, after, verdict, acceptance)",
        "memory=memory",
        ("tests/test_acceptance.py::test_the_step_at_which_the_draft_cache_is_chosen_again",),
    ),
    Change(
        "rows_of_rejected_nodes_committed",
        "The cache gets the rows of the tree's first nodes in place of the accepted ones.",
        "tsjax/decoding/step.py",
        "k, v = (tuple(map(on_path, rows)) for rows in (verdict.rows.k, verdict.rows.v))",
        "k, v = (tuple(x[:, :steps] for x in rows) for rows in (verdict.rows.k, verdict.rows.v))",
        ("tests/test_verification.py::test_steps_leave_the_state_of_a_prefill_of_the_same_text",),
    ),
    Change(
        "stop_token_inside_a_path_ignored",
        "Only the last token of a step can end a row.",
        "tsjax/decoding/step.py",
        "found = index <= acceptance.count[:, None]",
        "found = index == acceptance.count[:, None]",
        ("tests/test_any_tree.py::test_a_stop_token_inside_an_accepted_path_is_the_last[3]",),
    ),
    Change(
        "finished_row_goes_on",
        "A row that has ended still gets tokens.",
        "tsjax/decoding/step.py",
        "jnp.where(running, jnp.minimum(count, room), 0)",
        "jnp.minimum(count, room)",
        ("tests/test_decoding.py::test_rows_end_on_their_own_and_then_do_not_change",),
    ),
    Change(
        "room_ignored",
        "A step finds more tokens than the state has room for, past a choice that is due.",
        "tsjax/decoding/step.py",
        "room = jnp.minimum(state.room, state.max_length - length)",
        "room = state.max_length - length",
        ("tests/test_pruning.py::test_drafts_change_no_token",),
    ),
    Change(
        "accepted_drafts_not_seen",
        "Of a step's tokens the repetition penalty remembers the last one alone.",
        "tsjax/decoding/step.py",
        "seen_at = jnp.where(kept, positions, NEVER_SEEN)",
        "seen_at = jnp.where(kept & (index == count[:, None] - 1), positions, NEVER_SEEN)",
        ("tests/test_verification.py::test_steps_leave_the_state_of_a_prefill_of_the_same_text",),
    ),
    Change(
        "counts_twice",
        "Each token counts double for the presence and frequency penalties.",
        "tsjax/decoding/step.py",
        "counts = counts.at[b[:, None], emitted].add(kept.astype(jnp.int32))",
        "counts = counts.at[b[:, None], emitted].add(2 * kept.astype(jnp.int32))",
        (
            "tests/test_hooks.py::test_counts_go_on_where_a_run_is_resumed",
            "tests/test_hooks.py::test_drafts_change_no_token[presence-greedy]",
        ),
    ),
    Change(
        "log_probs_of_the_wrong_node",
        "Log-probabilities are those of the tree's first nodes, not of the accepted ones.",
        "tsjax/decoding/step.py",
        'return buffer.at[b[:, None], slots].set(on_path(of_nodes), mode="drop")',
        'return buffer.at[b[:, None], slots].set(of_nodes[:, :steps], mode="drop")',
        ("tests/test_logprobs.py::test_drafts_change_none",),
    ),
    Change(
        "sources_one_token_off",
        "The source of a drafted token is told of the token before it.",
        "tsjax/decoding/step.py",
        "following = jnp.pad(of_node[:, 1:], ((0, 0), (0, 1)))",
        "following = jnp.pad(of_node[:, 2:], ((0, 0), (0, 2)))[:, : of_node.shape[1]]",
        ("tests/test_simulating.py::test_the_text_is_what_was_drafted",),
    ),
    # --- penalties and processors ----------------------------------------------------------------
    Change(
        "penalty_window_a_row_short",
        "The window of the repetition penalty has lost its oldest token.",
        "tsjax/decoding/processors.py",
        "oldest = positions - window  # [B, T]",
        "oldest = positions - window + 1",
        ("tests/test_sampling.py::test_repetition_window",),
    ),
    Change(
        "drafted_tokens_not_penalised",
        "The repetition penalty does not see drafted tokens before a node.",
        "tsjax/decoding/processors.py",
        "recent = recent.at[(*_rows(logits), tokens)].max(at >= oldest[:, :, None])",
        "recent = recent.at[(*_rows(logits), tokens)].max(at >= 2**30)",
        ("tests/test_verification.py::test_the_window_slides_with_the_depth",),
    ),
    Change(
        "drafted_ngrams_not_barred",
        "no_repeat_ngram_size does not know n-grams that end with a drafted token.",
        "tsjax/decoding/processors.py",
        "    return _bar(logits, tail[:, :, before:], same)\n",
        "    return logits\n",
        ("tests/test_hooks.py::test_drafts_change_no_token[ngrams-greedy]",),
    ),
    Change(
        "processor_before_the_penalties",
        "A user's processor sees logits that are not penalised yet.",
        "tsjax/decoding/sampling.py",
        "    if values.repetition is not None:\n        penalty, window = values.repetition\n",
        "    for processor in values.processors:\n"
        "        logits = apply(processor, logits, text, ancestors)\n"
        "    values = values.replace(processors=())\n"
        "    if values.repetition is not None:\n        penalty, window = values.repetition\n",
        ("tests/test_hooks.py::test_processors_come_after_the_penalties",),
    ),
    Change(
        "min_new_tokens_one_too_many",
        "Stop tokens are barred for one token longer than was asked for.",
        "tsjax/decoding/sampling.py",
        "too_early = positions - text.prompt_length[:, None] < values.min_new_tokens",
        "too_early = positions - text.prompt_length[:, None] <= values.min_new_tokens",
        ("tests/test_sampling.py::test_min_new_tokens_bars_only_the_stop_tokens",),
    ),
    Change(
        "top_k_keeps_one_more",
        "top_k leaves k + 1 tokens.",
        "tsjax/decoding/sampling.py",
        "k = values.top_k if keep is None else jnp.maximum(values.top_k, keep)",
        "k = values.top_k + 1 if keep is None else jnp.maximum(values.top_k, keep)",
        ("tests/test_sampling.py::test_one_warper",),
    ),
    Change(
        "processed_log_probs_before_temperature",
        "Processed log-probabilities are those at temperature 1.",
        "tsjax/decoding/verification.py",
        "return NodeScores(logits, processed, scores)",
        "return NodeScores(logits, processed * state.sampling.temperature, scores)",
        ("tests/test_logprobs.py::test_they_are_those_of_float64[sampled]",),
    ),
    # --- noise -----------------------------------------------------------------------------------
    Change(
        "noise_shifted_by_one",
        "Every token is drawn with the noise of the next position.",
        "tsjax/decoding/sampling.py",
        "positions = first[:, None] + jnp.arange(count, dtype=jnp.int32)[None]",
        "positions = first[:, None] + jnp.arange(1, count + 1, dtype=jnp.int32)[None]",
        ("tests/test_blocks.py::test_sample_says_what_generate_says",),
    ),
    Change(
        "rows_share_one_key",
        "All rows of a batch are drawn with the noise of the first.",
        "tsjax/decoding/noise.py",
        "keys, positions = jax.random.key_data(row_key), positions.astype(jnp.uint32)",
        "keys, positions = jax.random.key_data(row_key), positions.astype(jnp.uint32)\n"
        "    keys = jnp.broadcast_to(keys[:1], keys.shape)",
        ("tests/test_choice.py::test_noise_depends_on_row_key_and_position_only",),
    ),
    # --- what a state begins with ----------------------------------------------------------------
    Change(
        "resumed_counts_lost",
        "A resumed run has forgotten how often it said each token.",
        "tsjax/decoding/start.py",
        "counts=first_counts(tokens, prompt_length, length, vocab)",
        "counts=first_counts(tokens, length, length, vocab)",
        ("tests/test_hooks.py::test_counts_go_on_where_a_run_is_resumed",),
    ),
    Change(
        "refilled_row_penalises_the_old_text",
        "A row that is filled again is still penalised by the text it had before.",
        "tsjax/decoding/start.py",
        'names = "tokens sources prompt_length max_length last_seen counts logprobs finish"',
        'names = "tokens sources prompt_length max_length counts logprobs finish"',
        ("tests/test_many.py::test_each_answer_is_that_of_its_prompt_alone[plain]",),
    ),
    Change(
        "answers_share_the_first_cache",
        "Rows whose prompts were read once all get the cache of the first prompt.",
        "tsjax/decoding/start.py",
        "known = jnp.take(by_text(known, cache.parts), of_rows, axis=1)",
        "known = jnp.take(by_text(known, cache.parts), of_rows * 0, axis=1)",
        ("tests/test_answers.py::test_answers_to_several_prompts_with_seeds_of_their_own",),
    ),
)
