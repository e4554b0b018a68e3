"""Vocabularies of different widths, and arithmetic that could go wrong."""

import math
from types import SimpleNamespace

import pytest
import torch

from kv_cache import KVCache
from model import Config, Layer, Linear
from speculative import DraftModel, warp
from toys import Scripted, Toy, decode, one_hot, oracle, qwen2


def test_a_wider_draft():  # B38, the other way round
    target, draft = Toy(lambda seen: one_hot(3, 8), vocab=8), Toy(lambda seen: one_hot(11, 12))
    g = torch.Generator().manual_seed(0)
    for temperature in (0.0, 1.0):
        drafter = DraftModel(draft, 99, temperature, generator=g, vocab=8)
        assert max(decode(target, drafter, [0], 30, temperature=temperature, generator=g)[0]) < 8


def test_cached_rows_are_the_rows_of_one_pass():  # B56, B59
    model, ids = qwen2(), torch.arange(7)
    whole = model(ids, model.new_cache(9), 7)
    cache = model.new_cache(9)
    model(ids[:3], cache, 0)
    torch.testing.assert_close(model(ids[3:], cache, 4), whole[3:], atol=1e-5, rtol=0)
    cache.rollback(3)
    ids[5] = 100
    changed = model(ids[3:], cache, 4)  # the future is out of sight, and nothing else is
    torch.testing.assert_close(changed[:2], whole[3:5], atol=1e-5, rtol=0)
    assert (changed[2:] - whole[5:]).abs().amax(-1).min() > 1e-3


def test_a_long_prompt_in_pieces():
    model, ids = qwen2(), torch.arange(700) % 128
    model.config.max_position_embeddings = 1024
    cache = model.new_cache(700)
    for id in ids[:-2].split(1):
        model(id, cache, 0)
    torch.testing.assert_close(model(ids[-2:], cache, 2), model(ids, model.new_cache(700), 2), atol=1e-4, rtol=0)


def test_float16_attention_does_not_overflow():  # B58: 128 channels of 40 x 40 are 204,800, and float16 ends at 65,504
    c = Config(1, 128, 96, 1, 1, 128, 128, 64, 1e-6, 10000.0, True, True, {}, [])
    values = {"q_proj": torch.full((384, 128), 40 / 128), "o_proj": torch.eye(128)}
    values |= {"gate_proj": torch.zeros(192, 128), "down_proj": torch.zeros(128, 96)}
    weights = SimpleNamespace(
        take=lambda name, size: torch.ones(size).half(),
        linear=lambda at, inputs, bias=False, **outputs: Linear(values[next(iter(outputs))].half()),
    )
    layer = Layer(c, weights, 0)
    cache, rope = KVCache(1, 1, 128, 4, torch.float16), (torch.ones(2, 128).half(), torch.zeros(2, 128).half())
    out = layer(torch.ones(2, 128).half(), 0, cache, rope, torch.ones(2, 2, dtype=torch.bool).tril())
    torch.testing.assert_close(out, torch.full((2, 128), 41.0).half(), atol=0.1, rtol=0)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e6])
def test_extreme_temperatures(temperature):  # B26
    probs = warp(torch.tensor([[2.0, 1.0, -50.0]]), temperature, 0, 1.0)
    assert torch.isfinite(probs).all() and abs(probs.sum() - 1) < 1e-6


def test_warp_keeps_ties():
    tied = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    assert warp(tied, 1.0, 2, 1.0).tolist()[0] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert warp(tied, 1.0, 0, 0.1).tolist()[0] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert warp(tied, 1.0, 9, 1.0).sum() == pytest.approx(1)  # top_k beyond the vocabulary


def test_seeds():  # B26, B27
    model, before = qwen2(), torch.get_rng_state()

    def sample(seed, temperature):
        g = torch.Generator().manual_seed(seed)
        return decode(
            model, DraftModel(model, 99, temperature, generator=g), [5], 20, temperature=temperature, generator=g
        )[0]

    assert sample(1, 1.0) == sample(1, 1.0) != sample(2, 1.0)
    assert sample(1, 0.0) == sample(2, 0.0) == oracle(model, [5], 20)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_is_never_a_token(temperature):  # B58
    for broken in ([math.nan] * 8, [math.inf] + [0.0] * 7, [0.0] * 7 + [math.nan]):
        with pytest.raises(FloatingPointError, match="NaN"):
            target = Toy(lambda seen, broken=broken: broken)
            decode(target, Scripted([1, 2]), [3], 4, 2, temperature=temperature, generator=torch.Generator())
