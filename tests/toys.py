"""The small models and drafters of the tests, built so that a wrong row, cache or rule changes the answer."""

import math

import pytest
import torch

from kv_cache import KVCache
from model import Config, Layer, Linear, Qwen2
from speculative import speculative_decode

exact_only = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="needs FBGEMM, which this CPU or torch lacks"
)


class Toy:
    """A model that is a function: logits(tokens seen so far) -> one number per id.

    It keeps its tokens in a real KVCache, as keys, and sees what the cache shows: stale and missing rows change what it
    says. `fed` lists what it was given in each call.
    """

    def __init__(self, logits, context=10**6, vocab=None):
        self.logits, self.context, self.vocab, self.fed, self.caches = logits, context, vocab, [], []

    def new_cache(self, max_length):
        self.caches.append(KVCache(1, 1, 1, min(max_length, self.context)))
        return self.caches[-1]

    def __call__(self, ids, cache, last):
        assert self.vocab is None or ids.max() < self.vocab, "an id that this model has no embedding for"
        self.fed.append(ids.tolist())
        seen, _ = cache.append(0, ids.float().view(1, -1, 1), ids.float().view(1, -1, 1))
        cache.advance(len(ids))
        seen = seen.flatten().long().tolist()
        rows = [self.logits(seen[: len(seen) - last + 1 + i]) for i in range(last)]
        return torch.tensor(rows, dtype=torch.float32)  # [last, vocab]


def one_hot(id, vocab):
    return [10.0 * (i == id) for i in range(vocab)]


def chain():
    """F1: after id comes (id + 1) mod 8."""
    return Toy(lambda seen: one_hot((seen[-1] + 1) % 8, 8))


def history():
    """F2: the sum of all tokens in sight, mod 7. From [1, 2] comes 3, 6, 5, 3, 6, 5."""
    return Toy(lambda seen: one_hot(sum(seen) % 7, 7))


def table(rows):
    """F3: log-probabilities by the last token; one row for all, if there is only one."""
    rows = [[math.log(p) if p else -math.inf for p in row] for row in rows]
    return Toy(lambda seen: rows[seen[-1] % len(rows)])


def qwen2(seed=0, dtype=torch.float32, vocab=128):
    """F4: a random Qwen2. The biases are large enough to be missed if they were."""
    c = Config(2, 64, 96, 4, 2, 16, vocab, 256, 1e-6, 10000.0, True, True, {}, [])
    g = torch.Generator().manual_seed(seed)

    def weight(*shape):
        return (torch.randn(shape, generator=g) * (shape[-1] ** -0.5)).to(dtype)

    class Weights:  # a Checkpoint of random numbers
        def take(self, name, size):
            return weight(size).exp()

        def linear(self, at, inputs, bias=False, **outputs):
            size = sum(outputs.values())
            return Linear(weight(size, inputs), weight(size) * 8 if bias else None)

    embed = Linear(weight(vocab, 64) * 3, by_rows=True)
    return Qwen2(c, embed, [Layer(c, Weights(), i) for i in range(2)], weight(64).exp(), embed)


class Scripted:
    """F5: drafts what the test says, list after list, and the last one for ever."""

    def __init__(self, *drafts):
        self.drafts, self.asked = list(drafts), []

    def propose(self, tokens, gamma):
        self.asked.append(gamma)
        draft = self.drafts.pop(0) if len(self.drafts) > 1 else self.drafts[0]
        return draft[:gamma], None


class Random:
    def __init__(self, vocab, seed=0):
        self.vocab, self.generator = vocab, torch.Generator().manual_seed(seed)

    def propose(self, tokens, gamma):
        return torch.randint(self.vocab, (gamma,), generator=self.generator), None


def oracle(model, prompt, count):
    """Greedy decoding with nothing that could go wrong: no cache, no draft, the whole text in every step."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(model(torch.tensor(tokens), model.new_cache(len(tokens)), 1)[0].argmax().item())
    return tokens[len(prompt) :]


def decode(target, drafter, prompt, count, gamma=4, **options):
    rounds = list(speculative_decode(target, drafter, prompt, count, gamma, **options))
    return [id for round in rounds for id in round.tokens], rounds


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()
