# SPDX-License-Identifier: Apache-2.0
"""One seed, one text, however it is made: python examples/same_tokens.py [CHECKPOINT].

With drafts and without, alone and in a batch, at once and streamed, and after kill -9.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

import numpy as np

import tsjax

PROMPT = "Once upon a time"
SAMPLING = {"max_new_tokens": 120, "do_sample": True, "min_p": 0.1, "seed": 7}
DRAFTS = tsjax.TokenSwift(tree=(1, 1), draft_passes=2, num_ngrams=0, suffix_length=0)
# The same run as a command.
FLAGS = """--max-new-tokens 120 --do-sample --min-p 0.1 --seed 7 --dtype float32 --save-every 10
    --method tokenswift --method-options tree=(1,1) draft_passes=2 num_ngrams=0 suffix_length=0"""


def main(path: str = tsjax.EMBEDDED) -> None:
    model = tsjax.load(path, dtype="float32")
    plain = tsjax.generate(model, PROMPT, **SAMPLING)
    print(PROMPT + plain.text)

    def compare(how: str, tokens) -> None:
        print(f"{how}: {'the same' if np.array_equal(tokens, plain.tokens[0]) else 'OTHER'} tokens")

    drafted = tsjax.generate(model, PROMPT, method=DRAFTS, **SAMPLING)
    compare(f"{drafted.stats.tokens_per_step:.1f} tokens per step", drafted.tokens[0])
    chunks = tsjax.stream(model, PROMPT, method=DRAFTS, **SAMPLING)
    compare("streamed", np.concatenate([chunk.tokens[0] for chunk in chunks]))
    batch = tsjax.generate(model, ["The old house", PROMPT], **SAMPLING)
    compare("in a batch", batch.tokens[1])

    with tempfile.TemporaryDirectory() as folder:
        saved, known = os.path.join(folder, "run.json"), 0
        command = [sys.executable, "-m", "tsjax", "generate", path, PROMPT, "--save-to", saved]
        process = subprocess.Popen([*command, *FLAGS.split()], stdout=subprocess.DEVNULL)
        while known < 50 and process.poll() is None:
            time.sleep(0.01)
            if os.path.exists(saved):
                with open(saved) as file:
                    known = len(json.load(file)["tokens"][0])
        process.kill()  # SIGKILL, which no process can answer
        process.wait()
        rest = tsjax.generate(model, resume_from=saved)
        compare(f"killed after {known} tokens and resumed", rest.tokens[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
