"""64 greedy tokens of the engine are the reference's, one by one, whatever the batch, chunks, preemption and loop.

Equality to the last token needs prompts whose continuation does not hang on a rounding tie. With those here, and
compact replay, the reference chooses the same tokens in 19 trials that move every weight by about 3e-7 of itself.
The reference is asked once, with prompt and tokens: each token must be its choice after all tokens before it.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.cache.budget import CacheSizes
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.engine.replay import LONGEST_ROLLBACK
from deepinfer.reference.loading import load_reference
from deepinfer.reference.model import ReferenceModel
from deepinfer.text.engram_classes import engram_classes
from deepinfer.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
MINI = ROOT / "checkpoints" / "mini"
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)

SETTINGS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "no drafts": {"nextn": 0},
    "drafts of 2, plain loop": {"nextn": 2, "asynchronous": False},
    "two at a time, chunks of 7, plain loop": {"max_num_seqs": 2, "max_chunk": 7, "asynchronous": False},
    "chunks of 1": {"max_chunk": 1},
    "pages run out": {"short": True, "max_chunk": 64},
    "pages run out, plain loop": {"short": True, "asynchronous": False},
}
PAGE_SIZE, BLOCK = 8, 5  # both checkpoints draft blocks of 5, and verify them whole unless told otherwise


@dataclass(frozen=True)
class Model:
    """A checkpoint with prompts for it."""

    directory: Path
    reference: ReferenceModel
    prompts: tuple[tuple[int, ...], ...]

    def llm(self, short: bool = False, **settings: Any) -> LLM:
        """An engine; `short`: with pages for the prompts, but not for all that follows them."""
        if short:
            pages = sum(len(prompt) // PAGE_SIZE + 3 for prompt in self.prompts)
            sizes = CacheSizes(self.reference.config, 8, PAGE_SIZE, 1 + settings.get("nextn", BLOCK))
            settings |= {"max_num_seqs": 8, "cache_bytes": sizes.total(pages)}
        return LLM(self.directory, page_size=PAGE_SIZE, prefix_cache=False, **settings)


@cache
def load(directory: Path) -> Model:
    reference = load_reference(Checkpoint(directory), engram_classes(Tokenizer.from_file(directory)))
    return Model(directory, reference, mini_prompts() if directory == MINI else golden_prompts())


def golden_prompts() -> tuple[tuple[int, ...], ...]:
    """Random tokens: the golden checkpoint has learnt nothing."""

    def prompt(length: int, seed: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, 471, (length,), generator=torch.Generator().manual_seed(seed)).tolist())

    places = [(50, 17), (33, 59), (20, 19), (3, 0)]
    return tuple(prompt(*place) for place in places)


def mini_prompts() -> tuple[tuple[int, ...], ...]:
    """Pieces of held-out text, up to more than twice as long as the replayed suffix."""
    text = Tokenizer.from_file(MINI).encode((ROOT / "eval" / "heldout.txt").read_text(encoding="utf-8"))
    places = [(350, 1), (150, 0), (30, 2)]
    return tuple((0, *text[5000 * n : 5000 * n + length - 1]) for length, n in places)


@cache
@torch.inference_mode()
def chosen(directory: Path, prompt: tuple[int, ...], tokens: tuple[int, ...], mode: str) -> tuple[int, ...]:
    """What the reference takes after the prompt and, one by one, after each token but the last."""
    reference = load(directory).reference
    keep = reference.config.sliding_window + LONGEST_ROLLBACK
    start = None if mode == "off" else torch.tensor([max(0, len(prompt) - keep)])
    output = reference(torch.tensor([[*prompt, *tokens[:-1]]]), replay_start=start, compact=mode == "compact")
    logits = output.logits[0, -len(tokens) :].clone()
    logits[:, reference.config.image_token_id] = -torch.inf
    return tuple(logits.argmax(-1).tolist())


def check(directory: Path, mode: str, settings: str) -> None:
    model = load(directory)
    llm = model.llm(**SETTINGS[settings])
    made = [output.token_ids for output in llm.generate(model.prompts, GREEDY, use_tqdm=False)]
    assert [len(tokens) for tokens in made] == [64] * len(model.prompts)
    for prompt, tokens in zip(model.prompts, made, strict=True):
        assert tokens == chosen(directory, prompt, tokens, mode)
    assert (llm.statistics.scheduler.preemptions > 0) == settings.startswith("pages run out")


@pytest.mark.parametrize("settings", SETTINGS)
def test_golden(golden_checkpoint: Path, settings: str) -> None:
    check(golden_checkpoint, "compact", settings)


@pytest.mark.parametrize("mode", ["mask", "off"])
def test_golden_in_the_other_modes(golden_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", mode)
    check(golden_checkpoint, mode, "one batch")


@pytest.mark.parametrize("settings", ["one batch", "pages run out, plain loop"])
def test_mini(settings: str) -> None:
    check(MINI, "compact", settings)


def test_mini_without_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "off")
    check(MINI, "off", "one batch")
