"""Lab 3: write the rule that keeps sampling exact, then prove it by histogram. Fill the four blanks in their order.

    python labs/lab3.py

It says which blanks are right, and what is wrong with the first that is not. The page to this is labs/lab3.md.

There is no cache here. A model is a function: `model(text)`, text a list of ids, gives the logits [vocab] of what
follows.
All chance comes from `uniform()` and `draw(probs)`, and nowhere else: the checker puts its own in their place, and so
walks through every outcome there is.
"""

import sys

import torch

generator = torch.Generator().manual_seed(0)


def blank(number, *given):
    raise NotImplementedError(number)  # labs/check.py makes a hint of it


def uniform():
    """A number from 0 to 1, without 1: less than x with probability x."""
    return torch.rand((), dtype=torch.float64, generator=generator).item()


def draw(probs):
    """An id, each with its probability. probs: [vocab], and it must sum to 1."""
    cdf = probs.double().cumsum(0)
    return min(torch.searchsorted(cdf, torch.tensor(uniform()).double(), right=True).item(), len(probs) - 1)


def warp(logits, temperature, top_k):
    """Probabilities to draw from: softmax of the top_k largest logits (0: all) over temperature. [vocab] -> [vocab]"""
    # >>> your code, blank 1: warp
    return blank(1, logits, temperature, top_k)
    # <<<


def propose(draft, text, gamma, temperature, top_k):
    """Draw gamma drafts, one after the other, each behind the text and the drafts before it.

    Returns the drafts, a list of ids, and q [gamma, vocab]: row i is the distribution that draft i was drawn from.
    """
    # >>> your code, blank 2: propose
    return blank(2, draft, text, gamma)
    # <<<


def judge(p, q, drafted):
    """How many of the drafts are kept, and the token behind them: (n, id). Its law must be p's, whatever q is.

    p: [k + 1, vocab], the target's distributions. Row i is for the place of draft i, the last for the one behind all.
    q: [k, vocab]. Draft i was drawn from row i. drafted: list of k ids. To begin with, `return n, None` will do.
    """
    # >>> your code, blank 3: judge
    return blank(3, p, q, drafted)
    # <<<


def one_round(target, draft, text, gamma, temperature, top_k):
    """One round behind `text`: the list of 1 to gamma + 1 ids that it adds."""
    drafted, q = propose(draft, text, gamma, temperature, top_k)
    # >>> your code, blank 4: the round. (Really the target's rows are one pass. Here call it gamma + 1 times.)
    return blank(4, target, drafted, q)
    # <<<


if __name__ == "__main__":
    import check3

    sys.exit(check3.main(sys.modules[__name__]))
