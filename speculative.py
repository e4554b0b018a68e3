"""Speculative decoding: a small model guesses the next few tokens, the large one checks all guesses in one pass.

Decoding is slow because each token pulls every weight of the target through memory, for a single row of arithmetic.
A pass over a few rows pulls the same weights once. So let a cheap draft model guess gamma tokens, let the target judge
them together, keep what it agrees with, and forget the rest. The text is exactly the target's own: the same tokens
when greedy, the same distribution when sampling.

    Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192
    Chen et al. 2023, "Accelerating LLM Decoding with Speculative Sampling", arXiv 2302.01318

The algorithm is `speculative_decode`, at the end; the rest serves it. p is the target's distribution and q the
draft's, as in Leviathan; k is how many tokens a round really drafted.

What it needs to know of a model: `model(ids, cache, last) -> logits [last, vocab]` in float32, which adds the tokens
ids [T] to the cache and returns the last rows, each predicting what follows its token; and `new_cache(max_length)`,
which returns something with `length`, `max_length` and `rollback(length)`. There is no batch axis: one text at a time.
"""

from collections import namedtuple

import torch
import torch.nn.functional as F

Round = namedtuple("Round", "tokens drafted accepted")  # the ids emitted, how many were drafted, how many of them kept


def warp(logits, temperature, top_k, top_p):
    """The distribution that is drawn from: temperature, then top-k, then top-p, alike for the draft and the target.

    logits: [rows, vocab], float32. Returns probabilities [rows, vocab], float32, each row summing to 1.
    temperature > 0; top_k 0 and top_p 1.0 mean no limit. What ties with the last token kept is kept too, so that the
    result does not depend on how a sort happens to order equals.
    """
    vocab = logits.shape[-1]
    if 0 < top_k < vocab:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], float("-inf"))
    probs = (logits / temperature).softmax(-1)
    if top_p < 1:
        ranked = probs.topk(min(top_k or vocab, vocab)).values  # descending
        outside = ranked.cumsum(-1) - ranked >= top_p  # the tokens ranked above this one already reach top_p
        probs = probs * (probs >= ranked.masked_fill(outside, 1).amin(-1, keepdim=True))
    return probs / probs.sum(-1, keepdim=True)


def draw(probs, generator):
    """Draw one id from each row of probs [rows, n]. Returns [rows]. Every random choice in this file is made here."""
    if generator is None:
        raise ValueError("sampling needs a torch.Generator: pass generator=")
    # In float32 the many tokens of a vocabulary's tail, 1e-9 each, would be lost in rounding. MPS has no float64.
    exact = torch.float32 if probs.device.type == "mps" else torch.float64
    cdf = probs.cumsum(-1, dtype=exact)
    u = torch.rand(len(probs), 1, dtype=exact, generator=generator, device=generator.device).to(probs.device)  # [0, 1)
    # Divided by its own last entry, the cdf ends in exactly 1 > u: an id of probability 0 cannot come out. The clamp is
    # for NaN, which the round reports at its end; until then the id must be a valid one.
    return torch.searchsorted(cdf / cdf[:, -1:], u, right=True).squeeze(-1).clamp(max=probs.shape[-1] - 1)


def greedy(logits, drafted):
    """Keep drafts for as long as each is the target's first choice. Temperature 0: nothing is drawn.

    logits: [k + 1, vocab], drafted: [k]. Returns the number of drafts kept and the token after them, both [1].
    """
    choice = logits.argmax(-1)  # [k + 1]; of equals the lowest id, as in the draft
    n = (choice[:-1] == drafted).cumprod(0).sum(0, keepdim=True)
    return n, choice[n]


def rejection(p, q, drafted, generator):
    """Keep draft i with probability min(1, p / q). In place of the first that falls, draw from max(0, p - q).

    p: [k + 1, vocab], q: [k, vocab] or None for one-hot, drafted: [k]. Returns as `greedy` does. If drafted[i] was
    really drawn from q[i], the tokens are distributed as p, whatever q is. Leviathan et al. 2023, algorithm 1 and
    appendix A.1.
    """
    q = F.one_hot(drafted, p.shape[1]) if q is None else q
    # A last row of zeros, as nothing was drafted there: its residual is p itself, so the bonus token needs no case of
    # its own. And columns of zeros, for ids that the draft does not have if its vocabulary is padded to less.
    q = F.pad(q.to(p), (0, p.shape[1] - q.shape[1], 0, 1))  # [k + 1, vocab]
    row = torch.arange(len(drafted), device=p.device)
    keep = p[row, drafted] / q[row, drafted]  # [k]: one entry of each row, while p[:, drafted] would be k x k
    keep = keep.nan_to_num(0).clamp(max=1)  # a draft model that puts out NaN is no reason to believe it
    n = draw(torch.stack([1 - keep, keep], -1), generator).cumprod(0).sum(0, keepdim=True)
    residual = (p[n] - q[n]).clamp(min=0)  # [1, vocab]
    residual = torch.where(residual.sum() > 0, residual, p[n])  # p and q equal up to rounding leave nothing
    return n, draw(residual / residual.sum(), generator)


class DraftModel:
    """The drafter that asks a small model. Give it the same temperature, top_k and top_p as the target gets.

    max_length: how many tokens its cache holds, at most its context. A longer text is decoded on without drafts.
    generator: the target's own, or one with another seed. (Two with the same seed throw the same dice, which breaks
    the argument that the result is the target's distribution.)
    vocab: how many ids both models have, if their vocabularies are padded to different widths.
    """

    def __init__(self, model, max_length, temperature=0.0, top_k=0, top_p=1.0, generator=None, vocab=None):
        self.model, self.max_length, self.vocab, self.seen = model, max_length, vocab, None
        self.sampling, self.generator = (temperature, top_k, top_p), generator

    def propose(self, tokens, gamma):
        """Guess k <= gamma tokens that may follow `tokens`, a list that the caller extends from one call to the next.

        Returns the ids [k], k may be 0, and the distributions q [k, vocab] that they were drawn from, or None where
        nothing was drawn but the likeliest token taken.
        """
        if tokens is not self.seen:  # another list is another text
            self.seen, self.cache = tokens, self.model.new_cache(self.max_length)
        # Rows of rejected drafts are dropped. After full acceptance a row is missing instead: the last draft was never
        # fed. Both are settled by feeding whatever the cache lacks, here one token or two.
        self.cache.rollback(min(self.cache.length, len(tokens) - 1))
        fed, drafted, q = torch.tensor(tokens[self.cache.length :]), [], []
        unknown = self.vocab and max(tokens[self.cache.length :]) >= self.vocab  # an id without an embedding here
        for _ in range(0 if unknown else min(gamma, self.cache.max_length + 1 - len(tokens))):
            logits = self.model(fed, self.cache, last=1)[:, : self.vocab]  # [1, vocab]
            if self.sampling[0] > 0:
                q.append(warp(logits, *self.sampling))
            fed = draw(q[-1], self.generator) if q else logits.argmax(-1)  # [1], and it stays on the device
            drafted.append(fed)
        return torch.cat(drafted) if drafted else [], torch.cat(q) if q else None


def speculative_decode(target, drafter, prompt, max_new_tokens, gamma=4, temperature=0.0, top_k=0, top_p=1.0, eos=(),
                       generator=None, rule=rejection):
    """Yield one Round after the other, until max_new_tokens, an id in `eos`, or the end of the target's context.

    prompt: list of ids. gamma: how many tokens a round may draft, 0 or more; 0 is plain decoding and needs no drafter.
    temperature: 0 is greedy; above, a torch.Generator is needed (one on the target's device saves a wait). The same
    seed gives the same text again, but not the text of plain decoding or of another gamma: only their distribution is
    the same. top_k 0, top_p 1.0: no limit.
    rule: how drafts are judged above temperature 0, a function as `rejection` is. Others are in variants/.
    After an EOS nothing is emitted. Drafts behind an accepted EOS count as drafted, not as accepted.
    The first Round includes reading the prompt: start the clock when it arrives.
    Raises ValueError for an argument out of range, FloatingPointError if the target's logits are NaN or infinite.
    """
    warm = temperature == 0 or temperature >= 1e-30  # nearer to 0, float32 would divide by 0
    if not (len(prompt) > 0 <= max_new_tokens and gamma >= 0 and warm and top_k >= 0 and 0 < top_p <= 1):
        raise ValueError(f"out of range: {len(prompt)=} {max_new_tokens=} {gamma=} {temperature=} {top_k=} {top_p=}")
    tokens, cache = list(prompt), target.new_cache(len(prompt) + max_new_tokens)
    if len(prompt) > cache.max_length:
        raise ValueError(f"the prompt has {len(prompt)} tokens and the context only {cache.max_length}: shorten it")
    if len(prompt) > 1:  # all but the last token, which the first round feeds
        target(torch.tensor(prompt[:-1]), cache, last=0)
    limit, end, last = min(len(prompt) + max_new_tokens, cache.max_length), None, torch.tensor(prompt[-1:])

    while len(tokens) < limit and end is None:
        # 1. Draft. The target adds a token of its own to every round, so ask for one less than what is left.
        room = min(gamma, limit - len(tokens) - 1)
        drafted, q = drafter.propose(tokens, room) if room > 0 else ([], None)
        drafted = torch.as_tensor(drafted, dtype=torch.long, device=last.device)  # [k]
        assert len(drafted) <= room, f"the drafter was asked for {room} tokens and gave {len(drafted)}"

        # 2. Verify, in one pass. Row i of the logits predicts what follows fed[i], and fed[0] is the last committed
        #    token. So draft i is judged by row i: the slice begins at row 0 and NOT at row 1, where the first draft
        #    stands, and it has one row more than there are drafts. That last row gives the bonus token.
        fed = torch.cat([last, drafted])  # [k + 1]
        verify = slice(0, len(drafted) + 1)
        logits = target(fed, cache, last=len(fed))[verify]  # [k + 1, vocab]

        # 3. Accept the first drafts, and add one token from the target: a correction, or after the last the bonus.
        drafted = drafted.to(logits.device)
        if temperature == 0:
            kept, last = greedy(logits, drafted)
        else:
            kept, last = rule(warp(logits, temperature, top_k, top_p), q, drafted, generator)
        fine = logits.amax(-1).isfinite().all().view(1)
        fine, n, token, *ids = torch.cat([fine, kept, last, drafted]).tolist()  # the round's one host synchronisation
        if not fine:
            raise FloatingPointError("the target's logits contain NaN or infinity: damaged weights, or too few bits")
        new = ids[:n] + [token]
        end = next((i for i, id in enumerate(new) if id in eos), None)  # an EOS may be among the accepted drafts
        new = new if end is None else new[: end + 1]

        # 4. Roll back. The newest token has not been fed yet, and of what was rejected no row may stay.
        tokens += new
        cache.rollback(len(tokens) - 1)
        yield Round(new, len(ids), min(n, len(new)))
