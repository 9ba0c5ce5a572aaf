#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What `tsjax bench` measures of the embedded model and of real ones in GGUF files, those in MODELS:
# bash benchmarks/series.sh, or single lines of it.
# Each command writes its file after every cell, and goes on where it was when it is given again.
set -euo pipefail
OUT="${OUT:-results}" TEXT="${TEXT:-corpus/dracula.txt}" BOOKS="${BOOKS:-corpus}" MODELS="${MODELS:-models}"
mkdir -p "$OUT"

# Do drafts pay, by context: fixed settings and Auto, beside torch and the bound.
tsjax bench tsjax/small-english --dtype float32 --text "$TEXT" --lengths 2048 8192 32768 --rounds 5 --out "$OUT/contexts.json" --methods plain auto tokenswift ngram likely_tree:width=8,places=8 likely_tree:width=8,places=8,draft_passes=4
# Along a run of 2,000 tokens.
tsjax bench tsjax/small-english --dtype float32 --text "$TEXT" --lengths 2048 8192 --new-tokens 2000 --no-peers --out "$OUT/2000.json" --methods plain auto
# 100K tokens by output position; methods with caches of their own, apart.
tsjax bench tsjax/small-english --lengths 4 --new-tokens 102400 --rounds 1 --warm-up 0 --exceed-max-positions --no-peers --out "$OUT/100k.json" --methods plain auto ngram tokenswift
tsjax bench tsjax/small-english --lengths 4 --new-tokens 102400 --rounds 1 --warm-up 0 --exceed-max-positions --no-peers --out "$OUT/100k-rivals.json" --methods plain magicdec magicdec:draft_choice=snapkv triforce triforce:draft_refresh=None

# A prompt from each book, for the next two.
python -c 'import json, pathlib, sys
for book in sorted(pathlib.Path(sys.argv[1]).glob("*.txt")):
    print(json.dumps({"prompt": book.read_text("utf-8")[20_000:20_600]}))' "$BOOKS" > "$OUT/books.jsonl"
# Tokens per step of every way to draft.
tsjax bench tsjax/small-english --dtype float32 --prompts "$OUT/books.jsonl" --new-tokens 384 --rounds 1 --warm-up 0 --no-peers --out "$OUT/drafters.json" --methods plain ngram:suffix_length=0 ngram:suffix_length=0,ngram_delay=0 ngram:num_ngrams=0 ngram "tokenswift:tree=(3,),draft_budget=64,num_sinks=4" "tokenswift:tree=(1,3,3,3),draft_passes=4,draft_budget=64,num_sinks=4" "tokenswift:tree=(1,3,3,3),draft_passes=4,draft_budget=64,num_sinks=4,draft_rest=True" "tokenswift:tree=(1,3,3,3),draft_passes=4,draft_budget=64,num_sinks=4,noise_coupled=False"
# Drafts with the model's own weights and with int8 ones, nothing from the text.
tsjax bench tsjax/small-english --dtype float32 --prompts "$OUT/books.jsonl" --new-tokens 384 --rounds 1 --warm-up 0 --no-peers --out "$OUT/draft-weights.json" --methods plain "tokenswift:tree=(1,),draft_budget=64,num_sinks=4,num_ngrams=0,suffix_length=0" "tokenswift:tree=(1,),draft_budget=64,num_sinks=4,num_ngrams=0,suffix_length=0,draft_weights=int8" "tokenswift:tree=(1,1,1,1),draft_passes=4,draft_budget=64,num_sinks=4,num_ngrams=0,suffix_length=0" "tokenswift:tree=(1,1,1,1),draft_passes=4,draft_budget=64,num_sinks=4,num_ngrams=0,suffix_length=0,draft_weights=int8"
# What the partial cache holds: when it is chosen again, and whether passes see the rest.
tsjax bench tsjax/small-english --dtype float32 --text "$TEXT" --lengths 8192 16384 --new-tokens 192 --rounds 1 --no-peers --out "$OUT/partial-cache.json" --methods plain "tokenswift:tree=(1,1,1,1),draft_passes=4,draft_budget=512,num_ngrams=0,suffix_length=0" "tokenswift:tree=(1,1,1,1),draft_passes=4,draft_budget=512,num_ngrams=0,suffix_length=0,draft_refresh=8" "tokenswift:tree=(1,1,1,1),draft_passes=4,draft_budget=512,num_ngrams=0,suffix_length=0,draft_refresh=8,draft_rest=True" "tokenswift:tree=(1,1,1,1),draft_passes=4,draft_budget=512,num_ngrams=0,suffix_length=0,draft_refresh=1" "tokenswift:tree=(1,1,1,1),draft_passes=4,draft_budget=512,num_ngrams=0,suffix_length=0,draft_refresh=1,draft_rest=True"

# Real models, in their chat templates: the half of the prompts that no setting was chosen by, beside torch; then by
# context; then 100K tokens by output position, with YaRN to four times the positions, as Qwen2.5's card says.
python -c 'import json
kinds = json.load(open("benchmarks/prompts.json"))["kinds"].values()
for one_of_each in zip(*(prompts[len(prompts) // 2 :] for prompts in kinds)):
    for prompt in one_of_each: print(json.dumps({"prompt": prompt}))' > "$OUT/chat.jsonl"
shopt -s nullglob
for model in "$MODELS"/*.gguf; do
name="$(basename "$model" .gguf)"
tsjax bench "$model" --dtype bfloat16 --prompts "$OUT/chat.jsonl" --chat --settings greedy chat --new-tokens 256 --out "$OUT/real-$name.json" --methods plain auto "likely_tree:width=6,places=8,pass_widths=(1,2,3,4)" "likely_tree:width=16,places=8,pass_widths=(1,2,4,8)" "likely_tree:width=6,places=8,pass_widths=(1,2,3,4),draft_passes=2,draft_weights=int8" ngram magicdec
tsjax bench "$model" --dtype bfloat16 --text "$TEXT" --lengths 1024 4096 --settings sampled --new-tokens 2000 --out "$OUT/lengths-$name.json" --methods plain auto "likely_tree:width=8,pass_widths=(1,2,4)" "likely_tree:width=8,draft_passes=2,draft_weights=int8" "tokenswift:num_ngrams=20,suffix_length=16,pass_widths=(),tree=(1,3,3,3)" magicdec
python -c 'import dataclasses, math, sys, tsjax
model = tsjax.load(sys.argv[1], dtype="bfloat16")
cfg, factor = model.cfg, 1.0 if model.cfg.max_positions > 100_000 else 4.0
scale = 0.1 * math.log(factor) + 1
rope = dataclasses.replace(cfg.rope, kind="yarn", factor=factor, original_max_positions=cfg.max_positions, attention_factor=scale)
stretched = dataclasses.replace(cfg, rope=rope, max_positions=int(factor * cfg.max_positions))
tsjax.save(model.replace(cfg=stretched), sys.argv[2], overwrite=True)' "$model" "$OUT/$name-yarn"
tsjax bench "$OUT/$name-yarn" --settings sampled --lengths 4 --new-tokens 100000 --exceed-max-positions --rounds 1 --warm-up 0 --no-peers --out "$OUT/100k-$name.json" --methods plain auto
done

# In batches of 8, a million tokens of each method: the same answers as plain decoding's, to the byte.
seq 984 | sed 's/.*/{"prompt": "Chapter &.", "seed": &}/' > "$OUT/million.jsonl"
answer() { tsjax batch tsjax/small-english "$OUT/million.jsonl" --dtype float32 --do-sample --min-p 0.1 --repetition-penalty 1.2 --eos-token-id -1 --max-new-tokens 1024 --rows 8 --out "$OUT/million-$1.jsonl" --method "${@:2}"; }
answer plain autoregressive
answer ngram ngram --method-options num_ngrams=2 suffix_length=6
answer tokenswift tokenswift --method-options num_ngrams=2 suffix_length=6 "tree=(1,2,1,1)" draft_budget=256
for one in ngram tokenswift; do cmp <(sort "$OUT/million-plain.jsonl") <(sort "$OUT/million-$one.jsonl"); done
