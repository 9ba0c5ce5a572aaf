# SPDX-License-Identifier: Apache-2.0
"""HuggingFace torch `generate` on the shapes of `step`: seconds of a token, by context.

Greedy decoding in bfloat16 with scaled_dot_product_attention, as a user would call it: once with
the default cache, once with the static one, for which transformers compiles the model. Weights are
random. A token's time is that of a long call minus that of a short one, over the tokens between
them, so neither the prefill nor the start of a call counts. The bound is that of `step`.

    python -m benchmarks step_torch --model llama3.1-8b --out benchmarks/results/h100
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from benchmarks import report

CONTEXTS = (4096, 32_768)
SHORT, LONG, ROUNDS = 8, 72, 3
CACHES = {"default cache": None, "static cache, compiled": "static"}


def torch_model(model, device: str, longest: int):
    """A Llama or Qwen2 of this shape with random weights, made on the device."""
    import torch
    import transformers

    shape = dict(
        vocab_size=model.vocab_size,
        hidden_size=model.embed_dim,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        intermediate_size=model.mlp_dim,
        max_position_embeddings=longest,
        tie_word_embeddings=model.tie_embeddings,
    )
    if model.qkv_bias:
        config, kind = transformers.Qwen2Config(**shape), transformers.Qwen2ForCausalLM
    else:
        config, kind = transformers.LlamaConfig(**shape), transformers.LlamaForCausalLM
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        found = kind(config).eval()
    torch.set_default_dtype(torch.float32)
    return found


def seconds_per_token(model, context: int, cache: str | None) -> list[float]:
    import torch

    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(5, model.config.vocab_size, (1, context), generator=generator)
    prompt = prompt.to(model.device)

    def call(count: int) -> float:
        begin = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                cache_implementation=cache,
            )
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    call(SHORT)
    call(LONG)
    return [(call(LONG) - call(SHORT)) / (LONG - SHORT) for _ in range(ROUNDS)]


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("step_torch", __doc__)
    parser.add_argument("--model", default="llama3.1-8b")
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it runs")
    report.add_budget(parser)
    args = parser.parse_args(argv)
    report.use_configs()

    import torch

    import tsjax
    from benchmarks.step import tiny
    from tsjax.model.cache import cache_bytes

    budget = report.Budget(args.minutes)
    shape, preset = tsjax.model_preset(args.model), tsjax.preset(args.model)
    if args.quick:
        shape, _ = tiny(shape, preset)
        args.contexts = (64, 128)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.quick:
        parser.error("this needs a GPU; --quick runs a tiny model on a CPU")
    kind = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    document = {
        **report.facts(), "model": args.model, "torch_device": kind, "complete": False,
        "rows": [], "left_out": [],
    }  # fmt: skip
    model = torch_model(shape, device, max(args.contexts) + LONG)
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    if not shape.tie_embeddings:  # one row of it is read
        nbytes -= model.get_input_embeddings().weight.numel() * 2
    nominal = report.nominal_bandwidth(kind)
    for name, cache in CACHES.items():
        for context in args.contexts:
            if budget.is_used_up:
                document["left_out"].append({"context": context, "cache": name})
                continue
            row = {"context": context, "cache": name}
            try:
                seconds = seconds_per_token(model, context, cache)
            except Exception as error:
                row["error"] = report.first_line(error)
            else:
                read = nbytes + cache_bytes(shape, 1, context)
                row |= {"ms": [1e3 * value for value in seconds], "read_bytes": read}
                row["median_ms"] = statistics.median(row["ms"])
                if nominal:
                    row["over_nominal_bound"] = row["median_ms"] * nominal / read / 1e3
            print(row, flush=True)
            document["rows"].append(row)
            report.save(document, args.out, f"step-torch-{args.model}")
    document |= {"complete": not document["left_out"], "seconds": budget.used}
    report.write(document, args.out, f"step-torch-{args.model}")
