"""LLM.generate against the reference model run step by step, and what batches, stops and limits do."""

import shutil
from pathlib import Path

import pytest
import tiny
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.reference.loading import load_reference
from deepinfer.text.engram_classes import engram_classes
from deepinfer.text.tokenizer import Tokenizer

PROMPTS = [
    "The first",
    "a",
    "When the table is larger than the memory, its rows are fetched ahead of time, since they depend on ids alone.",
    "def add(left, right):\n    return left + right\n",
]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def golden_llm(golden_checkpoint: Path) -> LLM:
    """Without a prefix cache: behind a hit, values differ a little by design."""
    return LLM(golden_checkpoint, prefix_cache=False)


@pytest.fixture(scope="module")
def tiny_llm(tiny_checkpoint: Path) -> LLM:
    return LLM(tiny_checkpoint)


def greedy_by_hand(directory: Path, ids: list[int], steps: int, keep: int | None, compact: bool) -> list[int]:
    """Recompute everything for every token of one sequence; the decoder half starts `keep` tokens before its end."""
    checkpoint = Checkpoint(directory)
    model = load_reference(checkpoint, engram_classes(Tokenizer.from_file(directory)))
    start = None if keep is None else torch.tensor([max(0, len(ids) - keep)])
    tokens = list(ids)
    for _ in range(steps):
        logits = model(torch.tensor([tokens]), replay_start=start, compact=compact).logits[0, -1]
        logits[model.config.image_token_id] = -torch.inf
        tokens.append(int(logits.argmax()))
    return tokens[len(ids) :]


@pytest.mark.parametrize(
    ("mode", "keep", "compact"), [("off", None, False), ("mask", 28, False), ("compact", 28, True)], ids=str
)
def test_greedy_tokens_are_the_argmax_of_the_reference_model(
    golden_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, mode: str, keep: int | None, compact: bool
) -> None:
    monkeypatch.setenv("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", mode)
    ids = [0, *Tokenizer.from_file(golden_checkpoint).encode(PROMPTS[2])]
    assert len(ids) > 40
    output = LLM(golden_checkpoint).generate(ids, GREEDY, use_tqdm=False)[0]
    assert list(output.token_ids) == greedy_by_hand(golden_checkpoint, ids, GREEDY.max_tokens or 0, keep, compact)
    assert output.prompt_token_ids == tuple(ids)


def test_a_batch_gives_each_prompt_what_it_gets_alone(golden_llm: LLM) -> None:
    params = [GREEDY, SamplingParams(temperature=1.0, max_tokens=7, seq_seed=3), GREEDY, GREEDY]
    together = golden_llm.generate(PROMPTS, params, use_tqdm=False)
    alone = [golden_llm.generate(p, s, use_tqdm=False)[0] for p, s in zip(PROMPTS, params, strict=True)]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert [output.text for output in together] == [output.text for output in alone]
    assert [output.index for output in together] == [0, 1, 2, 3]
    assert [output.prompt for output in together] == PROMPTS


@pytest.mark.parametrize(("rows", "tokens"), [(1, 4096), (2, 60)], ids=["one row", "two rows, 60 tokens"])
def test_smaller_batches_change_nothing(golden_llm: LLM, golden_checkpoint: Path, rows: int, tokens: int) -> None:
    small = LLM(golden_checkpoint, max_num_seqs=rows, max_num_batched_tokens=tokens, prefix_cache=False)
    expected = golden_llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert small.generate(PROMPTS, GREEDY, use_tqdm=False) == expected


def test_a_seed_repeats_a_sample_and_another_seed_does_not(tiny_llm: LLM) -> None:
    def sample(seed: int | None) -> tuple[int, ...]:
        params = SamplingParams(temperature=1.0, max_tokens=16, seq_seed=seed, ignore_eos=True)
        return tiny_llm.generate("Once", params, use_tqdm=False)[0].token_ids

    assert sample(1) == sample(1)
    assert len({sample(1), sample(2), sample(None), sample(None)}) == 4


def test_text_gets_the_beginning_of_sequence_token_and_ids_are_taken_as_they_are(tiny_llm: LLM) -> None:
    from_text, from_ids = (tiny_llm.generate(p, GREEDY, use_tqdm=False)[0] for p in ("ab", [5, 6, 7]))
    bos = tiny.config_json(Tokenizer(tiny.tokenizer_json()))["bos_token_id"]
    assert from_text.prompt_token_ids[0] == bos
    assert from_text.num_prompt_tokens == 3
    assert from_ids.prompt_token_ids == (5, 6, 7)
    assert from_ids.prompt is None


def test_a_stop_token_ends_the_request_and_stays_out_of_the_text(tiny_llm: LLM) -> None:
    free = tiny_llm.generate("Once", GREEDY, use_tqdm=False)[0]
    assert free.finish_reason == "length"
    assert free.outputs[0].num_tokens == len(free.token_ids) == 12
    place = 4
    stop = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[free.token_ids[place]])
    stopped = tiny_llm.generate("Once", stop, use_tqdm=False)[0]
    end = free.token_ids.index(free.token_ids[place]) + 1
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[:end]
    assert stopped.text == Tokenizer(tiny.tokenizer_json()).decode(free.token_ids[: end - 1])


def test_the_end_of_sequence_token_ends_a_request_unless_ignored(
    tiny_llm: LLM, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """The token that comes third anyway is declared the end of the sequence."""
    third = tiny_llm.generate("Once", GREEDY, use_tqdm=False)[0].token_ids[2]
    copy = shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    tiny.edit_config(copy, None, eos_token_id=third)
    llm = LLM(copy)
    ended = llm.generate("Once", SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)[0]
    ignored = llm.generate("Once", GREEDY, use_tqdm=False)[0]
    assert (ended.finish_reason, ended.token_ids[-1]) == ("stop", third)
    assert len(ended.token_ids) <= 3
    assert (ignored.finish_reason, len(ignored.token_ids)) == ("length", 12)


def test_generation_ends_where_the_context_does(tiny_llm: LLM) -> None:
    output = tiny_llm.generate(
        [5] * (tiny_llm.config.max_position_embeddings - 4), SamplingParams(0, None, ignore_eos=True), use_tqdm=False
    )[0]
    assert (len(output.token_ids), output.finish_reason) == (4, "length")


def test_the_image_marker_is_never_generated(tiny_llm: LLM) -> None:
    marker = tiny.config_json(Tokenizer(tiny.tokenizer_json()))["image_token_id"]
    params = [SamplingParams(temperature=1e6, max_tokens=12, ignore_eos=True, seq_seed=seed) for seed in range(64)]
    outputs = tiny_llm.generate(["x"] * 64, params, use_tqdm=False)
    tokens = [token for output in outputs for token in output.token_ids]
    assert len(tokens) == 64 * 12
    assert len(set(tokens)) > 200  # almost uniform over 267 tokens: the marker would have come 2.9 times
    assert marker not in tokens


def test_no_prompts_give_no_outputs(tiny_llm: LLM) -> None:
    assert tiny_llm.generate([], use_tqdm=False) == []
    assert tiny_llm.chat([], use_tqdm=False) == []


def test_the_progress_bar_tells_requests_and_tokens(tiny_llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_llm.generate(["a", "b"], SamplingParams(0, 3, ignore_eos=True))
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "6 tokens" in shown
    tiny_llm.generate("a", GREEDY, use_tqdm=False)
    tiny_llm.generate([])
    assert capsys.readouterr().err == ""


def test_the_default_model_is_the_one_that_the_environment_names(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", str(tiny_checkpoint))
    assert len(LLM().generate("a", GREEDY, use_tqdm=False)[0].token_ids) == 12
