"""A request behind a cached prefix: only its last window is run again, with writes suppressed, from a stated floor.

The oracle is the reference, layer by layer by hand: true compressed KV of the prefix, and rows that begin at the floor.
"""

from collections.abc import Sequence

import pytest
import torch
from model_rig import Player, Rig, make_smooth, rig_of, text
from torch import Tensor

from deepinfer.reference import attention
from deepinfer.reference.attention import Attention, Rows, SharedKV
from deepinfer.reference.engram import Memory, lookback
from deepinfer.reference.hyper import collapse
from deepinfer.reference.model import Trace
from deepinfer.reference.rotary import rotate
from deepinfer.text.images import TEXT, ImageInput

LIMIT = 2e-5
VARIANTS = ["all parts", "two ratio-2 sources", "candidates of pairs", "ratio 2 only", "no Engram"]


@pytest.fixture(autouse=True)
def smooth(monkeypatch: pytest.MonkeyPatch) -> None:
    make_smooth(monkeypatch)


@torch.inference_mode()
def simulate(
    rig: Rig, ids: list[int], hit: int, floor: int, cut: int, compact: bool,
    types: list[int] | None = None, images: Sequence[ImageInput] = (),
) -> tuple[int, Tensor]:  # fmt: skip
    """(first decoder row, logits [R, vocab]) of a request whose first `hit` tokens are cached."""
    model, config = rig.reference, rig.reference.config
    cold, every = Trace(), torch.tensor([ids])
    kinds = torch.tensor([types or [TEXT] * len(ids)], dtype=torch.int8)
    model(every, kinds, images, trace=cold)
    is_text = kinds == TEXT
    memory = Memory(lookback(model.classes[every], is_text, config.engram_max_ngram_size, model.pad_class), is_text)
    memory = memory.after(floor)
    rows = Rows(floor, torch.arange(floor, len(ids)), ~is_text[:, floor:])
    x = model.embed_tokens(every, kinds, model.embed_images(images) if images else None)[:, floor:]
    x = x[..., None, :].expand(-1, -1, config.hc_mult, -1)
    p = torch.zeros(x.shape[:-1])
    p[..., 0] = 1
    shared = None
    for number, layer in enumerate(model.layers):
        x = layer.remember(x, memory)
        h = layer.attention_input(x, p)
        if number in config.kv_source_layer_ids:
            shared = continued(layer.attn, cold.shared[number], h, hit, floor)
        if number == config.decoder_start:
            first = cut if compact else floor
            rows, memory = rows.after(first, torch.tensor([cut])), memory.after(first - floor)
            x, p, h = x[:, first - floor :], p[:, first - floor :], h[:, first - floor :]
        x, p, _ = layer(x, h, rows, shared if config.ratio(number) else None)
    return rows.first, model.logits(model.norm(collapse(x, p)))[0]


def continued(attn: Attention, cold: SharedKV, h: Tensor, hit: int, floor: int) -> SharedKV:
    """The prefix's own entries, then those that rows from `floor` on complete at or after the hit."""
    ratio = attn.ratio
    first = -(-floor // ratio)
    latent = attn.compressor(h[:, first * ratio - floor :])
    positions = (first + torch.arange(latent.shape[1])) * ratio
    rotated = attention.latent_nvfp4(rotate(latent, positions, attn.freqs))
    fresh = SharedKV(rotated, attn.indexer.keys(latent, positions, attn.freqs), ratio)
    kept, skipped = hit // ratio, hit // ratio - first
    return SharedKV(
        torch.cat((cold.latents[:, :kept], fresh.latents[:, skipped:]), 1),
        torch.cat((cold.keys[:, :kept], fresh.keys[:, skipped:]), 1),
        ratio,
    )


def follow(player: Player, ids: list[int], hit: int, start: int, mode: str) -> int:
    """Begin a request whose first `hit` tokens another one, which ran cold, has left in pages; copies just those."""
    config, caches = player.model.config, player.caches
    cut = 0 if mode == "off" else start
    floor = max(0, min(hit, cut) - config.sliding_window)
    cold = player.add(ids[:hit])
    player.run(cold, 9)
    number = player.add(ids, mode, start, floor=floor, write_from=hit)
    while player.requests[number].done < hit:  # pages for the prefix, without running anything
        player.span(number, 1)
        player.requests[number].done += 1
    player.requests[number].done = floor
    for source, layer in enumerate(config.kv_source_layer_ids):
        for cache in (caches.latents[source], caches.index_keys[source]):
            for entry in range(hit // config.ratio(layer)):
                page, place = divmod(entry, cache.shape[1])
                cache[player.requests[number].pages[page], place] = cache[player.requests[cold].pages[page], place]
    player.end(cold)
    return number


def entries(player: Player, number: int, tokens: int) -> list[Tensor]:
    """The stored entries of a request's first tokens."""
    pages, found = player.requests[number].pages, []
    for source, layer in enumerate(player.model.config.kv_source_layer_ids):
        for cache in (player.caches.latents[source], player.caches.index_keys[source]):
            found.append(cache[pages].flatten(0, 1)[: tokens // player.model.config.ratio(layer)].clone())
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mode", ["compact", "mask"])
@pytest.mark.parametrize(
    ("hit", "start"),
    [(16, 20), (24, 27), (24, 20), (24, 11), (8, 30), (16, 17), (39, 30), (17, 20), (7, 9)],
    ids=lambda value: str(value),
)
@pytest.mark.slow
def test_replay_behind_a_hit(variant: str, mode: str, hit: int, start: int) -> None:
    """Hits before and behind the replay start, odd ones too, so that a pair straddles the boundary."""
    rig = rig_of(variant)
    ids = text(rig, 40, seed=hit)
    for chunk in (1, 64) if variant == "all parts" else (5,):
        player = Player(rig.model, page_size=8)
        number = follow(player, ids, hit, start, mode)
        before = entries(player, number, hit)
        playing = player.run(number, chunk)
        first, logits = simulate(rig, ids, hit, playing.floor, playing.cut, mode == "compact")
        assert sorted(playing.logits) == list(range(first, 40))
        made = torch.stack([playing.logits[position] for position in range(first, 40)])
        seen = range(start - first, 40 - first)  # in mask mode rows before the cut may lack keys of the window
        assert ((made - logits).norm(dim=-1) / logits.norm(dim=-1))[seen].max() < LIMIT
        assert all(torch.equal(*pair) for pair in zip(before, entries(player, number, hit), strict=True))


def test_without_replay_rows_a_hit_changes_nothing() -> None:
    """Mode off replays from the beginning: the same values as without a hit."""
    rig = rig_of("all parts")
    ids = text(rig, 30)
    player = Player(rig.model)
    number = follow(player, ids, 16, 0, "off")
    playing = player.run(number, 7)
    wanted = rig.reference(torch.tensor([ids])).logits[0]
    made = torch.stack([playing.logits[position] for position in range(30)])
    assert ((made - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max() < LIMIT


def test_a_hit_beside_decoding_requests() -> None:
    """Replayed rows share the step with decode rows and a cold prompt."""
    rig = rig_of("all parts")
    ids, other = text(rig, 40), text(rig, 30, seed=8)
    player = Player(rig.model)
    busy = player.add(other, "compact", 12)
    player.step({busy: 20})
    number = follow(player, ids, 24, 27, "compact")
    cold = player.add(other, "compact", 12)
    player.step({busy: 1, number: 13, cold: 8})
    player.step({busy: 1, number: 40 - player.requests[number].done, cold: 22})
    first, logits = simulate(rig, ids, 24, player.requests[number].floor, 27, True)
    made = torch.stack([player.requests[number].logits[position] for position in range(first, 40)])
    assert ((made - logits).norm(dim=-1) / logits.norm(dim=-1)).max() < LIMIT
    for position in (20, 21):
        wanted = player.requests[cold].logits[position]
        assert torch.allclose(player.requests[busy].logits[position], wanted, atol=1e-4)


def test_the_floor_is_felt() -> None:
    """The oracle itself: a replay differs from a cold run, else these tests would show nothing."""
    rig = rig_of("all parts")
    ids = text(rig, 40)
    _, replayed = simulate(rig, ids, 24, 18, 30, True)
    cold = rig.reference(torch.tensor([ids]), replay_start=torch.tensor([30]), compact=True).logits[0]
    assert (replayed - cold).norm() / cold.norm() > 1e-4
