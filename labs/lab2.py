"""Lab 2: write greedy speculative decoding. Fill the six blanks in their order, and run the file after each.

    python labs/lab2.py

It says which blanks are right, and what is wrong with the first that is not. The page to this is labs/lab2.md.

What you need to know of a model: `model(ids, cache, last)` reads the tokens ids, a tensor [T], behind those that are in
the cache, adds a row to the cache for each, and returns logits [last, vocab] for the last of them. The row of a token
predicts what follows that token. `cache.length` is how many rows there are, and `cache.rollback(n)` keeps the first n
of them; an n larger than `cache.length` is an error. kv_cache.py has the real one, in 40 lines.
"""

import sys

import torch


def blank(number, *given):
    raise NotImplementedError(number)  # labs/check.py makes a hint of it


class Draft:
    """The small model that guesses, and its cache."""

    def __init__(self, model, max_length):
        self.model, self.cache = model, model.new_cache(max_length)

    def propose(self, tokens, gamma):
        """Guess the gamma tokens that follow `tokens`, each the first choice of the draft model: a list of gamma ids.

        tokens: the text so far, a list of ids. It is longer at each call: by what the target kept of your last guesses,
        and one token of its own. So the cache may have rows of guesses that were rejected, which are no part of the
        text; and it may lack rows: all of them at the first call. Feed what it lacks, and no more.
        gamma: how many drafts this round has room for, often less than the gamma of `speculative`.
        """
        # >>> your code, blank 1: draft
        return blank(1, tokens, gamma)
        # <<<


def speculative(target, draft, prompt, max_new_tokens, gamma=4, eos=()):
    """Yield (new, drafted, kept) for each round: the list of ids it adds to the text, and how many drafts were made
    and kept. Ends after max_new_tokens, or behind an id that is in `eos` (several ids, one or none), which is still a
    part of the text.
    """
    tokens, cache = list(prompt), target.new_cache(len(prompt) + max_new_tokens)
    if len(prompt) > 1:  # The newest token is never in the cache: each pass of the target begins with feeding it.
        target(torch.tensor(prompt[:-1]), cache, last=0)
    limit, ended = len(prompt) + max_new_tokens, False

    while len(tokens) < limit and not ended:
        # How many drafts can this round use? At most gamma, and the target adds a token of its own to them.
        # >>> your code, blank 2: room
        room = blank(2, gamma, limit, tokens)
        # <<<
        drafted = draft.propose(tokens, room) if room > 0 else []  # a list of ids, k of them

        # One pass of the target over k + 1 tokens gives the k + 1 rows that judge the k drafts and add a token.
        # >>> your code, blank 3: verify
        rows = blank(3, cache, tokens, drafted)  # [k + 1, vocab]
        # <<<

        # Keep the first drafts, for as long as each is the target's first choice. Add the target's choice behind them.
        # >>> your code, blank 4: accept
        kept, new = blank(4, rows, drafted)  # how many drafts, and the list of kept + 1 ids
        # <<<

        # If a new id is in `eos`: set `ended`, and cut off what is behind it. Is `kept` still how many drafts are kept?
        # >>> your code, blank 5: stop
        # <<<
        tokens += new

        # The cache has a row for each token you fed. Which of them are of the text?
        # >>> your code, blank 6: roll back
        # <<<
        yield new, len(drafted), kept


if __name__ == "__main__":
    import check2

    sys.exit(check2.main(sys.modules[__name__]))
