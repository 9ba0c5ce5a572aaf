# SPDX-License-Identifier: Apache-2.0
"""Those who decode on a CPU, each in a process of its own: reads one question per line from stdin,
`{"context": ..., "new": ...}`, and answers in one line.

An answer has the seconds of the prefill (to the first token), to the last of the FIRST_TOKENS, and
of a token after the first, and the tokens. All decode greedily with float32 weights and caches and
as many threads as CPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

FIRST_TOKENS = 8
Answer = Callable[[int, int], dict[str, Any]]


def prompt_of(length: int, vocabulary: int) -> Any:
    import numpy as np

    return np.random.default_rng(length).integers(3, vocabulary, length).astype(np.int32)


def timed(begin: float, tokens: Sequence[int], times: Sequence[float]) -> dict[str, Any]:
    """The answer of one who says when each token came."""
    return {
        "prefill": times[0] - begin,
        "first_tokens": times[:FIRST_TOKENS][-1] - begin,
        "token": (times[-1] - times[0]) / max(len(times) - 1, 1),
        "tokens": list(tokens),
    }


def tsjax_answers(folder: str, vocabulary: int) -> Answer:
    import tsjax

    model, compiled = tsjax.load(folder), set()

    def call(context: int, new: int) -> tuple[Any, float]:
        begin = time.perf_counter()
        result = tsjax.generate(model, prompt_of(context, vocabulary), max_new_tokens=new)
        return result, time.perf_counter() - begin

    def answer(context: int, new: int) -> dict[str, Any]:
        few = min(new, FIRST_TOKENS)
        if (context, new) not in compiled:
            call(context, few), call(context, new)
            compiled.add((context, new))
        result, _ = call(context, new)
        return {
            "prefill": result.stats.prefill_seconds,
            "first_tokens": call(context, few)[1],  # a call of its own: tokens come in chunks
            "token": result.stats.decode_seconds / new,
            "tokens": result.tokens[0].tolist(),
        }

    return answer


def transformers_answers(folder: str, vocabulary: int) -> Answer:
    import torch
    import transformers

    torch.set_num_threads(os.cpu_count() or 1)
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()

    class Clock:
        def __init__(self):
            self.times = []

        def put(self, value):
            self.times.append(time.perf_counter())

        def end(self):
            pass

    def answer(context: int, new: int) -> dict[str, Any]:
        prompt, clock = torch.tensor(prompt_of(context, vocabulary))[None].long(), Clock()
        begin = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new,
                do_sample=False, pad_token_id=0, streamer=clock,
            )  # fmt: skip
        return timed(begin, out[0, context:].tolist(), clock.times[1:])  # the first is the prompt

    return answer


def llama_cpp_answers(folder: str, vocabulary: int) -> Answer:
    import llama_cpp
    import numpy as np

    path = os.path.join(folder, "model.gguf")
    save_gguf(folder, path)
    threads, float32 = os.cpu_count() or 1, llama_cpp.GGML_TYPE_F32

    def answer(context: int, new: int) -> dict[str, Any]:
        model = llama_cpp.Llama(
            path, n_ctx=context + new, n_batch=512, n_threads=threads, n_threads_batch=threads,
            type_k=float32, type_v=float32, verbose=False,
        )  # fmt: skip
        prompt, tokens, times = prompt_of(context, vocabulary).tolist(), [], []
        begin = time.perf_counter()
        model.eval(prompt)
        while True:
            logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
            tokens.append(int(np.argmax(np.ctypeslib.as_array(logits, (vocabulary,)))))
            times.append(time.perf_counter())
            if len(tokens) == new:
                break
            model.eval(tokens[-1:])
        found = timed(begin, tokens, times)
        model.close()
        return found

    return answer


def save_gguf(folder: str, path: str) -> None:
    """The weights of a Llama in HuggingFace's files, as llama.cpp reads them."""
    import gguf
    import numpy as np
    import safetensors.numpy

    with open(os.path.join(folder, "config.json")) as file:
        cfg = json.load(file)
    tensors = safetensors.numpy.load_file(os.path.join(folder, "model.safetensors"))
    heads, kv_heads = cfg["num_attention_heads"], cfg["num_key_value_heads"]
    head_dim = cfg["hidden_size"] // heads

    def turned(weights: Any, heads: int) -> Any:
        """Of each head's outputs, pairs that turn together side by side."""
        halves = weights.reshape(heads, 2, head_dim // 2, -1)
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(cfg["max_position_embeddings"])
    writer.add_embedding_length(cfg["hidden_size"])
    writer.add_block_count(cfg["num_hidden_layers"])
    writer.add_feed_forward_length(cfg["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(cfg["rms_norm_eps"])
    writer.add_vocab_size(cfg["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("none")
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for name, tensor in tensors.items():
        tensor = tensor.astype(np.float32)
        if name.startswith("model.layers."):
            _, _, layer, part = name.split(".", 3)
            part = part.removesuffix(".weight")
            if part.endswith("q_proj"):
                tensor = turned(tensor, heads)
            elif part.endswith("k_proj"):
                tensor = turned(tensor, kv_heads)
            writer.add_tensor(f"blk.{layer}.{names[part]}.weight", tensor)
        elif name == "model.embed_tokens.weight":
            writer.add_tensor("token_embd.weight", tensor)
        elif name == "model.norm.weight":
            writer.add_tensor("output_norm.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ctranslate2_answers(folder: str, vocabulary: int) -> Answer:
    import ctranslate2
    import tokenizers
    import transformers
    from ctranslate2.converters import TransformersConverter

    names = [f"t{i}" for i in range(vocabulary)]  # it wants a tokenizer
    words = tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="t0")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), unk_token="t0", bos_token="t1", eos_token="t2"
    )
    tokenizer.save_pretrained(folder)
    converted = os.path.join(folder, "ctranslate2")
    TransformersConverter(folder).convert(converted, quantization="float32", force=True)
    model = ctranslate2.Generator(
        converted, device="cpu", compute_type="float32", inter_threads=1,
        intra_threads=os.cpu_count() or 1,
    )  # fmt: skip

    def answer(context: int, new: int) -> dict[str, Any]:
        prompt = [names[i] for i in prompt_of(context, vocabulary)]
        tokens, times = [], []

        def heard(step) -> bool:
            tokens.append(step.token_id)
            times.append(time.perf_counter())
            return False

        begin = time.perf_counter()
        model.generate_batch(
            [prompt], max_length=new, min_length=new, sampling_topk=1, callback=heard,
            include_prompt_in_result=False, end_token=[],
        )  # fmt: skip
        return timed(begin, tokens, times)

    return answer


# Who answers, what the process has in its environment, and the packages that it needs.
PEERS: dict[str, tuple[Callable[[str, int], Answer], dict[str, str], tuple[str, ...]]] = {
    "native": (tsjax_answers, {}, ()),
    "plain XLA": (tsjax_answers, {"TSJAX_NATIVE": "0"}, ()),
    "transformers": (transformers_answers, {}, ("torch",)),
    "llama.cpp": (llama_cpp_answers, {}, ("llama_cpp", "gguf")),
    "CTranslate2": (ctranslate2_answers, {}, ("ctranslate2",)),
}


def installed_peers() -> list[str]:
    return [name for name, (_, _, packages) in PEERS.items() if all(map(find_spec, packages))]


def serve(peer: str, folder: str, vocabulary: int) -> None:
    answer = PEERS[peer][0](folder, vocabulary)
    answer(16, FIRST_TOKENS)  # a first call is slower
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


class Peer:
    """The process, from the side that asks."""

    def __init__(self, name: str, folder: str):
        command = [sys.executable, "-m", "benchmarks", "cpu", "--serve", name, folder]
        pipe, environment = subprocess.PIPE, PEERS[name][1]
        self._process = subprocess.Popen(
            command, env=os.environ | environment, stdin=pipe, stdout=pipe, text=True
        )
        self._read()

    def _read(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a peer has ended; what it said is above")
        return line

    def ask(self, context: int, new: int) -> dict[str, Any]:
        self._process.stdin.write(json.dumps({"context": context, "new": new}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._read())

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait()
