# SPDX-License-Identifier: Apache-2.0
"""The HuggingFace folder of a trained model: weights, tokenizer, card, and what is checked of them.

Knows what a work folder holds. Conversion is tsjax's own.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tsjax
from convert import MERGE_HEADS, to_hf
from tools.facts import facts, todays_command
from tsjax.model.params import Params, abstract_params
from tsjax.model.transformer import ModelWeights

from .loss import ATTENTION_BLOCK, loss_by_position
from .texts import Stream
from .training import METRICS, STATE, Trainer

# In a work folder.
TOKENIZER, TRAIN, HELD_OUT = "tokenizer", "train.npz", "held_out.npz"
TEXTS, RUN, BEST = "texts.json", "run.json", "best"
HEADS, HEADS_RUN = "heads", "heads.json"
# In a model folder: what the card was made from.
RECORD = "training.json"

LARGEST = 12_000_000  # bytes of the folder, draft heads included
NUM_HEADS = 3
PROMPTS = ("Once upon a time", "One rainy morning, the little robot")
LONG_ROW = 16_384


def save_best(weights: ModelWeights, cfg: tsjax.ModelConfig, stop_id: int, work: Path) -> None:
    """A tsjax checkpoint with its tokenizer; a run that is killed leaves the last one whole."""
    model = tsjax.Model(
        Params(model=weights), cfg=cfg, stop_ids=(stop_id,), path=str(work / TOKENIZER)
    )
    tsjax.save(model, work / BEST, overwrite=True)


def check_target(out: Path) -> None:
    """Refuses a wrong target before hours of training, not after."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not _is_model(out))):
        raise FileExistsError(f"--out {out} exists and is not a model folder")


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").exists()


def check_room(cfg: tsjax.ModelConfig, work: Path) -> None:
    """The folder and the draft heads that will join it stay below LARGEST."""
    size = jax.tree.reduce(
        lambda total, leaf: total + math.prod(leaf.shape), abstract_params(cfg), 0
    )
    heads = NUM_HEADS * (cfg.embed_dim**2 + 2 * cfg.embed_dim)
    files = sum(file.stat().st_size for file in (work / TOKENIZER).iterdir())
    total = 2 * (size + heads) + files + 50_000  # config, card, safetensors' header
    if total > LARGEST:
        raise ValueError(
            f"the model has {size:,} parameters; with {NUM_HEADS} draft heads, in bfloat16 and "
            f"with its tokenizer that is {total:,} bytes; at most {LARGEST:,}"
        )


def check_trained(work: Path) -> None:
    if not (work / BEST).is_dir():
        raise FileNotFoundError(f"{work / BEST} is missing; run the train command first")


def export(work: Path, out: Path, trainer: Trainer) -> str:
    """Writes the folder `out` from the best checkpoint of `work`; returns a report."""
    check_trained(work)
    run = json.loads((work / RUN).read_text("utf-8"))
    run["texts"] = json.loads((work / TEXTS).read_text("utf-8"))
    run["metrics"] = [json.loads(line) for line in (work / METRICS).read_text().splitlines()]
    with_heads: dict[str, Any] = {}
    if (work / HEADS_RUN).exists():
        run["heads"] = json.loads((work / HEADS_RUN).read_text("utf-8"))
        run["heads"] |= json.loads((work / HEADS / "summary.json").read_text("utf-8"))
        with_heads = {"heads": work / HEADS, "draft_heads": MERGE_HEADS}
    to_hf(work / BEST, out, dtype="bfloat16", overwrite=True, **with_heads)
    if with_heads:
        config = json.loads((out / "config.json").read_text("utf-8"))
        config["medusa_head_accuracy"] = [
            record["top1"] for record in run["heads"]["evaluation"] if record["head"]
        ]
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    # Written again with what each check finds: whole even if a later one fails.
    (out / "README.md").write_text(card(run), encoding="utf-8")

    model = tsjax.load(out, dtype="float32")
    run["final"] = {
        "parameters": model.num_params,
        "held_out": trainer.evaluate(model.params.model, "float32"),
        "by_position": by_position(model, trainer.held_out),
    }
    (out / "README.md").write_text(card(run), encoding="utf-8")

    with jax.default_device(jax.local_devices(backend="cpu")[0]):  # the same text on any machine
        model = tsjax.load(out, dtype="float32")
        run["final"]["samples"] = {prompt: sample(model, prompt) for prompt in PROMPTS}
    (out / "README.md").write_text(card(run), encoding="utf-8")
    (out / RECORD).write_text(json.dumps(run, indent=1) + "\n")
    size = sum(file.stat().st_size for file in out.iterdir())
    missing = NUM_HEADS - model.cfg.num_draft_heads
    room = 2 * missing * (model.cfg.embed_dim**2 + 2 * model.cfg.embed_dim)
    if size + room > LARGEST:
        raise ValueError(f"{out} has {size:,} bytes, and draft heads need {room:,} of {LARGEST:,}")
    lines = [f"{out}: {size:,} bytes, {model.num_params:,} parameters"]
    lines.append(f"held-out loss in bfloat16: {run['final']['held_out']:.4f}")
    lines += [f"{prompt}{text}" for prompt, text in run["final"]["samples"].items()]
    return "\n\n".join(lines)


def sample(model: tsjax.Model, prompt: str) -> str:
    result = tsjax.generate(
        model, prompt, max_new_tokens=120, do_sample=True, temperature=0.8, min_p=0.1, seed=0
    )
    if not isinstance(result.text, str) or not result.text.strip():
        raise ValueError(f"the exported model gives no text after {prompt!r}: {result}")
    return result.text


def by_position(model: tsjax.Model, held_out: Stream) -> dict[str, float]:
    """The held-out loss in one long row, by position: what a long context does to the model."""
    length = min(LONG_ROW, len(held_out.tokens)) // ATTENTION_BLOCK * ATTENTION_BLOCK
    if not length:
        return {}
    tokens = jnp.asarray(held_out.tokens[:length])
    losses = np.asarray(
        loss_by_position(model.params.model, tokens, cfg=model.cfg, bos=held_out.bos)
    )
    found, begin, end = {}, 0, 1024
    while begin < length:
        found[f"{begin:,} to {min(end, length):,}"] = float(losses[begin:end].mean())
        begin, end = end, 2 * end
    return found


def describe_run(command: str, trainer: Trainer) -> dict[str, Any]:
    return {
        "command": command,
        "settings": {k: v for k, v in vars(trainer.settings).items() if v is not None},
        "shape": trainer.cfg.to_dict(),
        **measured_with(),
    }


def measured_with() -> dict[str, Any]:
    known = facts()
    return {name: known[name] for name in ("device", "cpus", "versions", "commit", "date")}


def start_afresh(work: Path) -> None:
    """Removes what an earlier run left in the work folder."""
    for name in (RUN, METRICS, STATE, HEADS_RUN):
        (work / name).unlink(missing_ok=True)
    for name in (BEST, HEADS):
        if (work / name).is_dir():
            shutil.rmtree(work / name)


def card(run: dict[str, Any]) -> str:
    """The model's README.md."""
    texts, final, shape = run["texts"], run.get("final", {}), run["shape"]
    settings = run["settings"]
    bytes_per_token = texts["held_out_bytes"] / texts["held_out_tokens"]
    loss = final.get("held_out", min(line["held_out"] for line in run["metrics"]))
    rows = [f"| {b['name']} | {b['characters']:,} | `{b['sha256'][:16]}` |" for b in texts["books"]]
    written = texts.get("stories")
    source = "stories that a larger model wrote" if written else "plain texts"
    parts = [
        "---\nlanguage: en\nlicense: apache-2.0\nlibrary_name: tsjax\npipeline_tag: "
        "text-generation\n---",
        "# A small English model",
        f"A Llama of {final.get('parameters', 0):,} parameters, trained from nothing on {source}. "
        "It writes one simple story after the other and knows nothing else; it is there to try, "
        "test and time text generation.",
        "## Shape",
        f"{shape['num_layers']} layers, embedding {shape['embed_dim']}, {shape['num_heads']} query "
        f"heads and {shape['num_kv_heads']} key/value heads of {shape['head_dim']}, feed-forward "
        f"{shape['mlp_dim']}, tied embeddings, rotary embedding with theta "
        f"{shape['rope']['theta']:g}, byte-level BPE of {shape['vocab_size']:,} entries, bfloat16.",
        f"Rows of training had at most {max(settings['length'], settings['final_length']):,} "
        f"tokens. {settings['gaps']:.0%} of them left out a part of the text and counted its "
        f"positions, so distances up to {shape['max_positions']:,} occurred.",
        "## Data",
        *([written_by(written)] if written else []),
        "\n".join(["| text | characters | sha256 of the file |", "|---|---|---|", *rows]),
        f"{texts['train_tokens']:,} tokens to train on; the last "
        f"{texts['held_out_part']:.0%} of every text, {texts['held_out_tokens']:,} tokens, held "
        "out. A blank line between paragraphs, quotation marks and dashes in ASCII.",
        "## Training",
        *run_part(run),
        f"Held-out loss of these files: {loss:.4f} nats per token (perplexity "
        f"{math.exp(loss):.1f}), {loss / math.log(2) / bytes_per_token:.3f} bits per byte.",
    ]
    if places := final.get("by_position"):
        parts += [
            "In one row of many tokens, held-out text all the way:",
            "\n".join(
                ["| position | held-out loss |", "|---|---|"]
                + [f"| {place} | {value:.3f} |" for place, value in places.items()]
            ),
        ]
    commands = [texts["command"], run["command"]]
    if written:
        commands.insert(0, written["command"])
    if heads := run.get("heads"):
        commands.append(heads["command"])
        parts += heads_part(heads)
    if "--no-export" in commands[-1]:
        commands.append("python -m tools.embedded_model export --work WORK --out OUT")
    parts += [
        "Made from a checkout of tsjax by",
        "```bash\n" + "\n".join(map(todays_command, commands)) + "\n```",
    ]
    if samples := final.get("samples"):
        parts.append("## Text")
        parts += [f"> **{p}**{text}".replace("\n", "\n> ") for p, text in samples.items()]
    return "\n\n".join(parts) + "\n"


def written_by(stories: dict[str, Any]) -> str:
    """What the card says about the stories."""
    how = ", ".join(f"{k}={v}" for k, v in stories["settings"].items())
    return (
        f"`{stories['model']}` (sha256 `{stories['sha256'][:16]}`) wrote {stories['written']:,} "
        f"stories, {stories['rows']:,} side by side, with {how}, {stories['seconds']:.0f} s on "
        f"{stories['device']} ({versions_of(stories)}, {stories['date']}, commit "
        f"{stories['commit']}). Each was asked for with other words, drawn from lists "
        f"(tools/embedded_model/stories.py, seed {stories['seed']}). {stories['kept']:,} were "
        "kept: no signs that simple prose has not, no text that goes in circles, cut after a "
        "sentence. The text is not part of the repository."
    )


def run_part(run: dict[str, Any]) -> list[str]:
    """What the card says about the training."""
    metrics, settings = run["metrics"], run["settings"]
    best, last = min(metrics, key=lambda line: line["held_out"]), metrics[-1]
    shown = metrics[:: max(1, len(metrics) // 10)]
    shown = shown if shown[-1] is last else [*shown, last]
    losses = [
        f"| {m['step']:,} | {m['epochs']:.1f} | {m['length']} | {m['loss']:.3f} | "
        f"{m['held_out']:.3f} |"
        for m in shown
    ]
    return [
        f"{last['step']:,} updates of {settings['batch']:,} tokens: {last['tokens']:,} "
        f"tokens, {last['epochs']:.1f} epochs, {last['minutes']:.1f} minutes on {run['device']} "
        f"({versions_of(run)}, {run['date']}, commit {run['commit']}). Muon for the layers' "
        f"matrices and AdamW for all else, learning rate {settings['learning_rate']:g} with "
        f"warm-up and cosine, weight decay {settings['weight_decay']:g}, dropout "
        f"{settings['dropout']:g}, {settings['dtype']}. Its weights are those of update "
        f"{best['step']:,}, which had the lowest held-out loss.",
        "\n".join(
            ["| update | epochs | row | training loss | held-out loss |", "|---|---|---|---|---|"]
            + losses
        ),
    ]


def versions_of(run: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in run["versions"].items() if k in ("jax", "python"))


def heads_part(heads: dict[str, Any]) -> list[str]:
    """What the card says about the draft heads."""
    settings = heads["settings"]
    rows = [
        f"| {record['head'] or 'the model'} | {record['loss']:.3f} | "
        f"{record['top1']:.1%} | {record['skip_bigram'][0]:.1%} | "
        f"{record['unigram'][0]:.1%} | {record['top3']:.1%} |"
        for record in heads["evaluation"]
    ]
    return [
        "## Draft heads",
        f"{heads['steps']} steps of {settings['batch_size']} rows of "
        f"{settings['sequence_length']} tokens with the model frozen, learning rate "
        f"{settings['learning_rate']:g}, on {heads['device']} ({versions_of(heads)}, "
        f"{heads['date']}, commit {heads['commit']}). Head i guesses the token i + 1 further. On "
        "the held-out text, its best guess beside the best ones from counts in the training "
        "text:",
        "\n".join(
            [
                "| head | loss | best guess | after the last token (skip-bigram) | most frequent | "
                "among three |",
                "|---|---|---|---|---|---|",
                *rows,
            ]
        ),
    ]
