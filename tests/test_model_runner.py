"""The runner: plans in, tokens out, with sampled tokens left on the device between plans."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from model_rig import Rig, make_smooth, rig_of, text
from safetensors.torch import load_file
from test_model_golden import rig_at
from torch import Tensor

from deepinfer.cache.storage import Caches
from deepinfer.core.plan import PageLoad, Plan, Span
from deepinfer.core.request import TEXT, Request
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.engine.model_runner import ModelRunner
from deepinfer.sampling.random import Purpose, uniform
from deepinfer.sampling.sampler import pick


def request(ids: Sequence[int], params: SamplingParams | None = None, seed: int = 0) -> Request:
    return Request(0, None, tuple(ids), (TEXT,) * len(ids), (), params or SamplingParams(temperature=0), seed)


@dataclass
class Running:
    """A request as a scheduler would see it."""

    ids: list[int]
    start: int
    slot: int
    pages: tuple[int, ...]
    mode: str
    done: int = 0

    def span(self, number: int, count: int, on_device: bool) -> Span:
        """The next rows; the last of them is sampled if no prompt token is left after it."""
        ids = None if on_device else tuple(self.ids[self.done : self.done + count])
        cut = 0 if self.mode == "off" else self.start
        decoder_from = cut if self.mode == "compact" else 0
        return Span(
            number, self.slot, self.done, count, ids, 0, 0, cut, decoder_from, self.done + count >= len(self.ids)
        )


def generate(
    rig: Rig, prompts: Mapping[int, tuple[Sequence[int], int, str]], chunk: int, count: int, on_device: bool
) -> dict[int, list[int]]:
    """Greedy tokens of prompts (ids, replay start, mode) that arrive one step after the other."""
    page_size, pages = 8, 200
    runner = ModelRunner(
        rig.model, Caches(rig.model.config, pages, len(prompts), page_size), rig.model.config.vocab_size
    )
    free = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).tolist()
    running: dict[int, Running] = {}
    made: dict[int, list[int]] = {number: [] for number in prompts}
    waiting, step = list(prompts), 0
    while waiting or any(len(made[number]) < count for number in running):
        new = {}
        if waiting:
            number = waiting.pop(0)
            ids, start, mode = prompts[number]
            taken = tuple(free.pop() for _ in range(-(-(len(ids) + count) // page_size)))
            running[number] = Running(list(ids), start, len(running), taken, mode)
            runner.admit(number, request(ids))
            new = {running[number].slot: taken}
        spans = []
        for number, state in running.items():
            if len(made[number]) < count:
                left = len(state.ids) - state.done
                decodes = left <= 0 or (left == 1 and bool(made[number]))
                spans.append(state.span(number, 1 if decodes else min(chunk, left), decodes and on_device))
        tokens = runner.run(Plan(step, tuple(spans), new)).tokens.tolist()
        for span in spans:
            running[span.request_id].done = span.end
        for span, token in zip([span for span in spans if span.sample], tokens, strict=True):
            made[span.request_id].append(token)
            running[span.request_id].ids.append(token)
        step += 1
    return made


def agreeing(rig: Rig, prompts: Mapping[int, tuple[Sequence[int], int, str]], made: Mapping[int, list[int]]) -> float:
    """Share of tokens that are the reference's best after all tokens before them, under the same replay start."""
    same, count = 0, 0
    for number, (ids, start, mode) in prompts.items():
        every = torch.tensor([[*ids, *made[number][:-1]]])
        replayed = None if mode == "off" else torch.tensor([start])
        with torch.inference_mode():
            output = rig.reference(every, replay_start=replayed, compact=mode == "compact")
        logits = output.logits[0, len(ids) - 1 - output.first :].clone()
        if rig.model.config.image_token_id is not None:
            logits[:, rig.model.config.image_token_id] = -torch.inf
        best = logits.argmax(-1).tolist()
        same, count = same + sum(map(int.__eq__, made[number], best)), count + len(best)
    return same / count


@pytest.mark.parametrize(("chunk", "on_device"), [(1, True), (7, False), (64, True)])
def test_greedy_tokens_are_the_references_on_golden(
    golden_checkpoint: Path, golden: Path, chunk: int, on_device: bool
) -> None:
    rig, held = rig_at(golden_checkpoint), load_file(golden / "text_fp32.safetensors")
    cases = [
        ("text3", 3, "off"),
        ("text17", 17, "off"),
        ("text40", 20, "compact"),
        ("text16", 16, "off"),
        ("text80", 24, "mask"),
    ]
    prompts = {}
    for number, (name, kept, mode) in enumerate(cases):
        ids = held[f"{name}.ids"].tolist()
        prompts[number] = (ids, len(ids) - kept, mode)
    # A value on a rounding tie may move a row, and with it a close decision; the tokens after it are compared as usual.
    assert agreeing(rig, prompts, generate(rig, prompts, chunk, 32, on_device)) > 0.97


@pytest.mark.parametrize("variant", ["all parts", "two ratio-2 sources", "no Engram", "ratio 1 only"])
def test_greedy_tokens_are_the_references(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_smooth(monkeypatch)
    rig = rig_of(variant)
    lengths = [(20, "compact"), (1, "off"), (33, "mask"), (2, "compact"), (9, "off")]
    prompts = {n: (text(rig, length, n), max(0, length - 7), mode) for n, (length, mode) in enumerate(lengths)}
    assert agreeing(rig, prompts, generate(rig, prompts, 5, 64, on_device=True)) == 1


class TestSampling:
    """One step over two prompts, of which rows are sampled, in the plan's order."""

    rig = rig_of("no vision")

    def run(self, params: SamplingParams, vocabulary: int | None = None, seed: int = 0) -> tuple[list[int], Tensor]:
        """(tokens, logits of the same rows) of a prompt of 9 tokens after one of 4."""
        model, ids = self.rig.model, [text(self.rig, 4, 1), text(self.rig, 9, 2)]
        runner = ModelRunner(model, Caches(model.config, 8, 2, 8), vocabulary or model.config.vocab_size)
        spans = []
        for number, prompt in enumerate(ids):
            runner.admit(number, request(prompt, params, seed + number))
            spans.append(Span(number, 1 - number, 0, len(prompt), tuple(prompt), 0, 0, 0, 0, True))
        spans.reverse()
        tokens = runner.run(Plan(0, tuple(spans), {0: (3, 1), 1: (5,)})).tokens.tolist()
        assert runner._caches.newest.tolist() == tokens  # slot 0 holds the longer prompt, which comes first
        with torch.inference_mode():
            logits = [self.rig.reference(torch.tensor([ids[span.request_id]])).logits[0, -1] for span in spans]
        return tokens, torch.stack(logits)

    def test_draws_are_counted_by_seed_and_position(self) -> None:
        tokens, logits = self.run(SamplingParams(temperature=0.8), seed=11)
        numbers = torch.from_numpy(uniform([12, 11], [9, 4], Purpose.SAMPLE))
        weights = (logits - logits.amax(-1, keepdim=True)) / 0.8
        assert tokens == pick(weights, numbers).tolist()

    def test_ids_beyond_the_tokenizer_are_never_sampled(self) -> None:
        _, logits = self.run(SamplingParams(temperature=0))
        best = int(logits.argmax(-1).max())
        tokens, _ = self.run(SamplingParams(temperature=0), vocabulary=best)
        assert max(tokens) < best

    def test_the_image_marker_is_never_sampled(self) -> None:
        rig = rig_of("all parts")
        marker = rig.model.config.image_token_id
        runner = ModelRunner(rig.model, Caches(rig.model.config, 8, 1, 8), marker + 1)
        allowed = runner.sampler._allowed == 0
        assert allowed.tolist() == [token < marker for token in range(rig.model.config.vocab_size)]


class TestPages:
    rig = rig_of("no Engram")

    def runner(self) -> ModelRunner:
        return ModelRunner(self.rig.model, Caches(self.rig.model.config, 6, 3, 4), self.rig.model.config.vocab_size)

    def test_lists_of_pages_reach_their_slots(self) -> None:
        runner = self.runner()
        assert runner.run(Plan(0, (), {2: (4, 1, 3), 0: (5,)})).tokens.tolist() == []
        assert runner._caches.page_table[2, :3].tolist() == [4, 1, 3]
        assert runner._caches.page_table[0, 0] == 5
        runner.run(Plan(1, (), {2: (4, 1)}))
        assert runner._caches.page_table[2, :2].tolist() == [4, 1]

    def test_loads_fill_pages_before_the_rows_run(self) -> None:
        """Pages read from one runner, loaded into another: a decode row behind them gives the same logits."""
        ids = text(self.rig, 9)
        writer, reader = self.runner(), self.runner()
        for runner in (writer, reader):
            runner.admit(0, request(ids))
        cold = Span(0, 0, 0, 9, tuple(ids), 0, 0, 0, 0, True)
        expected = writer.run(Plan(0, (cold,), {0: (0, 1, 2)})).tokens.tolist()
        data = writer._caches.read_pages([0, 1])
        loads = tuple(PageLoad(page, part) for page, part in zip((5, 3), data, strict=True))
        # All rows are run again but nothing is written before position 8: the entries come from the loads.
        warm = Span(0, 1, 0, 9, tuple(ids), 8, 0, 0, 0, True)
        assert reader.run(Plan(0, (warm,), {1: (5, 3, 4)}, loads)).tokens.tolist() == expected
        assert reader._caches.read_pages([5, 3]) == data


def test_a_span_that_cannot_be_sampled_is_refused() -> None:
    rig = rig_of("all parts")
    runner = ModelRunner(rig.model, Caches(rig.model.config, 4, 1, 8), rig.model.config.vocab_size)
    runner.admit(7, request([5, 6]))
    with pytest.raises(ValueError, match="request 7 is to be sampled"):
        runner.run(Plan(0, (Span(7, 0, 0, 2, (5, 6), 0, 0, 9, 9, True),), {0: (0,)}))


def test_a_forgotten_request_leaves_nothing() -> None:
    rig = rig_of("all parts")
    runner = ModelRunner(rig.model, Caches(rig.model.config, 4, 1, 8), rig.model.config.vocab_size)
    runner.admit(7, request([5, 6]))
    runner.forget(7)
    assert not runner._requests
    assert not runner._images
