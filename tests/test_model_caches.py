"""What the model leaves in its caches, with the real formats, and what it reads back: to the bit."""

import pytest
import torch
from model_rig import Player, Rig, rig_of, text
from torch import Tensor

from deepinfer.cache.storage import Caches
from deepinfer.checkpoint.formats import window_fp8
from deepinfer.core.batch import Batch, Half
from deepinfer.core.plan import Span
from deepinfer.model.batching import arrange
from deepinfer.model.compression import compress, due_entries
from deepinfer.model.reading import LiveEntries
from deepinfer.model.window import extend, plan_windows

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


def span(slot: int, first: int, count: int, floor: int = 0, cut: int = 0, write_from: int = 0) -> Span:
    return Span(slot, slot, first, count, tuple(range(count)), write_from, floor, cut, 0, False)


def halves(*spans: Span) -> tuple[Half, Half]:
    made = arrange(spans, 1, CPU)
    return made.encoder, made.decoder


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("ring", [6, 7, 11])
def test_windows_over_steps(dtype: torch.dtype, ring: int) -> None:
    """Three requests in stretches of many lengths: every row finds exactly its window's keys, rounded once."""
    window, generator = 6, torch.Generator().manual_seed(ring)
    keys = torch.randn(3, 60, 64, generator=generator).to(dtype)
    rings = torch.randint(0, 256, (4, ring, 66), generator=generator, dtype=torch.uint8)
    done = [0, 0, 0]
    for counts in ([5, 1, 20], [1, 1, 1], [2, 13, 2], [1, 1, 1], [7, 7, 7], [1, 30, 1]):
        spans = [span(slot + 1, done[slot], count) for slot, count in enumerate(counts)]
        half, _ = halves(*spans)
        plan = plan_windows(half, window, ring)
        near = extend(rings, keys[half.slots - 1, half.positions], half, plan)
        for group, seen, made in zip(half.groups, plan.seen, near, strict=True):
            for stretch, slot in enumerate(group.slots.tolist()):
                for row in range(group.count):
                    position = int(group.firsts[stretch]) + row
                    wanted = window_fp8(keys[slot - 1, max(0, position + 1 - window) : position + 1])
                    assert seen[stretch, row] == len(wanted)
                    last = window + row
                    assert torch.equal(made[stretch, last - len(wanted) : last], wanted)
                    assert made[stretch, : window - 1 - position].eq(0).all() or position >= window - 1
        done = [position + count for position, count in zip(done, counts, strict=True)]


def test_windows_end_at_floors_and_cuts() -> None:
    encoder, decoder = halves(span(0, 20, 6, floor=18, cut=23))
    assert plan_windows(encoder, 4, 5).seen[0].tolist() == [[3, 4, 4, 4, 4, 4]]
    assert plan_windows(encoder, 4, 5).exists.tolist() == [[False, True, True]]
    assert plan_windows(decoder, 4, 5).seen[0].tolist() == [[3, 4, 4, 1, 2, 3]]


def test_a_half_without_rows_has_an_empty_plan() -> None:
    nothing = Half((), *[torch.empty(0, dtype=torch.int64)] * 3)
    plan = plan_windows(nothing, 4, 5)
    assert (plan.old.shape, plan.exists.shape, plan.seen, len(plan.kept)) == ((0, 3), (0, 3), (), 0)


class TestCompression:
    """Entries and pending pairs of one source, fed in stretches, against the reference's whole pass."""

    rig: Rig = rig_of("two ratio-2 sources")

    @pytest.mark.parametrize("layer", [0, 2, 5])
    @pytest.mark.parametrize("counts", [[30], [1] * 30, [3, 4, 5, 1, 1, 2, 14], [29, 1]], ids=str)
    def test_entries_are_the_references(self, layer: int, counts: list[int]) -> None:
        config, caches = self.rig.model.config, self.caches()
        h = torch.randn(30, config.hidden_size, generator=torch.Generator().manual_seed(layer))
        first = 0
        for count in counts:
            self.compress(h[first : first + count], layer, span(1, first, count), caches)
            first += count
        latents, keys = self.read(layer, caches, 30)
        with torch.inference_mode():
            wanted = self.rig.reference.layers[layer].attn.compress(h[None])
        assert latents.shape == wanted.latents[0].shape
        assert self.share(latents, wanted.latents[0]) > 0.99
        assert self.share(keys, wanted.keys[0]) > 0.99

    def test_nothing_is_written_before_the_due_position(self) -> None:
        for layer, ratio in ((0, 2), (5, 1)):
            for due in (0, 1, 8, 9, 12, 20):
                caches = self.caches()
                before = [cache.clone() for cache in (*caches.latents, *caches.index_keys)]
                self.compress(
                    torch.randn(20, self.rig.model.config.hidden_size), layer, span(1, 0, 20, write_from=due), caches
                )
                source = self.rig.model.config.kv_source_layer_ids.index(layer)
                for cache, old in zip((*caches.latents, *caches.index_keys), before, strict=True):
                    changed = (cache != old).any(-1)[caches.page_table[1]].flatten()[: 20 // ratio]
                    own = cache is caches.latents[source] or cache is caches.index_keys[source]
                    wanted = [own and ratio * entry + ratio - 1 >= due for entry in range(20 // ratio)]
                    assert changed.tolist() == wanted

    def test_other_pages_stay_as_they_are(self) -> None:
        caches = self.caches()
        before = [cache.clone() for cache in (*caches.latents, *caches.index_keys)]
        self.compress(torch.randn(9, self.rig.model.config.hidden_size), 0, span(1, 0, 9), caches)
        mine = caches.page_table[1, :3].tolist()
        others = [page for page in range(caches.pages) if page not in mine]
        for cache, old in zip((*caches.latents, *caches.index_keys), before, strict=True):
            assert torch.equal(cache[others], old[others])

    def test_a_pending_pair_belongs_to_its_slot(self) -> None:
        """Two requests stop at an even token; each goes on from its own."""
        config, caches = self.rig.model.config, self.caches()
        h = torch.randn(2, 6, config.hidden_size, generator=torch.Generator().manual_seed(0))
        for stop in (0, 5):
            rows = torch.cat((h[0, stop : stop + 5], h[1, stop : stop + 5]))
            count = 5 if stop == 0 else 1
            self.compress(rows, 0, span(0, stop, count), caches, span(1, stop, count))
        for slot in (0, 1):
            latents, _ = self.read(0, caches, 6, slot)
            with torch.inference_mode():
                wanted = self.rig.reference.layers[0].attn.compress(h[slot][None]).latents[0]
            assert self.share(latents, wanted) > 0.99

    def caches(self) -> Caches:
        player = Player(self.rig.model, slots=2, page_size=4, pages=40)
        player.caches.page_table[:, :8] = torch.randperm(40)[:16].view(2, 8)
        return player.caches

    @torch.inference_mode()
    def compress(self, h: Tensor, layer: int, first: Span, caches: Caches, *others: Span) -> None:
        model = self.rig.model
        made = arrange([first, *others], caches.pairs.shape[2], CPU)
        nothing = torch.empty(0, dtype=torch.int64)
        batch = Batch(nothing, made.encoder, made.decoder, nothing, nothing, made.singles, made.pairs)
        due = due_entries(model.config.ratio(layer), model._compressed, batch, caches)
        compress(h, layer, model.weights.layers[layer].attention, due, batch, caches, model.config)

    def read(self, layer: int, caches: Caches, tokens: int, slot: int = 1) -> tuple[Tensor, Tensor]:
        """The live latents and keys of one request."""
        entries = LiveEntries(caches, self.rig.model.config, layer, torch.float32)
        (group,) = halves(span(slot, tokens - 1, 1))[0].groups
        every = torch.arange(entries.count(group))[None]
        assert torch.equal(entries.chosen_latents(group, every), entries.latents(group))
        return entries.latents(group)[0], entries.keys(group)[0]

    @staticmethod
    def share(made: Tensor, wanted: Tensor) -> float:
        """How much is equal to the bit: a value on a rounding tie may fall the other way."""
        return (made == wanted).float().mean().item()


def test_engram_history_holds_the_last_tokens() -> None:
    rig = rig_of("all parts")
    player = Player(rig.model, verify_rows=3)
    ids = text(rig, 30)
    number = player.add(ids)
    for count in (1, 2, 9, 1, 1, 16):
        player.step({number: count})
        playing = player.requests[number]
        ring = player.caches.history[playing.slot]
        for position in range(max(0, playing.done - len(ring)), playing.done):
            assert ring[position % len(ring)] == ids[position]
