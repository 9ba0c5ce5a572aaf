# SPDX-License-Identifier: Apache-2.0
"""Changes of a call: its rows on the host, streams, saved runs, many prompts, and files."""

from __future__ import annotations

from tools.mutate.change import Change

OF_RUNS = (
    Change(
        "streamer_given_a_token_twice",
        "A streamer gets the first token of each chunk two times.",
        "tsjax/host/generation.py",
        "for token in news.tokens[0]:",
        "for token in [*news.tokens[0][:1], *news.tokens[0]]:",
        ("tests/test_generation.py::test_a_streamer_gets_the_prompt_and_then_every_token",),
    ),
    Change(
        "stop_string_cut_a_token_early",
        "A row loses the token that completes its stop string.",
        "tsjax/host/stop_strings.py",
        "return index + 1",
        "return index",
        (
            "tests/test_generation.py"
            "::test_the_first_token_that_completes_a_stop_string_is_the_last",
        ),
    ),
    Change(
        "stop_string_in_one_token_alone",
        "A stop string is not found where it began in a token before.",
        "tsjax/host/stop_strings.py",
        "self.tail = self._tail(text)",
        'self.tail = ""',
        ("tests/test_generation.py::test_stop_strings",),
    ),
    Change(
        "repeats_of_a_prompt_are_all_alike",
        "Rows with one prompt and one seed get the same text.",
        "tsjax/host",
        "return [rows[:index].count(row) for index, row in enumerate(rows)]",
        "return [0 for _ in rows]",
        ("tests/test_answers.py::test_each_answer_is_that_of_a_repeated_prompt",),
    ),
    Change(
        "resume_with_another_seed",
        "A run may be resumed with a seed that is not its own.",
        "tsjax/host",
        'if config is not None or set(settings) - {"max_new_tokens"}:',
        'if config is not None or set(settings) - {"max_new_tokens", "seed"}:',
        ("tests/test_bad_input.py::test_resuming_with_other_settings",),
    ),
    Change(
        "resume_with_other_weights",
        "A run may be resumed with a model whose weights differ.",
        "tsjax/host",
        "same = run.fingerprint == model_fingerprint(model)",
        "same = True",
        ("tests/test_bad_input.py::test_resuming_with_another_model",),
    ),
    Change(
        "interrupted_row_saved_as_ended",
        "A file says of rows that were interrupted that they have ended.",
        "tsjax/host/saving.py",
        'finish_reason=[None if r == "interrupted" else r for r in news.reasons]',
        "finish_reason=list(news.reasons)",
        ("tests/test_interrupt.py::test_an_interrupted_run_goes_on_with_the_same_tokens",),
    ),
    Change(
        "counters_of_the_method_before_lost",
        "When a run goes on with another method, its counters begin again.",
        "tsjax/host/run.py",
        "counts = _on_host(state.stats) if earlier is None else _sum(earlier, state.stats)",
        "counts = _on_host(state.stats)",
        ("tests/test_own_method.py::test_a_method_may_go_on_as_another",),
    ),
    Change(
        "lesson_lost_in_plain_steps",
        "What a method has learned is gone after plain steps in between.",
        "tsjax/host/run.py",
        "lesson = lesson if learned is None else learned",
        "lesson = learned",
        ("tests/test_own_method.py::test_a_method_gets_its_lesson_back_after_plain_decoding",),
    ),
    Change(
        "refilled_row_keeps_its_memory",
        "When generate_many fills a row again, the method remembers the text before.",
        "tsjax/host/run.py",
        "            state, filled = rows.refill(rows.stop(state), interrupt)\n"
        "        if other == decode and not filled:\n",
        "            state, filled = rows.refill(rows.stop(state), interrupt)\n"
        "            state = state.replace(memory=memory)\n"
        "        if other == decode:\n",
        ("tests/test_many.py::test_the_batch_stays_full_and_its_method_knows_who_is_in_it",),
    ),
    Change(
        "prefix_one_token_too_long",
        "Of a prefix one token more is taken than a prompt shares with it.",
        "tsjax/host/prefix.py",
        "shared = int(different[0]) if len(different) else most",
        "shared = int(different[0]) + 1 if len(different) else most",
        ("tests/test_answers.py::test_prompts_that_part_from_a_prefix_are_read_from_there",),
    ),
    Change(
        "file_of_a_prefix_of_other_weights",
        "A file of a prefix is taken whatever weights have read it.",
        "tsjax/host/prefix_files.py",
        'if read_by["fingerprint"] != model_fingerprint(model):',
        'if not read_by["fingerprint"]:',
        ("tests/test_prefix_files.py::test_a_file_of_another_model_is_refused[weights]",),
    ),
    Change(
        "file_of_a_prefix_not_dealt_out",
        "Rows of a prefix from a file lie in runs on a mesh that deals them out one by one.",
        "tsjax/host/prefix_files.py",
        "np.moveaxis(found.reshape(heads, -1, parts, width), 2, 0)",
        "np.moveaxis(found.reshape(heads, parts, -1, width), 1, 0)",
        ("tests/test_prefix_files.py::test_a_mesh_reads_and_writes_the_same_file[(2, 2)]",),
    ),
    Change(
        "stale_int8_copy",
        "A model that gets other weights drafts with the int8 copy of the old ones.",
        "tsjax/files/model_in_memory.py",
        "        return self.replace(params=jax.tree.map(_where, self.params, params))\n",
        "        found = self.replace(params=jax.tree.map(_where, self.params, params))\n"
        '        if "_with_int8" in vars(self):\n'
        "            copy = found.params.replace(drafts=self._with_int8.drafts)\n"
        '            vars(found)["_with_int8"] = copy\n'
        "        return found\n",
        ("tests/test_int8.py::test_other_weights_have_a_copy_of_their_own",),
    ),
    Change(
        "type_of_a_checkpoint_ignored",
        "A HuggingFace checkpoint is loaded as float32, whatever it says.",
        "tsjax/files",
        'dtype = dtype or raw.get("dtype") or raw.get("torch_dtype")',
        'dtype = dtype or "float32"',
        ("tests/test_checkpoint.py::test_types_are_converted_as_numpy_does[bfloat16-bfloat16]",),
    ),
    Change(
        "rollout_masks_the_prompt",
        "The mask of a rollout has the prompt's tokens, too.",
        "tsjax/host/rollouts.py",
        "tokens[row, begin:end], mask[row, begin:end] = prompt, new, True",
        "tokens[row, begin:end], mask[row, :end] = prompt, new, True",
        ("tests/test_rollouts.py::test_arrays_are_what_generate_says",),
    ),
)
