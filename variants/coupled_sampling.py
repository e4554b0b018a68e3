"""Sampling where the same seed gives the same text with and without speculation, so that a diff shows it is lossless.

Add Gumbel noise to log p, and the largest is a draw from p. Let the noise of a place in the text depend on the seed and
the place alone, and draft and target draw with the same luck: where p and q are alike they mostly draw the same token.
What is decoded is then the text of greedy decoding, of a model whose logits are noisy: so the wrapper below is all
there is, and any drafter works. Where `rejection` keeps a share 1 - d of the drafts (d: the total variation of p and
q), this keeps at least (1 - d) / (1 + d): fewer, which is the price. It needs rows with the same bits in any company:
4 bits on a CPU. Daliri et al. 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding",
arXiv 2408.07978, section 3.

    a, b = (Coupled(model, seed, vocab, temperature=1.0) for model in (target, draft))
    speculative_decode(a, DraftModel(b, 500), prompt, 100)      greedy, and with gamma=0 the same text
"""

import functools

import torch

from speculative import warp


class Coupled:
    """A model whose greedy text is a sample of `model`, at temperature, top_k and top_p. One for each text.

    seed: an int. vocab: the number of ids that get noise, for the target and its draft the same: the larger of both.
    """

    def __init__(self, model, seed, vocab, temperature=1.0, top_k=0, top_p=1.0):
        if not temperature > 0:
            raise ValueError(f"the temperature is {temperature} and must be above 0: greedy text needs no noise")
        self.model, self.seed, self.vocab, self.sampling = model, seed, vocab, (temperature, top_k, top_p)

    def new_cache(self, max_length):
        return self.model.new_cache(max_length)

    def __call__(self, ids, cache, last):
        """log p + noise, [last, vocab of the model], float64."""
        logits = self.model(ids, cache, last)
        if last == 0:
            return logits
        # The row behind a token that stands at place i of the text is for place i + 1, whoever asks.
        rows, places = warp(logits, *self.sampling), range(cache.length - last + 1, cache.length + 1)
        return torch.stack([noisy(p, self.seed, i, self.vocab) for p, i in zip(rows, places, strict=True)])


def noisy(p, seed, place, vocab):
    """log p + noise, [ids], whose largest is a draw from p [ids]. vocab: how many ids are given noise, in any case."""
    return p.cpu().log() + gumbel(seed, place, vocab)[: len(p)]  # a GPU has other luck, and an Apple one no float64


@functools.lru_cache(32)  # the draft asks, then the target, and after a rejection both once more
def gumbel(seed, place, vocab):
    """-log of an exponentially distributed number for each id, [vocab], in float64: float32 has none for rare ids."""
    generator = torch.Generator().manual_seed(hash((seed, place)) % 2**32)  # a CPU generator takes 32 bits
    return -torch.empty(vocab, dtype=torch.float64).exponential_(generator=generator).log()
