"""The small models of Lab 2: their answers are known, a wrong row in a cache changes them, and calls are noted."""

from collections import namedtuple

import torch
import torch.nn.functional as F
from check import Stuck

Call = namedtuple("Call", "before fed seen last")  # rows in the cache, ids fed, all ids in sight then, rows wanted


class Tokens:
    """A cache whose rows are the tokens themselves."""

    def __init__(self, max_length):
        self.tokens, self.max_length = [], max_length

    length = property(lambda self: len(self.tokens))

    def rollback(self, length):
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back to {length}: {self.length} rows are there, one for each token fed")
        del self.tokens[length:]


class Toy:
    """A model whose first choice is a function of all tokens in its cache. It notes down each call."""

    def __init__(self, vocab, choose):
        self.vocab, self.choose, self.calls = vocab, choose, []

    def new_cache(self, max_length):
        return Tokens(max_length)

    def __call__(self, ids, cache, last):
        if not isinstance(ids, torch.Tensor) or ids.dim() != 1 or not len(ids):
            raise TypeError(f"a model is fed a tensor [T] of one id or more, as torch.tensor([3, 4]), not {ids!r}")
        if not 0 <= last <= len(ids):
            raise ValueError(f"of {len(ids)} tokens fed there are {len(ids)} rows of logits, and you want last={last}")
        if cache.length + len(ids) > cache.max_length:
            raise ValueError(
                f"the cache has room for {cache.max_length} tokens, and this is number {cache.max_length + 1}"
            )
        if len(self.calls) > 300:
            raise Stuck("a model was called 300 times for a few tokens: a loop that does not get on?")
        before, fed = cache.length, ids.tolist()
        cache.tokens += fed
        self.calls.append(Call(before, fed, list(cache.tokens), last))
        seen = [cache.tokens[: cache.length - last + 1 + i] for i in range(last)]
        return F.one_hot(torch.tensor([self.choose(s) for s in seen], dtype=torch.long), self.vocab) * 9.0


def chain():
    """Behind id comes id + 1, mod 8: the row decides, whatever the cache holds."""
    return Toy(8, lambda seen: (seen[-1] + 1) % 8)


def history():
    """The sum of all tokens in sight, mod 7: a row too many or too few in the cache changes the answer."""
    return Toy(7, lambda seen: sum(seen) % 7)


def right(model, text, count):
    """The next `count` tokens, with no cache and no drafts."""
    text, start = list(text), len(text)
    while len(text) < start + count:
        text.append(model.choose(text))
    return text[start:]


class Partly:
    """A drafter that drafts so many right tokens in a round, and then wrong ones; None: all right."""

    def __init__(self, model, *counts):
        self.model, self.counts, self.asked = model, list(counts), []

    def propose(self, tokens, gamma):
        self.asked.append(gamma)
        count = self.counts.pop(0) if self.counts else None
        ids = right(self.model, tokens, gamma)
        return [id if count is None or i < count else (id + 1) % self.model.vocab for i, id in enumerate(ids)]


class Scripted:
    """A drafter that drafts what it was told, and later nothing."""

    def __init__(self, draft):
        self.draft = draft

    def propose(self, tokens, gamma):
        draft, self.draft = self.draft[:gamma], []
        return draft


def play(lab, target, draft, prompt, count, gamma, eos=(), rounds=1):
    """Up to so many rounds. Returns [(new, drafted, kept)], the target's calls behind the prompt, an error or None."""
    found, error = [], None
    try:
        for new, drafted, kept in lab.speculative(target, draft, prompt, count, gamma, eos):
            found.append(([int(id) for id in new], int(drafted), int(kept)))
            if len(found) == rounds:
                break
    except Exception as e:  # whatever the attendee's code may raise: often the calls before it say why
        error = e
    return found, target.calls[len(prompt) > 1 :], error
