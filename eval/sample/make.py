#!/usr/bin/env python3
"""Makes the sample set: three files in the form of the real sets, from seeds, within the bundled checkpoint's reach.

Integers are sums and differences that training has not seen. The questions with choices ask for the first letter of a
word, which the checkpoint knows; that a letter has to follow `ANSWER:` it does not know, and is held to by a regular
expression. Free answers are facts, and numbers in two pictures.
"""

import argparse
import base64
import hashlib
import io
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script: `eval` and `train` lie above it

from PIL import Image

from eval.harness.benchmarks import BENCHMARKS
from eval.harness.hub import CHECKSUMS
from train import facts
from train.digit_images import make_image
from train.sample import Split, stream
from train.tasks import TaskMaker
from train.words import FIRST_NAMES, NOUNS, PRODUCTS

HERE = Path(__file__).resolve().parent
LETTERS = "ABCD"
FACTS = (
    ("What is the capital of {}?", facts.CAPITALS),
    ('What is the opposite of "{}"?', facts.OPPOSITES),
    ('What is the plural of "{}"?', facts.PLURALS),
    ('What is the past tense of "{}"?', facts.PAST),
)


def integers(rng: random.Random) -> Iterator[dict[str, Any]]:
    maker = TaskMaker(Split.EVAL)
    for number in range(BENCHMARKS["aime"].sample_questions):
        exercise = maker.make("add2" if number % 2 else "add3", rng)
        yield {"id": f"sum-{number}", "problem": exercise.messages[0]["content"], "answer": exercise.expected}


def choices(rng: random.Random) -> Iterator[dict[str, Any]]:
    words = [*NOUNS, *PRODUCTS, *map(str.lower, FIRST_NAMES)]
    each = BENCHMARKS["gpqa"].sample_questions // len(LETTERS)
    for letter in LETTERS:
        for number, word in enumerate(rng.sample([word for word in words if word.startswith(letter.lower())], each)):
            question = f'What is the first letter of "{word}"?'
            yield {"id": f"{letter}-{number}", "question": question, "choices": list(LETTERS), "answer": letter}


def free_answers(rng: random.Random) -> Iterator[dict[str, Any]]:
    benchmark = BENCHMARKS["hle"]
    for number in range(benchmark.sample_questions - benchmark.sample_images):
        question, table = FACTS[number % len(FACTS)]
        key = rng.choice(list(table))
        yield {"id": f"fact-{number}", "question": question.format(key), "image": "", "answer": table[key]}
    for number in range(benchmark.sample_images):
        exercise = make_image(rng, Split.EVAL)
        question = exercise.messages[0]["content"][1]["text"]
        picture = data_url(exercise.images[0])
        yield {"id": f"picture-{number}", "question": question, "image": picture, "answer": exercise.expected}


def data_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


MAKERS = {"aime": integers, "gpqa": choices, "hle": free_answers}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="where to put the files (beside this)")
    parser.add_argument("--seed", type=int, default=1, help="other seeds make other questions (default: %(default)s)")
    options = parser.parse_args(arguments)
    sums = []
    for name, maker in MAKERS.items():
        records = maker(stream(Split.EVAL, "sample set", options.seed, name))
        content = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
        (options.out / f"{name}.jsonl").write_bytes(content)
        sums.append(f"{hashlib.sha256(content).hexdigest()}  {name}.jsonl\n")
    (options.out / CHECKSUMS).write_text("".join(sums), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
