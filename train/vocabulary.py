"""Trains the byte-level BPE of the small checkpoint: every protocol spelling, all bytes, every digit on its own.

Writes tokenizer.json and tokenizer_config.json. Deterministic: the same corpus gives the same files.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from deepinfer.text.spellings import BOS, EOS, PAD, PROTOCOL_SPELLINGS
from train.sample import Split, stream
from train.tasks import TaskMaker

ENTRIES = 4096
# The drafter's mask token. The release reuses the system token for it; a token of its own never occurs in a prompt.
NOISE = "<｜noise｜>"
FIRST = (BOS, EOS, PAD)
CONTEXT = 4096
# What the chat format puts into every prompt with thinking on, and into prompts with tools or JSON asked for; tests
# compare it with the encoder's output.
TEMPLATES = (
    "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)",
    "The passkey is 12345. Remember it. What is the passkey? What was the passkey? The code of the red door is 1.",
    "What number is in the image? Which number do you see? Please read the digits.",
)
# Often enough that each word of a template becomes a token.
TEMPLATE_REPEATS = 4000


def build_tokenizer(texts: Iterable[str], entries: int = ENTRIES) -> Tokenizer:
    """Train on texts; exactly `entries` ids, of which 0, 1 and 2 are BOS, EOS and PAD as in the release.

    The other added tokens come last. ValueError if the texts are too few to fill the vocabulary.
    """
    spellings = [spelling for spelling in PROTOCOL_SPELLINGS if spelling.text not in FIRST]
    tokenizer = Tokenizer(models.BPE())
    # Digits one by one, so that arithmetic works on columns and a number is copied digit by digit.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries - len(spellings) - 1,
        min_frequency=2,
        special_tokens=list(FIRST),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(
        [AddedToken(item.text, special=item.special, normalized=item.normalized) for item in spellings]
        + [AddedToken(NOISE, special=True, normalized=False)]
    )
    if tokenizer.get_vocab_size() != entries:
        raise ValueError(f"the texts gave {tokenizer.get_vocab_size()} entries, fewer than {entries}: use more text")
    return tokenizer


def task_texts(count: int, seed: int) -> Iterator[str]:
    """Questions, reasoning and answers of training exercises, without long fillers."""
    maker = TaskMaker(Split.TRAIN)
    rng = stream(Split.TRAIN, "vocabulary", seed)
    for _ in range(count):
        sample = maker.make(rng.choice(("add2", "json", "general")), rng)
        yield from (message["content"] for message in sample.messages)
        yield from (sample.reasoning, sample.answer)


def training_texts(documents: list[str], seed: int, documents_used: int, samples: int) -> Iterator[str]:
    """A sample of the documents and of the exercises, and the fixed text of the chat format."""
    rng = stream(Split.TRAIN, "documents", seed)
    yield from rng.sample(documents, min(documents_used, len(documents)))
    yield from task_texts(samples, seed)
    yield from TEMPLATES * TEMPLATE_REPEATS


def tokenizer_config() -> dict[str, object]:
    """The companion file that other libraries read; BOS is put in front by the chat format, not by the tokenizer."""
    return {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": CONTEXT,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def write_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", "utf-8")
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path("train/data/train.txt"))
    parser.add_argument("--out", type=Path, default=Path("checkpoints/mini"))
    parser.add_argument("--entries", type=int, default=ENTRIES)
    parser.add_argument("--documents", type=int, default=4000, help="documents of the corpus to learn from")
    parser.add_argument("--samples", type=int, default=6000, help="exercises to learn from")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    documents = arguments.corpus.read_text("utf-8").split("\n\f\n")
    texts = training_texts(documents, arguments.seed, arguments.documents, arguments.samples)
    write_tokenizer(build_tokenizer(texts, arguments.entries), arguments.out)


if __name__ == "__main__":
    main()
