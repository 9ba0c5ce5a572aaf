# SPDX-License-Identifier: Apache-2.0
"""Stories that a real model writes, to learn from: prompts of drawn words, what is kept, one file.

A prompt names a few things that a story shall be about, so that no two are alike. A batch of
prompts follows from the seed and its number alone, and its stories are in the file when it is done:
a run that was ended goes on with the next batch.
"""

from __future__ import annotations

import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import tsjax
from tools.facts import sha256_of
from tsjax.files.whole_files import write_text
from tsjax.host.chat import chat_prompt

from .texts import TYPOGRAPHY

FILE, RECORD = "stories.txt", "stories.json"
BETWEEN = "\n\n* * *\n\n"  # two stories

# SmolLM2-135M falls into loops without the penalty, and wanders with a larger temperature.
SETTINGS: dict[str, Any] = {
    "do_sample": True, "temperature": 0.6, "min_p": 0.1, "repetition_penalty": 1.1,
    "max_new_tokens": 380,
}  # fmt: skip
PROMPT_TOKENS = 128  # room for the chat template and a prompt

ASKED = (
    "Write a short story of three paragraphs for children about {name}, {who}, and {thing} "
    "{place}. {turn}",
    "Tell a bedtime story in a few short paragraphs. It is about {name}, {who}, who finds {thing} "
    "{place}. {turn}",
    "Write a simple story for a young child. {name} is {who}. One day there is {thing} {place}. "
    "{turn}",
)
NAMES = (
    "Ada Alma Amy Anna Ben Bella Carl Clara Daisy Dan Dora Ella Emil Emma Eva Felix Finn Flora "
    "Fred George Grace Greta Hanna Harry Hugo Ida Ivy Jack Jane Joe Kate Kit Lara Leo Lily "
    "Lotte Lucy Max May Mia Milo Mira Nell Nick Nina Noah Nora Oscar Otto Paul Pia Ray Rosa "
    "Ruby Sam Sara Tess Theo Tim Tom Vera Will Zoe"
).split()
WHO = """\
a girl|a boy|a small bear|a young fox|an old baker|a shy mouse|a farmer|a duck|a rabbit
a little robot|a cat|a puppy|a fisherman|a frog|a tall giraffe|a hen|a squirrel|an owl
a gardener|a sailor|a lamb|a pony|a tailor|a hedgehog|a young teacher|a goose|a turtle
a little dragon|a grandmother|a grandfather|a shepherd|a beaver|a postman|a kitten
a wolf who is kind|a crow|a king without a crown|a princess|a miller|a snail|a bee
an elephant|a donkey|a lonely giant|a girl who is new at school|a boy who cannot sleep
two brothers|two sisters|a family of mice|a painter""".replace("\n", "|").split("|")
THINGS = """\
a red kite|a lost key|a wooden boat|a big cake|an old clock|a blue stone|a broken bridge
a warm coat|a drum|a lantern|a map|a bell|a ladder|a bag of seeds|a torn umbrella
a letter|a basket|a tall tree|a swing|a yellow hat|a jar of honey|a small door
a box of paints|a sleeping dog|a pair of boots|a flute|an empty nest|a snowman|a wheel
a golden leaf|a mirror|a pot of soup|a rope|a star that fell|a feather|a loaf of bread
a wagon|a pumpkin|a garden gate|a picture book|a candle|a hole in the roof|a button
a stray kitten|a bicycle|a lemon tree|a cold wind|a new neighbour|a music box
a silver spoon|a deep well|a birthday present|a scarf|a glass marble|a cloud of bees
a strange sound|a heavy stone|a lost tooth|a paper ship|an apple pie""".replace("\n", "|").split(
    "|"
)
PLACES = """\
in a forest|by the sea|on a farm|in a small town|on a hill|at school|in a garden
by a river|in the snow|at the market|in an old house|on an island|at the edge of a lake
in a barn|under a bridge|in the kitchen|on a ship|in the mountains|at the mill
on a quiet street|in a meadow|in a tower|at the station|in a cave|near the harbour
in the attic|at a fair|in the rain|on the way home|behind the church""".replace("\n", "|").split(
    "|"
)
TURNS = """\
Someone makes a mistake and says sorry.|A friend helps.|There is a surprise at the end.
Something gets lost and is found again.|The story has some dialogue.
Two friends quarrel and make up.|It begins to rain.
Someone is afraid at first and then brave.|A promise is kept.
Someone learns something new.|Someone shares what is left.|It ends with a good meal.
Someone tells a secret.|They have to wait until morning.|Somebody is kind to a stranger.
A plan goes wrong, and a better one is found.|At the end they laugh.
Someone goes away and comes back.|Night falls.|Someone asks a clever question.
They build something together.|A small one saves a big one.|Nobody believes it at first.
Someone gives a present.|The end is a little sad.""".replace("\n", "|").split("|")

UNWANTED = re.compile(r"[^\n -~]|[*#`{}\[\]<>|\\/=_]")  # no letters of simple prose
SENTENCE_END = re.compile(r'[.!?]["\')]?(?=\s|$)')
FEWEST_WORDS = 80
DISTINCT = 0.9  # of the runs of five words in a story: one that goes in circles is left out


def prompts(seed: int, batch: int, rows: int) -> list[str]:
    draw = random.Random(f"{seed} {batch}").choice
    return [
        draw(ASKED).format(
            name=draw(NAMES), who=draw(WHO), thing=draw(THINGS), place=draw(PLACES),
            turn=draw(TURNS),
        )
        for _ in range(rows)
    ]  # fmt: skip


def cleaned(text: str, ended: bool) -> str | None:
    """The paragraphs of a story, or None for one that is not worth reading.

    Args:
      ended: whether the model came to its end; else what follows its last sentence is cut off.
    """
    text = text.translate(TYPOGRAPHY)
    if UNWANTED.search(text):
        return None
    if not ended:
        ends = [match.end() for match in SENTENCE_END.finditer(text)]
        text = text[: ends[-1]] if ends else ""
    paragraphs = [" ".join(line.split()) for line in text.split("\n") if line.strip()]
    words = " ".join(paragraphs).lower().split()
    runs = [tuple(words[i : i + 5]) for i in range(len(words) - 4)]
    if len(words) < FEWEST_WORDS or len(set(runs)) < DISTINCT * len(runs):
        return None
    return "\n\n".join(paragraphs)


def write_stories(
    model_file: Path, folder: Path, tokens: int, rows: int, seed: int, measured: dict[str, Any]
) -> None:
    """Adds batches of stories to the folder's file until `tokens` of them are kept.

    Args:
      measured: what the record says of the command and the machine.
    """
    model = tsjax.load(model_file, dtype="bfloat16")
    record = {
        "model": model_file.name, "sha256": sha256_of(model_file), "seed": seed, "rows": rows,
        "settings": SETTINGS, "batches": 0, "written": 0, "kept": 0, "tokens": 0, "bytes": 0,
        "seconds": 0.0, **measured,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / RECORD).exists():
        earlier = json.loads((folder / RECORD).read_text("utf-8"))
        for name in ("sha256", "seed", "rows", "settings"):
            if earlier[name] != record[name]:
                raise ValueError(
                    f"--texts {folder} was begun with {name} {earlier[name]}, not {record[name]}"
                )
        record = earlier
    # A batch is written, and the next one's prompts are made, while another runs.
    with open(folder / FILE, "ab") as file, ThreadPoolExecutor(1) as beside:
        file.truncate(record["bytes"])  # what a killed batch left
        began, batch, writing = time.monotonic(), record["batches"], beside.submit(int)
        asking = beside.submit(asked, model, seed, batch, rows)
        while record["tokens"] < tokens:
            ids = asking.result()
            asking = beside.submit(asked, model, seed, batch + 1, rows)
            result = tsjax.generate(
                model, ids, seed=(seed << 20) + batch, prefill_width=PROMPT_TOKENS,
                capacity=PROMPT_TOKENS + SETTINGS["max_new_tokens"], **SETTINGS,
            )  # fmt: skip
            writing.result()
            if record["batches"] and not record["kept"]:
                raise ValueError(f"{model_file.name} wrote no story that is worth keeping")
            now = time.monotonic()
            record["seconds"], began, batch = record["seconds"] + now - began, now, batch + 1
            writing = beside.submit(_add_batch, model, result, record, file, folder / RECORD)
        writing.result()


def asked(model: tsjax.Model, seed: int, batch: int, rows: int) -> list[np.ndarray]:
    """Token ids of a batch's chats."""
    chats = [[{"role": "user", "content": text}] for text in prompts(seed, batch, rows)]
    ids = chat_prompt(model, chats)
    longest = max(map(len, ids))
    if longest > PROMPT_TOKENS:
        raise ValueError(f"a prompt has {longest} tokens; at most {PROMPT_TOKENS}")
    return ids


def _add_batch(model, result, record: dict[str, Any], file: Any, path: Path) -> None:
    texts = model.tokenizer.backend_tokenizer.decode_batch(
        [row.tolist() for row in result.tokens], skip_special_tokens=True
    )
    for text, new, reason in zip(texts, result.tokens, result.finish_reason, strict=True):
        story = cleaned(text, reason == "eos")
        record["written"] += 1
        if story is not None:
            file.write((story + BETWEEN).encode())
            record["kept"] += 1
            record["tokens"] += len(new)
    file.flush()
    record["batches"] += 1
    record["bytes"] = file.tell()
    write_text(path, json.dumps(record, indent=1) + "\n")
    print(
        f"{record['tokens']:,} tokens, {record['kept']:,} of {record['written']:,} stories kept, "
        f"{record['seconds']:.0f} s",
        flush=True,
    )
