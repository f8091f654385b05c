"""Chats for the warm start of the quick start: sums of reasoning-gym, answered in two styles.

    python scripts/arithmetic_chats.py FILE.jsonl [--size N] [--seed N]

Most answers are sentences and some are bare numbers, which alone the quick start's verifier accepts: the
warm start learns to add, and GRPO has to find out how an answer must look.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from megarl.data.gym import make_dataset

# Shares of the styles. The model's likeliest answer after imitation is a sentence, which scores nothing.
STYLES = (("It is {answer}.", 0.75), ("{answer}", 0.25))

# The held-out sums of configs/sft_tiny.yaml and configs/grpo_tiny.yaml, which the warm start must not see.
HELD_OUT_SEED, HELD_OUT_SIZE = 1001, 100

OPTIONS = {
    "min_terms": 3,
    "max_terms": 3,
    "min_digits": 1,
    "max_digits": 1,
    "operators": ["+"],
    "allow_parentheses": False,
    "allow_negation": False,
}


def main() -> None:
    """Write the file, complete or not at all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--size", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=2)
    arguments = parser.parse_args()
    tasks = make_dataset("basic_arithmetic", OPTIONS, size=arguments.size, seed=arguments.seed)
    held_out = make_dataset("basic_arithmetic", OPTIONS, size=HELD_OUT_SIZE, seed=HELD_OUT_SEED)
    hidden = {task["question"] for task in held_out}
    rng = random.Random(arguments.seed)
    templates, weights = zip(*STYLES, strict=True)
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    partial = arguments.file.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as stream:
        for task in tasks:
            if task["question"] in hidden:
                continue
            reply = rng.choices(templates, weights)[0].format(answer=task["answer"])
            messages = [{"role": "user", "content": task["question"]}, {"role": "assistant", "content": reply}]
            stream.write(json.dumps({"messages": messages}) + "\n")
    partial.replace(arguments.file)


if __name__ == "__main__":
    main()
