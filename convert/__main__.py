# SPDX-License-Identifier: Apache-2.0
"""The command tsjax-convert."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import jax

from tsjax.base.model_config import WEIGHTS
from tsjax.files.head_files import LAYOUTS, MEDUSA
from tsjax.files.hf_folders import MAX_SHARD_SIZE

from . import DROP_HEADS, MERGE_HEADS, export_heads, to_hf, to_tsjax, verify

EXAMPLES = """\
examples:
  # A HuggingFace folder or a hub id to tsjax's own format:
  tsjax-convert meta-llama/Llama-3.1-8B llama3.1-8b

  # A GGUF file, whose numbers become bfloat16, to a folder that transformers loads:
  tsjax-convert model.gguf hf-folder --to hf

  # In another type, checked afterwards:
  tsjax-convert path/to/hf-folder out --dtype bfloat16 --verify

  # Attach draft heads, TokenSwift's or Medusa's (a folder or a file):
  tsjax-convert path/to/hf-folder out --heads path/to/adapter

  # Back to a folder that transformers loads, without and with the heads:
  tsjax-convert out hf-folder --to hf --drop-heads
  tsjax-convert out hf-folder --to hf --merge-heads --max-shard-size 5GB

  # The heads alone, as an adapter; Medusa's also as vLLM names them:
  tsjax-convert out adapter --heads-only
  tsjax-convert out adapter --heads-only --head-layout vllm

DST appears only when it is complete. Exit code 0: done, 2: refused, 130: interrupted.
"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="tsjax-convert",
        description="Convert checkpoints between HuggingFace and tsjax: Llama, Qwen2, Qwen3, "
        "Mistral.\nA local safetensors folder or GGUF file needs neither torch nor a network.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sources = "HuggingFace folder, hub id, GGUF file or tsjax checkpoint"
    p.add_argument("src", metavar="SRC", help=sources)
    p.add_argument("dst", metavar="DST", help="the folder to write; must not exist")
    p.add_argument(
        "--to", choices=("tsjax", "hf"), default="tsjax", help="format of DST (default: tsjax)"
    )
    p.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="type of the arrays in DST (default: as in SRC)",
    )
    p.add_argument(
        "--weights",
        choices=WEIGHTS,
        help="of a tsjax checkpoint: matrices in few bits, rounded or as a GGUF file stores them",
    )
    p.add_argument(
        "--heads", metavar="PATH", help="draft heads to attach, TokenSwift's or Medusa's"
    )
    heads = p.add_mutually_exclusive_group()
    heads.add_argument(
        "--heads-only", action="store_true", help="write nothing but the draft heads"
    )
    p.add_argument(
        "--head-layout",
        choices=LAYOUTS,
        default=MEDUSA,
        help="with --heads-only: names for Medusa's heads, its own code's or vLLM's "
        "(default: %(default)s)",
    )
    for flag, choice, help in (
        ("--merge-heads", MERGE_HEADS, "with --to hf: write the draft heads beside the model"),
        ("--drop-heads", DROP_HEADS, "with --to hf: leave the draft heads out"),
    ):
        heads.add_argument(flag, dest="draft_heads", action="store_const", const=choice, help=help)
    p.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        default=MAX_SHARD_SIZE,
        help="with --to hf: largest weight file (default: %(default)s)",
    )
    p.add_argument("--verify", action="store_true", help="read both again and compare every tensor")
    p.add_argument("--overwrite", action="store_true", help="replace a checkpoint at DST")
    p.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read pickled torch weights (.bin) where there are no safetensors; needs torch",
    )
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.draft_heads and args.to != "hf":
        parser().error("--merge-heads and --drop-heads go with --to hf")
    if args.weights and (args.to == "hf" or args.heads_only):
        parser().error("--weights goes with --to tsjax")
    # The work is NumPy's and the disk's; a GPU would only add a copy to its memory and back.
    jax.config.update("jax_platforms", "cpu")
    try:
        run(args)
    except (ValueError, NotImplementedError, OSError, ImportError) as error:
        print(f"tsjax-convert: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tsjax-convert: interrupted; DST was not touched", file=sys.stderr)
        return 130
    return 0


def run(args: argparse.Namespace) -> None:
    started = time.perf_counter()
    common = {"heads": args.heads, "allow_pickle": args.allow_pickle}
    with progress_bar("converting", args.quiet) as bar:
        options = {**common, "dtype": args.dtype, "overwrite": args.overwrite}
        options["on_tensor"] = lambda _, size: bar.update(size)
        if args.heads_only:
            written = export_heads(args.src, args.dst, layout=args.head_layout, **options)
        elif args.to == "hf":
            sizes = {"draft_heads": args.draft_heads, "max_shard_size": args.max_shard_size}
            written = to_hf(args.src, args.dst, **sizes, **options)
        else:
            written = to_tsjax(args.src, args.dst, weights=args.weights, **options)
    checked = ""
    if args.verify:
        with progress_bar("verifying", args.quiet) as bar:
            count = verify(args.src, args.dst, on_tensor=lambda _, size: bar.update(size), **common)
        checked = f", {count} tensors verified"
    print(
        f"{written.path}: {written.num_params:,} parameters, {written.num_bytes / 1e6:,.1f} MB, "
        f"{time.perf_counter() - started:.1f} s{checked}"
    )


def progress_bar(label: str, quiet: bool):
    import tqdm

    hidden = quiet or not sys.stderr.isatty()
    return tqdm.tqdm(desc=label, unit="B", unit_scale=True, disable=hidden, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
