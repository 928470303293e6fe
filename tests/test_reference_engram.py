"""Engram's constants, hashes, lookback and gate against plain Python with unbounded integers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_models import build, tiny
from released_config import released
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.reference.engram import EngramHashing, Memory, lookback, primes_from, row_ids


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


@given(st.integers(0, 3000), st.integers(0, 60))
def test_primes(start: int, count: int) -> None:
    expected = [number for number in range(start, start + 5000) if is_prime(number)][:count]
    assert primes_from(start, count) == expected


class TestReleasedConstants:
    config = ModelConfig.from_dict(released(), "test")
    hashing = EngramHashing.from_config(config)

    def test_primes_ascend_through_layers_sizes_and_heads(self) -> None:
        flat = self.hashing.primes.flatten().tolist()
        assert self.hashing.primes.shape == (2, 24)
        assert flat == sorted(set(flat))
        assert flat[0] > 16_000_000 - 1
        assert all(is_prime(number) for number in (flat[0], flat[23], flat[47]))
        between = [n for n in range(16_000_000, flat[4]) if is_prime(n)]
        assert between == flat[:4]

    def test_tables_have_the_released_sizes(self) -> None:
        assert self.hashing.primes.sum(1).tolist() == [384_006_168, 384_016_682]

    def test_offsets_are_running_sums(self) -> None:
        for primes, offsets in zip(self.hashing.primes.tolist(), self.hashing.offsets.tolist(), strict=True):
            assert offsets == [sum(primes[:i]) for i in range(24)]

    def test_multipliers_are_odd_and_depend_on_the_layer_id(self) -> None:
        bound = (2**63 - 1) // 99092 // 2
        for layer, found in zip((1, 14), self.hashing.multipliers.tolist(), strict=True):
            drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=4, dtype=np.int64)
            assert found == [2 * int(number) + 1 for number in drawn]


def wrapped(number: int) -> int:
    """A Python integer as int64 arithmetic would leave it."""
    return (number + 2**63) % 2**64 - 2**63


@given(st.data())
def test_rows_against_unbounded_integers(data: st.DataObject) -> None:
    longest, heads = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3))
    columns = (longest - 1) * heads
    ids = data.draw(st.lists(st.integers(0, 2**40), min_size=longest, max_size=longest))
    multipliers = data.draw(st.lists(st.integers(0, 2**62).map(lambda n: n | 1), min_size=longest, max_size=longest))
    primes = data.draw(st.lists(st.sampled_from([97, 101, 16_000_057]), min_size=columns, max_size=columns))
    offsets = [1000 * column for column in range(columns)]
    expected, mixed = [], wrapped(ids[0] * multipliers[0])
    for shift in range(1, longest):
        mixed ^= wrapped(ids[shift] * multipliers[shift])
        for head in range(heads):
            column = (shift - 1) * heads + head
            expected.append(mixed % primes[column] + offsets[column])
    back = [torch.tensor([[number]]) for number in ids]
    found = row_ids(back, torch.tensor(primes), torch.tensor(offsets), torch.tensor(multipliers), heads)
    assert found[0, 0].tolist() == expected


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=12), st.integers(1, 4))
def test_lookback_stops_at_images_and_at_the_start(tokens: list[tuple[int, bool]], size: int) -> None:
    classes, is_text = (torch.tensor([column]) for column in zip(*tokens, strict=True))
    found = lookback(classes, is_text, size, 77)
    for t in range(len(tokens)):
        expected: list[int] = []
        for back in range(size):
            reached = tokens[max(t - back, 0) : t + 1]
            alive = t - back >= 0 and all(text for _, text in reached)
            expected.append(tokens[t - back][0] if alive else 77)
        assert [ids[0, t].item() for ids in found] == expected


class TestLayer:
    model = build(tiny())
    layer = model.layers[0].engram

    def memory(self, tokens: int, images: tuple[int, ...] = ()) -> Memory:
        is_text = torch.ones(1, tokens, dtype=torch.bool)
        is_text[0, list(images)] = False
        classes = torch.randint(0, 90, (1, tokens), generator=torch.Generator().manual_seed(3))
        return Memory(lookback(classes, is_text, 4, 2), is_text)

    def test_formula(self) -> None:
        x, memory = randn(1, 3, 4, 64), self.memory(3)
        out = self.layer(x, memory)
        constants = (self.layer.primes, self.layer.offsets, self.layer.multipliers)
        rows = row_ids(memory.back, *constants, self.layer.heads)
        for t in range(3):
            read = torch.cat([self.layer.embed.weight[row] for row in rows[0, t].tolist()])
            kv = self.layer.wkv.weight @ read
            value = kv[4 * 64 :]
            for s in range(4):
                stream, key = x[0, t, s].double(), kv[s * 64 : (s + 1) * 64].double()
                weight = (self.layer.q_weight[s] * self.layer.k_weight[s]).double()
                d = (stream * weight) @ key * stream.square().mean() ** -0.5 * key.square().mean() ** -0.5 / 8
                gate = torch.sigmoid(d.sign() * d.abs().clamp(min=1e-6).sqrt())
                torch.testing.assert_close(out[0, t, s], (stream + gate * value.double()).float())

    def test_image_tokens_keep_their_streams(self) -> None:
        x = randn(1, 5, 4, 64)
        changed = (self.layer(x, self.memory(5, images=(1, 2))) != x).flatten(2).any(-1)
        assert changed[0].tolist() == [True, False, False, True, True]

    @pytest.mark.parametrize("start", [0, 2, 5])
    def test_a_suffix_looks_back_beyond_its_start(self, start: int) -> None:
        x, memory = randn(1, 5, 4, 64), self.memory(5)
        torch.testing.assert_close(self.layer(x[:, start:], memory.after(start)), self.layer(x, memory)[:, start:])
