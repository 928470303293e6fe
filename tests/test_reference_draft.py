"""The drafter: what a block sees, its parallel pass and its serial tail."""

import pytest
import torch
from random_models import build, prompt, tiny
from torch import Tensor

from deepinfer.reference import attention
from deepinfer.reference.attention import attend
from deepinfer.reference.draft import Draft, draft_context, finish_greedily
from deepinfer.reference.hyper import collapse, expand
from deepinfer.reference.model import ReferenceModel

MODEL = build(tiny())
CONFIG = MODEL.config
WINDOW, BLOCK = CONFIG.sliding_window, CONFIG.dspark_block_size
IDS = prompt(MODEL, 20)[0]
FEATURES = MODEL(IDS[None]).features[0]


def draft(ids: Tensor, features: Tensor, *anchors: int, model: ReferenceModel = MODEL) -> Draft:
    return model.draft(ids, features, torch.tensor(anchors))


def same(actual: Draft, expected: Draft) -> None:
    assert torch.equal(actual.tokens, expected.tokens)
    for one, other in zip(actual[1:], expected[1:], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def differ(actual: Draft, expected: Draft) -> bool:
    return not torch.allclose(actual.base_logits, expected.base_logits, atol=1e-3)


@pytest.fixture(autouse=True)
def smooth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without roundings, runs over other numbers of rows agree closely."""
    monkeypatch.setattr(attention, "window_fp8", lambda x: x)


class TestWhatABlockSees:
    anchor = 12

    def test_shapes(self) -> None:
        block = draft(IDS, FEATURES, 12, 5, 0)
        assert block.tokens.shape == block.confidence.shape == (3, BLOCK)
        assert block.base_logits.shape == block.logits.shape == (3, BLOCK, CONFIG.vocab_size)
        assert block.logits.dtype is block.confidence.dtype is torch.float32

    def test_features_of_the_anchor_and_later_tokens_are_not_read(self) -> None:
        other = FEATURES.clone()
        other[self.anchor :] = torch.nan
        same(draft(IDS, other, self.anchor), draft(IDS, FEATURES, self.anchor))
        same(draft(IDS, FEATURES[: self.anchor], self.anchor), draft(IDS, FEATURES, self.anchor))

    def test_tokens_other_than_the_anchor_are_not_read(self) -> None:
        other = torch.full_like(IDS, 7)
        other[self.anchor] = IDS[self.anchor]
        same(draft(other, FEATURES, self.anchor), draft(IDS, FEATURES, self.anchor))
        other[self.anchor] = 8
        assert differ(draft(other, FEATURES, self.anchor), draft(IDS, FEATURES, self.anchor))

    @pytest.mark.parametrize("back", [1, 2, WINDOW, WINDOW + 1, WINDOW + 2])
    def test_the_context_is_the_window_before_the_anchor(self, back: int) -> None:
        other = FEATURES.clone()
        other[self.anchor - back] += 1
        assert differ(draft(IDS, other, self.anchor), draft(IDS, FEATURES, self.anchor)) == (back <= WINDOW)

    @pytest.mark.parametrize("anchor", [0, 1, WINDOW - 1])
    def test_near_the_start_the_context_is_shorter(self, anchor: int) -> None:
        same(draft(IDS, FEATURES[: max(anchor, 1)], anchor), draft(IDS, FEATURES, anchor))

    def test_anchors_do_not_mix(self) -> None:
        together = draft(IDS, FEATURES, 3, 12, 19)
        for row, anchor in enumerate((3, 12, 19)):
            same(Draft(*(part[row : row + 1] for part in together)), draft(IDS, FEATURES, anchor))


class TestStage:
    def keys_of(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The arguments (q, keys, mask) of every attention of one draft."""
        seen: list[tuple[Tensor, Tensor, Tensor]] = []

        def watch(q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
            seen.append((q, keys, mask))
            return attend(q, keys, mask, sink)

        monkeypatch.setattr("deepinfer.reference.draft.attend", watch)
        draft(IDS, FEATURES, 12, 2)
        return seen

    def test_all_rows_see_the_window_and_the_whole_block(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = self.keys_of(monkeypatch)
        assert len(seen) == CONFIG.draft_stages
        for _, keys, mask in seen:
            keys, mask = keys.expand(2, -1, -1, -1), mask.expand(2, -1, -1)
            assert keys.shape[2] == WINDOW + BLOCK
            assert torch.equal(keys, keys[:, :1].expand_as(keys))
            expected = [[True] * (WINDOW + BLOCK), [False] * (WINDOW - 2) + [True] * (2 + BLOCK)]
            assert mask[:, 0].tolist() == expected
            assert torch.equal(mask, mask[:, :1].expand_as(mask))

    def test_context_keys_come_from_features_without_attn_norm(self) -> None:
        contexts = draft_context(MODEL.mtp, FEATURES[None], torch.arange(20))
        first = MODEL.mtp[0]
        vectors = first.main_norm(FEATURES @ first.main_proj.weight.T)
        for stage, found in zip(MODEL.mtp, contexts, strict=True):
            expected = stage.attn.keys_values(vectors, torch.arange(20))
            torch.testing.assert_close(found[0], expected)

    def test_inputs_are_the_anchor_and_noise_at_consecutive_positions(self) -> None:
        contexts = draft_context(MODEL.mtp, FEATURES[None], torch.arange(20))
        windows = [keys[:, 12 - WINDOW : 12] for keys in contexts]
        noise = [CONFIG.dspark_noise_token_id] * (BLOCK - 1)
        inputs = MODEL.embed(torch.tensor([[IDS[12].item(), *noise]]))
        at, mask = torch.arange(12, 12 + BLOCK)[None], torch.ones(1, WINDOW, dtype=torch.bool)
        x, p = inputs[:, :, None].expand(-1, -1, CONFIG.hc_mult, -1), torch.tensor([1.0, 0, 0, 0]).expand(1, BLOCK, -1)
        for stage, window in zip(MODEL.mtp, windows, strict=True):
            x, p = stage(x, p, window, mask, at)
        base = MODEL.logits(MODEL.mtp[-1].norm(collapse(x, p)))
        torch.testing.assert_close(base, draft(IDS, FEATURES, 12).base_logits, atol=1e-4, rtol=1e-4)

    def test_a_stage_is_put_together_as_a_layer(self) -> None:
        """Attention over all keys without causality, then experts, each site with the previous one's pre-mix."""
        stage, at = MODEL.mtp[0], torch.arange(12, 12 + BLOCK)
        x = torch.randn(1, BLOCK, CONFIG.hc_mult, 64, generator=torch.Generator().manual_seed(0))
        p = torch.rand(1, BLOCK, CONFIG.hc_mult, generator=torch.Generator().manual_seed(1))
        (context, *_) = draft_context(MODEL.mtp, FEATURES[None, 12 - WINDOW : 12], torch.arange(12 - WINDOW, 12))
        h = stage.attn_norm(collapse(x, p))
        _, q = stage.attn.queries(h, at)
        keys = torch.cat((context, stage.attn.keys_values(h, at)), dim=1)
        o = []
        for row in range(BLOCK):
            mask = torch.ones(1, 1, WINDOW + BLOCK, dtype=torch.bool)
            o.append(attend(q[:, row : row + 1], keys[:, None], mask, stage.attn.attn_sink))
        mix = stage.hc_attn(x)
        middle = expand(stage.attn.output(torch.cat(o, dim=1), at), x, mix)
        after = stage.hc_ffn(middle)
        y = stage.ffn(stage.ffn_norm(collapse(middle, mix.pre)), torch.zeros(1, BLOCK, dtype=torch.bool))
        found, pre = stage(x, p, context, torch.ones(1, WINDOW, dtype=torch.bool), at[None])
        torch.testing.assert_close(found, expand(y, middle, after), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(pre, after.pre)

    def test_the_pre_mix_starts_with_the_first_stream(self) -> None:
        """Every stream starts as the embedding, so only the sum of the first pre-mix matters, and it is 1."""
        seen: list[Tensor] = []
        hook = MODEL.mtp[0].register_forward_pre_hook(lambda _, arguments: seen.extend(arguments[:2]))
        draft(IDS, FEATURES, 12)
        hook.remove()
        streams, pre = seen
        assert torch.equal(streams, streams[:, :, :1].expand_as(streams))
        assert pre.tolist() == [[[1, 0, 0, 0]] * BLOCK]


class TestSerialTail:
    last = MODEL.mtp[-1]

    def test_each_token_biases_the_next(self) -> None:
        block = draft(IDS, FEATURES, 12)
        previous = IDS[12].item()
        for i in range(BLOCK):
            embedded = self.last.markov_head.embed.weight[previous]
            logits = block.base_logits[0, i] + self.last.markov_head.head.weight @ embedded
            torch.testing.assert_close(block.logits[0, i], logits)
            previous = block.tokens[0, i].item()
            assert previous == logits.argmax().item()

    def test_confidence_reads_rows_before_the_norm(self) -> None:
        x = torch.randn(1, BLOCK, 64, generator=torch.Generator().manual_seed(0))
        base = torch.randn(1, BLOCK, CONFIG.vocab_size, generator=torch.Generator().manual_seed(1))
        block = finish_greedily(self.last, x, base, torch.tensor([9]))
        previous = [9, *block.tokens[0, :-1].tolist()]
        weight = self.last.confidence_head.proj.weight[0]
        for i, token in enumerate(previous):
            joined = torch.cat((x[0, i], self.last.markov_head.embed.weight[token]))
            torch.testing.assert_close(block.confidence[0, i], weight @ joined)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_any_number_of_stages(stages: int) -> None:
    model = build(tiny(num_nextn_predict_layers=stages, compress_ratios=[0, 2, 2, 1, 1, 1] + [0] * stages))
    block = draft(IDS, model(IDS[None]).features[0], 19, model=model)
    assert bool(block.logits.isfinite().all())
    assert [hasattr(stage, "main_proj") for stage in model.mtp] == [True] + [False] * (stages - 1)
    assert [hasattr(stage, "markov_head") for stage in model.mtp] == [False] * (stages - 1) + [True]
