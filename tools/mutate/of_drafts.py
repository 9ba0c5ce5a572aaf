# SPDX-License-Identifier: Apache-2.0
"""Changes of what drafts: none of them changes a token, so only what is accepted shows them."""

from __future__ import annotations

from tools.mutate.change import Change

OF_DRAFTS = (
    # --- the partial cache -----------------------------------------------------------------------
    Change(
        "draft_cache_slides_a_slot_off",
        "A draft cache gets the row before each new one.",
        "tsjax/methods/partial_cache.py",
        "return Slide(to, committed - count, count, newest_first)",
        "return Slide(to, jnp.maximum(committed - count - 1, 0), count, newest_first)",
        ("tests/test_draft_cache.py::test_one_token_to_several_per_step",),
    ),
    Change(
        "sinks_lost_on_choosing",
        "When a draft cache is chosen, the first tokens have to be important as well.",
        "tsjax/methods/partial_cache.py",
        'sizes = {"count": draft.capacity, "num_sinks": num_sinks}',
        'sizes = {"count": draft.capacity, "num_sinks": 0}',
        ("tests/test_draft_cache.py::test_choices_after_n_new_tokens",),
    ),
    Change(
        "draft_refresh_ignored",
        "A draft cache is chosen again when it must be, not after draft_refresh tokens.",
        "tsjax/methods/partial_cache.py",
        "lowest = num_sinks if most_new is None else max(num_sinks, draft.capacity - most_new)",
        "lowest = num_sinks",
        ("tests/test_acceptance.py::test_the_step_at_which_the_draft_cache_is_chosen_again",),
    ),
    Change(
        "rest_has_the_wrong_share",
        "The tokens beside a draft cache weigh as much as those in it.",
        "tsjax/methods/partial_cache.py",
        "share = 1 - share_here\n",
        "share = share_here\n",
        ("tests/test_draft_cache.py::test_the_rest_is_what_is_not_in_the_draft_cache",),
    ),
    Change(
        "newest_come_first_ignored",
        "A cache that is chosen once overwrites its newest tokens first.",
        "tsjax/methods/partial_cache.py",
        "newest_first = ~has_all if once else None",
        "newest_first = None",
        ("tests/test_draft_cache.py::test_refreshes_of_one_kind",),
    ),
    Change(
        "chunks_scored_by_their_sum",
        "Retrieval scores a chunk by the sum of its keys, so a last short one is worth less.",
        "tsjax/methods/draft_choice.py",
        "means = sums(jnp.where(exists, scores, 0)) / jnp.maximum(count, 1)",
        "means = sums(jnp.where(exists, scores, 0))",
        ("tests/test_draft_choice.py::test_scores",),
    ),
    # --- the text --------------------------------------------------------------------------------
    Change(
        "ngram_delay_ignored",
        "N-grams are remembered at once, also those that a penalty still acts on.",
        "tsjax/methods/ngram.py",
        "jnp.where(state.running, state.length - delay, 0)",
        "jnp.where(state.running, state.length, 0)",
        ("tests/test_acceptance.py::test_the_step_at_which_an_ngram_first_counts",),
    ),
    Change(
        "suffix_match_off_by_one",
        "A match has to be one token longer than suffix_match to be drafted from.",
        "tsjax/methods/ngram.py",
        "count = jnp.where(matched >= self.suffix_match, count, 0)",
        "count = jnp.where(matched > self.suffix_match, count, 0)",
        ("tests/test_drafts.py::test_how_long_a_match_counts_and_when_it_is_drafted_alone",),
    ),
    Change(
        "what_followed_begins_early",
        "What followed a match begins with the match's own last token.",
        "tsjax/methods/history.py",
        "source = jnp.clip(places[..., None] + 1 + offset, 0, tokens.shape[1] - 1)",
        "source = jnp.clip(places[..., None] + offset, 0, tokens.shape[1] - 1)",
        ("tests/test_ngram.py::test_longest_suffix",),
    ),
    Change(
        "rarest_ngram_first",
        "Of the n-grams that begin with a token the rarest is drafted first.",
        "tsjax/methods/history.py",
        "for f in (jnp.greater, jnp.equal))",
        "for f in (jnp.less, jnp.equal))",
        ("tests/test_ngram.py::test_table",),
    ),
    Change(
        "corpus_read_across_its_ends",
        "Drafts from earlier texts go on from the end of one into the next.",
        "tsjax/methods/corpus.py",
        "here = jnp.cumprod((tokens != END).astype(jnp.int32), axis=2)",
        "here = jnp.ones_like(tokens)",
        ("tests/test_draft_corpus.py::test_places_are_those_of_a_search",),
    ),
    # --- rates and prices ------------------------------------------------------------------------
    Change(
        "rates_never_learned",
        "How often drafts of a kind were right in this run counts for nothing.",
        "tsjax/methods/rates.py",
        "return Rates(tried=(rates.tried + new) * keep, right=(rates.right + hits) * keep)",
        "return rates",
        ("tests/test_likely_tree.py::test_rates_follow_what_was_right",),
    ),
    Change(
        "width_ignores_the_price",
        "A likely tree is as wide as it can be, whatever rows cost.",
        "tsjax/methods",
        "saves = pace * found[jnp.asarray(widths) - 1] - prices.rows",
        "saves = pace * found[jnp.asarray(widths) - 1]",
        ("tests/test_likely_tree.py::test_the_width_follows_the_price",),
    ),
    Change(
        "likely_tree_forgets_at_once",
        "The rates that a method has learned are not handed on to the next one.",
        "tsjax/methods",
        "return memory.replace(rates=lesson.rates, layer=layer)",
        "return memory.replace(layer=layer)",
        ("tests/test_likely_tree.py::test_rates_outlive_a_change_of_method",),
    ),
    Change(
        "a_correction_learns_all_at_once",
        "What rows of a step miss is learned as if none were before it.",
        "tsjax/methods",
        'missing = jnp.einsum("bjk,bko->bjo", _solving(alike), missing)',
        "missing = missing * 1.0",
        ("tests/test_one_layer.py::test_a_correction_learns_as_row_by_row",),
    ),
    # --- passes, heads and second models ---------------------------------------------------------
    Change(
        "heads_read_the_wrong_node",
        "What a step's last token left for the next drafts is the root's.",
        "tsjax/methods/model_drafts.py",
        "last = acceptance.path[b, jnp.maximum(state.emitted - 1, 0)]",
        "last = acceptance.path[b, 0]",
        ("tests/test_medusa.py::test_perfect_heads_are_accepted_in_full",),
    ),
    Change(
        "drafts_ranked_without_their_depth",
        "Candidates of every depth are ranked with the noise of the first.",
        "tsjax/methods/model_drafts.py",
        "depths = jnp.full((best.shape[0], 1), depth, jnp.int32)",
        "depths = jnp.full((best.shape[0], 1), 0, jnp.int32)",
        ("tests/test_medusa.py::test_drafts_are_ranked_with_the_noise_of_their_positions",),
    ),
    Change(
        "drafts_that_are_removed_are_drafted",
        "Tokens that truncation has removed are drafted as well.",
        "tsjax/methods/model_drafts.py",
        "return self.scores > -jnp.inf",
        "return self.scores >= -jnp.inf",
        ("tests/test_acceptance.py::test_what_truncation_has_removed_is_not_drafted",),
    ),
    Change(
        "second_model_keeps_what_was_wrong",
        "A second model goes on from guesses that were rejected.",
        "tsjax/methods/second_model.py",
        "length = reader.kv.length - jnp.maximum(reader.read - upto, 0)",
        "length = reader.kv.length",
        (
            "tests/test_second_model.py::test_guesses_are_those_of_a_model_that_reads_what_the_rule_says",
        ),
    ),
    Change(
        "triforce_judges_the_wrong_depth",
        "TriForce's middle level judges all that it is offered with the noise of one position.",
        "tsjax/methods/triforce.py",
        "target = next_tokens(weights, state, rows.hidden, depths, guesses, noise, cfg=model)",
        "target = next_tokens(weights, state, rows.hidden, depths * 0, guesses, noise, cfg=model)",
        (
            "tests/test_method_contract.py::test_the_tokens_and_log_probabilities_are_those_of_plain_decoding[triforce]",
        ),
    ),
)
