"""How the parts of a layer and the layers of the model are put together, step by step as the architecture says."""

import pytest
import torch
from random_models import VARIANTS, build, prompt, tiny
from torch import Tensor

from deepinfer.checkpoint import formats
from deepinfer.reference.attention import Attention, Rows, SharedKV
from deepinfer.reference.engram import Memory, lookback
from deepinfer.reference.model import ReferenceModel
from deepinfer.reference.norm import rms_norm
from deepinfer.reference.rotary import rotate

MODEL = build(tiny())
CONFIG = MODEL.config


def hidden(tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(1, tokens, CONFIG.hidden_size, generator=torch.Generator().manual_seed(seed))


class TestAttentionLayer:
    def test_queries_are_rotated_and_not_normed(self) -> None:
        layer, h = MODEL.layers[0].attn, hidden(5)
        latent, q = layer.queries(h, torch.arange(5))
        expected = rms_norm(h @ layer.wq_a.weight.T, layer.q_norm.weight, CONFIG.rms_norm_eps)
        torch.testing.assert_close(latent, expected)
        heads = (expected @ layer.wq_b.weight.T).view(1, 5, CONFIG.num_attention_heads, CONFIG.head_dim)
        for t in range(5):
            torch.testing.assert_close(q[0, t], rotate(heads[0, t], torch.tensor(t), layer.freqs))

    def test_window_kv_is_normed_rotated_and_rounded(self) -> None:
        layer, h = MODEL.layers[0].attn, hidden(5)
        kv = rms_norm(h @ layer.wkv.weight.T, layer.kv_norm.weight, CONFIG.rms_norm_eps)
        expected = formats.window_fp8(rotate(kv, torch.arange(5), layer.freqs))
        assert torch.equal(layer.keys_values(h, torch.arange(5)), expected)

    @pytest.mark.parametrize("source", CONFIG.kv_source_layer_ids)
    def test_compressed_kv_stands_at_the_position_of_its_first_token(self, source: int) -> None:
        layer: Attention = MODEL.layers[source].attn
        shared = layer.compress(hidden(9))
        latent = layer.compressor(hidden(9))
        at = torch.arange(0, 9 // layer.ratio * layer.ratio, layer.ratio)
        assert torch.equal(shared.latents, formats.latent_nvfp4(rotate(latent, at, layer.freqs)))
        keys = rms_norm(latent @ layer.indexer.wk.weight.T, layer.indexer.k_norm.weight, CONFIG.rms_norm_eps)
        assert torch.equal(shared.keys, formats.index_mxfp4(rotate(keys, at, layer.freqs)))
        assert shared.ratio == layer.ratio == CONFIG.ratio(source)

    def test_compressor_of_single_tokens_has_no_gate(self) -> None:
        single, pairs = MODEL.layers[3].attn.compressor, MODEL.layers[1].attn.compressor
        assert (hasattr(single, "wgate"), hasattr(pairs, "wgate")) == (False, True)
        h = hidden(4)
        torch.testing.assert_close(single(h), rms_norm(h @ single.wkv.weight.T, single.norm.weight, 1e-20))

    def test_index_queries_come_from_the_query_latent(self) -> None:
        layer = MODEL.layers[4].attn
        h, keys = hidden(6), MODEL.layers[3].attn.compress(hidden(6)).keys
        latent, _ = layer.queries(h, torch.arange(6))
        q = (latent @ layer.indexer.wq_b.weight.T).view(1, 6, CONFIG.index_n_heads, CONFIG.index_head_dim)
        q = formats.index_mxfp4(rotate(q, torch.arange(6)[:, None], layer.freqs))
        weights = h @ layer.indexer.weights_proj.weight.T * CONFIG.index_head_dim**-0.5 * CONFIG.index_n_heads**-0.5
        expected = torch.einsum("brhs,brh->brs", torch.einsum("brhd,bsd->brhs", q, keys).relu(), weights)
        found = layer.indexer.scores(h, latent, keys, torch.arange(6), layer.freqs)
        torch.testing.assert_close(found, expected)

    def test_output_is_rotated_back_and_projected_by_groups(self) -> None:
        layer = MODEL.layers[0].attn
        o = torch.randn(1, 3, CONFIG.num_attention_heads, CONFIG.head_dim, generator=torch.Generator().manual_seed(0))
        back = rotate(o, torch.arange(3)[:, None], layer.freqs, inverse=True)
        heads, rank = CONFIG.num_attention_heads // CONFIG.o_groups, CONFIG.o_lora_rank
        parts = []
        for g in range(CONFIG.o_groups):
            weight = layer.wo_a.weight[g * rank : (g + 1) * rank]
            parts.append(back[:, :, g * heads : (g + 1) * heads].flatten(2) @ weight.T)
        expected = torch.cat(parts, dim=-1) @ layer.wo_b.weight.T
        torch.testing.assert_close(layer.output(o, torch.arange(3)), expected)

    def test_layers_between_index_sources_keep_the_selection(self) -> None:
        layer, h = MODEL.layers[2].attn, hidden(6)
        shared = MODEL.layers[1].attn.compress(hidden(6))
        rows = Rows(0, torch.arange(6), torch.zeros(1, 6, dtype=torch.bool))
        MODEL.layers[1].attn(h, rows, shared)
        kept = shared.selection
        assert kept is not None
        layer(hidden(6, seed=1), rows, shared)
        assert shared.selection is kept


class Assembly:
    """The forward pass of one text, layer by layer and stream by stream, from the model's own sub-layers."""

    def __init__(self, model: ReferenceModel, ids: Tensor) -> None:
        self.model, self.config = model, model.config
        is_text = torch.ones_like(ids, dtype=torch.bool)
        back = lookback(model.classes[ids], is_text, self.config.engram_max_ngram_size, model.pad_class)
        self.memory = Memory(back, is_text)
        self.rows = Rows(0, torch.arange(ids.shape[1]), ~is_text)
        self.streams = [model.embed(ids)] * self.config.hc_mult
        self.pre = [1.0] + [0.0] * (self.config.hc_mult - 1)
        self.shared: SharedKV | None = None
        self.features: list[Tensor] = []

    def collapse(self) -> Tensor:
        return sum(p * x for p, x in zip(self.pre, self.streams, strict=True))

    def logits(self) -> Tensor:
        for index in range(self.config.num_hidden_layers):
            self.layer(index)
        return rms_norm(self.collapse(), self.model.norm.weight, 1e-20) @ self.model.head.weight.T

    def layer(self, index: int) -> None:
        layer = self.model.layers[index]
        if self.config.has_engram(index):
            self.streams = list(layer.engram(torch.stack(self.streams, 2), self.memory).unbind(2))
        if index in self.config.dspark_target_layer_ids:
            self.features.append(sum(self.streams) / len(self.streams))
        h = rms_norm(self.collapse(), layer.attn_norm.weight, 1e-20)
        if self.config.kv_source(index) == index:
            self.shared = layer.attn.compress(h)
        y = layer.attn(h, self.rows, self.shared if self.config.ratio(index) else None)
        self.site(layer.hc_attn, y)
        h = rms_norm(self.collapse(), layer.ffn_norm.weight, 1e-20)
        self.site(layer.hc_ffn, layer.ffn(h, self.rows.is_image))

    def site(self, connection: torch.nn.Module, y: Tensor) -> None:
        """Coefficients come from the streams as they stood before the sub-layer; its pre serves the next collapse."""
        pre, post, comb = connection(torch.stack(self.streams, 2))
        old, size = self.streams, range(len(self.streams))
        self.streams = [
            post[..., s, None] * y + sum(comb[..., r, s, None] * old[r] for r in size) for s in size
        ]  # fmt: skip
        self.pre = [pre[..., s, None] for s in size]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_model_is_the_sum_of_its_parts(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Roundings are taken out: another order of summation may round a value the other way."""
    for name in ("attention.window_fp8", "attention.latent_nvfp4", "indexer.index_mxfp4"):
        monkeypatch.setattr(f"deepinfer.reference.{name}", lambda x: x)
    model = build(VARIANTS[variant]())
    ids = prompt(model, 20)
    assembly = Assembly(model, ids)
    out = model(ids)
    torch.testing.assert_close(assembly.logits(), out.logits, atol=1e-4, rtol=1e-4)
    if model.config.draft_stages:
        torch.testing.assert_close(torch.cat(assembly.features, dim=-1), out.features, atol=1e-4, rtol=1e-4)
