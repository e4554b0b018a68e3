"""What a round costs, measured; how often drafts would be kept; and the speed-up that follows from the two.

A round that drafts k tokens takes `draft` for the k steps of the draft model, `verify` for a target pass over k + 1
rows, and `other` for judging, rolling back and keeping the books. Plain decoding is a round with k = 0, so

    speed-up = tokens a round / (round(k) / round(0))        Leviathan et al. 2023, theorem 3.8, with v(n) for its 1
"""

import random
import statistics

import numpy as np
import torch
import torch.nn.functional as F
from huggingface_hub.utils import tqdm

from measure.machine import now
from speculative import DraftModel, speculative_decode, warp


class Timed:
    """A model or a drafter that adds up the seconds spent in it. On a GPU each call is waited for."""

    def __init__(self, inner, device):
        self.inner, self.device, self.seconds = inner, device, 0.0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __call__(self, *inputs, **options):
        return self.clocked(self.inner, *inputs, **options)

    def propose(self, tokens, gamma):
        return self.clocked(self.inner.propose, tokens, gamma)

    def clocked(self, function, *inputs, **options):
        start = now(self.device)
        result = function(*inputs, **options)
        self.seconds += now(self.device) - start
        return result


class Costs:
    """Seconds of a round by how many tokens k it drafts: draft[k], verify[k], other[k], for k = 0, 1, 2, ..."""

    def __init__(self, draft, verify, other):
        self.draft, self.verify, self.other = draft, verify, other

    def round(self, k):
        """Seconds of a round that drafts k tokens."""
        return self.draft[k] + self.verify[k] + self.other[k]

    @property
    def c(self):
        """The cost ratio: a draft step in target passes over one row. The median over k."""
        return statistics.median(seconds / k for k, seconds in enumerate(self.draft) if k) / self.verify[0]

    @property
    def first(self):
        """As c, of the only draft of a round: it finds nothing of the draft model in the caches of the CPU."""
        return self.draft[1] / self.verify[0]

    @property
    def v(self):
        """The verify cost: v[k] is a target pass over k + 1 rows in passes over one."""
        return [seconds / self.verify[0] for seconds in self.verify]


TURN = 4  # tokens that a mode writes before the next has its turn: what slows a machine down mostly lasts longer
WARM_UP = 2  # rounds: the first reads the prompt, and the next is slow, as its shapes are new
AHEAD = 256  # tokens: so far behind the prompt rounds are timed, then behind it again


class Timing:
    """Times rounds that draft 0, 1, 2, ... tokens behind ids: of each of `gammas`, which begin with 0 and grow. Their
    turns are of as many tokens as those of the modes in a race. It matters: after a round of another kind a plain one
    finds less in the caches of the CPU, and is slower than four in a row.
    ValueError if the context has no room for one."""

    def __init__(self, pair, ids, gammas, sampling):
        self.pair, self.sampling, least = pair, sampling, (WARM_UP + 1) * (gammas[-1] + 1)
        room = min(model.config.max_position_embeddings for model in pair)
        if room <= least:
            raise ValueError(f"a context of {room} tokens is too short to time rounds of {gammas[-1]}")
        self.limit = min(AHEAD, max(least, room - len(ids)))
        self.ids = ids[-(room - self.limit) :]
        self.verify, self.going, self.seconds = Timed(pair[0], pair[0].device), {}, {k: [] for k in gammas}

    def begin(self, k):
        """Rounds of k drafts behind the prompt, warmed up. Returns [drafter, rounds, tokens still to come]."""
        draft, vocab = self.pair[1], min(model.config.vocab_size for model in self.pair)
        drafter = DraftModel(draft, len(self.ids) + self.limit, vocab=vocab, **self.sampling)
        drafter = Timed(drafter, draft.device)
        rounds = speculative_decode(self.verify, drafter, self.ids, self.limit, k, **self.sampling)
        return [drafter, rounds, self.limit - sum(len(next(rounds).tokens) for _ in range(WARM_UP))]

    def turn(self):
        """Time the next rounds of each: of k drafts, the parts of a round as a mean over the turn."""
        for k, turns in self.seconds.items():
            parts = []
            while sum(tokens for *_, tokens in parts) < TURN:
                parts.append(self.step(k))
            turns.append([statistics.fmean(part) for part in list(zip(*parts, strict=True))[:3]])

    def step(self, k):
        """The next round of k drafts: its seconds of drafting, of the target and of all else, and its tokens."""
        if k not in self.going or self.going[k][2] <= k:  # so few tokens are no whole round
            self.going[k] = self.begin(k)
        drafter, rounds, _ = self.going[k]
        drafter.seconds, self.verify.seconds, start = 0.0, 0.0, now(drafter.device)
        tokens = len(next(rounds).tokens)
        other = now(drafter.device) - start - drafter.seconds - self.verify.seconds
        self.going[k][2] -= tokens
        return drafter.seconds, self.verify.seconds, other, tokens

    def costs(self, before=None):
        """The Costs: of each gamma the mean of its turns but the slowest quarter, which may be slow for reasons of
        their own. Those not timed are as in the Costs `before`, times what a plain round has become since, or else on
        the straight line between their neighbours."""
        known = {}
        for k, turns in self.seconds.items():
            turns = sorted(turns, key=sum)[: (3 * len(turns) + 3) // 4]
            known[k] = [statistics.fmean(part) for part in zip(*turns, strict=True)]
        if before:
            slower = sum(known[0]) / before.round(0)
            others = zip(before.draft, before.verify, before.other, strict=True)
            known = {k: [slower * part for part in parts] for k, parts in enumerate(others)} | known
        every, parts = range(max(known) + 1), zip(*known.values(), strict=True)
        return Costs(*(np.interp(every, list(known), part).tolist() for part in parts))


def measure(pair, ids, gammas, sampling):
    """The Costs behind ids: of 6 turns, or of up to 60 in 6 seconds."""
    timing, start = Timing(pair, ids, gammas, sampling), now(pair[0].device)
    for turn in tqdm(range(60), "timing rounds", disable=None, leave=False):
        if turn < 6 or now(pair[0].device) - start < 6:
            timing.turn()
    return timing.costs()


def chances(pair, prompt, text, temperature=0.0, top_k=0, top_p=1.0, **_):
    """How likely the target is to keep the draft's guess at each token of text, if it comes that far: [len(text)].

    Greedy: 1 where the draft's likeliest token is that of the text, else 0; so the rounds of any gamma can be counted
    without decoding. Sampled: the sum over the vocabulary of min(p, q), Leviathan et al. 2023, corollary 3.6.
    """
    ids, vocab, found = prompt + text, min(model.config.vocab_size for model in pair), []
    caches = [model.new_cache(len(ids)) for model in pair]
    # The draft guesses as far as its context goes, and until the text has an id that it lacks.
    follows = next((i for i, id in enumerate(ids) if id >= vocab), len(ids))
    end = min(follows, caches[1].max_length) + 1
    tokens, start = torch.tensor(ids), len(prompt) - 1
    for model, cache in list(zip(pair, caches, strict=True))[temperature == 0 :]:  # greedy, the target is not asked
        if 0 < start < end:
            model(tokens[:start], cache, last=0)
    # In pieces of 16 rows: up to there a pass in 4 bits has the bits of 16 single ones.
    for at in range(start, min(end, len(ids)) - 1, 16):
        rows = tokens[at : min(at + 16, end - 1, len(ids) - 1)]
        q = pair[1](rows, caches[1], len(rows))[:, :vocab]
        if temperature == 0:
            found += (q.argmax(-1).cpu() == tokens[at + 1 : at + 1 + len(rows)]).float().tolist()
        else:
            p = warp(pair[0](rows, caches[0], len(rows)), temperature, top_k, top_p)
            q = F.pad(warp(q, temperature, top_k, top_p), (0, p.shape[1] - vocab))
            found += torch.minimum(p, q.to(p)).sum(-1).tolist()
    return found + [0.0] * (len(text) - len(found))


def rounds(chances, gamma, limit, generator):
    """The rounds in which a text with these chances would come, without its first: a list of (drafted, tokens)."""
    at, found = 0, []
    while at < len(chances):
        drafted = min(gamma, limit - at - 1)
        kept = 0
        while kept < min(drafted, len(chances) - at) and generator.random() < chances[at + kept]:
            kept += 1
        found.append((drafted, min(kept + 1, len(chances) - at)))
        at += found[-1][1]
    return found[1:]


def predict(costs, texts, gamma, limit):
    """Speed-up of speculative decoding of texts of up to `limit` tokens, each given by its `chances`."""
    dice, many = random.Random(0), []
    for text in texts:
        for _ in range(1 if set(text) <= {0.0, 1.0} else 20):
            many += rounds(text, gamma, limit, dice)
    seconds = sum(costs.round(drafted) for drafted, _ in many)
    return sum(tokens for _, tokens in many) * costs.round(0) / seconds if many else 1.0


def curve(costs, texts, limit):
    """The speed-up that `predict` gives for gamma 0, 1, 2, ..., up to the last in costs."""
    return [predict(costs, texts, gamma, limit) for gamma in range(len(costs.draft))]
