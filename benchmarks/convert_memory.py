# SPDX-License-Identifier: Apache-2.0
"""Peak memory of conversions: is a checkpoint converted in little more memory than its own size?

    python -m benchmarks convert_memory --out benchmarks/results/cpu

Writes a synthetic HuggingFace checkpoint for each case, converts it in a fresh process and reads
that process's peak resident memory (VmHWM; ru_maxrss would count the parent's). The peak includes
Python, JAX and orbax themselves, about 0.3 GB. The last line on stdout is one JSON document.
Linux only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from benchmarks import report

CASES = (
    # name, stored type, arguments of the command
    ("bfloat16 -> tsjax", "bfloat16", []),
    ("float32 -> tsjax", "float32", []),
    ("float32 -> tsjax bfloat16", "float32", ["--dtype", "bfloat16"]),
    ("bfloat16 -> tsjax float32", "bfloat16", ["--dtype", "float32"]),
    ("bfloat16 -> hf", "bfloat16", ["--to", "hf", "--max-shard-size", "250MB"]),
)
MEASURED = r"""
import re, sys
from convert.__main__ import main
code = main(sys.argv[1:])
status = open("/proc/self/status").read()
print(int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024)
sys.exit(code)
"""


def write_checkpoint(folder: Path, dtype: str, num_bytes: float) -> None:
    """A random Llama with a large vocabulary, in shards of one layer, about `num_bytes` big."""
    D, F, V, N, K, H = 2048, 5632, 32000, 32, 8, 64
    item = jnp.dtype(dtype).itemsize
    layer_bytes = (2 * D * N * H + 2 * D * K * H + 3 * D * F + 2 * D) * item
    layers = max(1, round((num_bytes - 2 * V * D * item) / layer_bytes))
    rng = np.random.default_rng(0)

    def make(*shape):
        return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))

    parts = [{"model.embed_tokens.weight": (V, D)}, {"lm_head.weight": (V, D)}]
    parts[0]["model.norm.weight"] = (D,)
    for i in range(layers):
        layer = {
            "self_attn.q_proj": (N * H, D),
            "self_attn.k_proj": (K * H, D),
            "self_attn.v_proj": (K * H, D),
            "self_attn.o_proj": (D, N * H),
            "mlp.gate_proj": (F, D),
            "mlp.up_proj": (F, D),
            "mlp.down_proj": (D, F),
            "input_layernorm": (D,),
            "post_attention_layernorm": (D,),
        }
        parts.append({f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()})
    places = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file({name: make(*shape) for name, shape in part.items()}, folder / file)
        places.update(dict.fromkeys(part, file))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": V,
        "hidden_size": D, "intermediate_size": F, "num_hidden_layers": layers,
        "num_attention_heads": N, "num_key_value_heads": K, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "torch_dtype": dtype,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure(source: Path, target: Path, arguments: list[str]) -> dict[str, float]:
    command = [sys.executable, "-c", MEASURED, str(source), str(target), "--quiet", *arguments]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, cwd=report.ROOT)
    if done.returncode:
        raise RuntimeError(f"the conversion failed: {done.stderr}")
    peak = int(done.stdout.splitlines()[-1])
    written = size_of(target)
    return {
        "seconds": round(time.perf_counter() - started, 1),
        "source_bytes": size_of(source),
        "written_bytes": written,
        "peak_bytes": peak,
        "peak_above_written_bytes": peak - written,
    }


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("convert_memory", __doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the source")
    args = parser.parse_args(argv)
    rows = []
    print(f"{'case':28} {'source':>8} {'written':>8} {'peak':>8} {'above':>8} {'seconds':>8}")
    for name, dtype, arguments in CASES:
        with tempfile.TemporaryDirectory() as work:
            source, target = Path(work, "hf"), Path(work, "out")
            source.mkdir()
            write_checkpoint(source, dtype, args.gigabytes * 1e9)
            row = {"case": name, **measure(source, target, arguments)}
        rows.append(row)
        sizes = (row[f"{key}_bytes"] / 1e9 for key in ("source", "written", "peak"))
        above = row["peak_above_written_bytes"] / 1e9
        print(name.ljust(28), *(f"{size:7.2f}G" for size in (*sizes, above)), end=" ")
        print(f"{row['seconds']:8.1f}", flush=True)
    report.write({"cases": rows}, args.out, "convert_memory")
