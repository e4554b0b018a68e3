"""Choose gamma anew for each draft, 0 included, so that speculation never costs more than it brings by a few percent.

One more draft is worth its price if the chance that it counts, all drafts before it being kept, is above its cost (a
draft step and one more row for the target) times the tokens that the same time would bring otherwise; or if all this is
so of it and some behind it together, as the first draft of a round is the dearest. The chance is learned: how often
drafts of about this confidence (the largest entry of q) were kept, of late. All of this is known before the draft is
drawn, so it cannot favour one token over another, and the text keeps its distribution.

Where drafts do not pay, only now and then one is tried, from a purse: a loan and 0.25 % of the tokens so far. So on a
text where every draft is wrong it loses that and no more, if c and v(n) are right. It gains where drafts become worse
within a text. Where they become better it mostly misses it: the draft has to read what it slept through, and 0.25 % can
pay for that only where c is small. With a draft that is always as good, the best fixed gamma does as well.
SpecDec++ (Huang et al. 2024, arXiv 2405.19715) derives such a threshold, and learns the chance with a network.

    speculative_decode(target, AdaptiveDraft(draft, 500, c, v), prompt, 200, gamma=8)      8 is the most it may draft
"""

import torch

import speculative
from speculative import DraftModel, warp

# What may be lost, in target steps, at once and with each token: 2.9 % of 64 tokens. Most of it at once, as a good
# draft may begin with three refusals, and were it locked out then, it could not show what it is worth.
LOAN, SHARE = 1.7, 0.0025
FORGET = 0.96  # what an observation is worth after the next: some 25 drafts count
PRIOR = 2  # drafts that the guess to begin with is worth


class AdaptiveDraft(DraftModel):
    """A DraftModel that decides by itself when to stop.

    c: the cost of a draft step, v: [v(1), v(2), ...], that of a target pass over so many rows, all in passes over one
    row; measure/costs.py times them. first: the cost of the first draft step of a round, if it is another. At most
    len(v) - 1 tokens are drafted. The other options are DraftModel's.
    """

    def __init__(self, model, max_length, c, v, first=None, **options):
        super().__init__(model, max_length, **options)
        self.c, self.first = c, first or c
        self.v = [max(v[: i + 1]) for i in range(len(v))]  # a pass over more rows cannot be cheaper
        # Of how many drafts how many were kept, for five ranges of confidence and for all, with a guess to begin with.
        self.kept = [[PRIOR * chance, PRIOR] for chance in (0.4, 0.5, 0.6, 0.7, 0.9, 0.7)]

    def propose(self, tokens, gamma):
        if tokens is not self.seen:
            self.seen, self.cache = tokens, self.model.new_cache(self.max_length)
            self.spent, self.emitted, self.tried = None, 0, 0.0
        else:
            self.learn(len(tokens) - self.length)
        self.cache.rollback(min(self.cache.length, len(tokens) - 1))
        fed, drafted, q, chance = None, [], [], 1.0
        most = min(gamma, len(self.v) - 1, self.cache.max_length + 1 - len(tokens))
        self.length, self.bins, self.cost, self.trial = len(tokens), [], 1.0, False  # of this round, in target steps
        # After rounds without a draft several tokens must be fed. Reading the prompt is no decoding, and not counted.
        step = self.first * (1 if self.spent is None else self.rows(len(tokens) - self.cache.length))
        while len(drafted) < most and self.worth(chance, len(drafted), step, most):
            if fed is None:  # not before it is wanted: a round without drafts should cost nothing
                missing = tokens[self.cache.length :]
                if self.vocab and max(missing) >= self.vocab:
                    break
                fed = torch.tensor(missing)
            logits = self.model(fed, self.cache, last=1)[:, : self.vocab]  # [1, vocab]
            self.cost, step = self.cost + step, self.c
            row = warp(logits, *self.sampling) if self.sampling[0] > 0 else logits.softmax(-1)
            sure = row.amax().nan_to_num(0).item()  # q alone decides: what is drawn from it is not known yet
            self.bins.append(min(int(5 * sure), 4))
            chance *= self.chance(self.bins[-1])
            fed = speculative.draw(row, self.generator) if self.sampling[0] > 0 else logits.argmax(-1)
            drafted.append(fed)
            q.append(row)
        self.cost += self.v[len(drafted)] - 1
        return torch.cat(drafted) if drafted else [], torch.cat(q) if drafted and self.sampling[0] > 0 else None

    def rows(self, n):
        """What a pass over n rows costs, also beyond v. The draft's is taken to grow as the target's does."""
        return self.v[min(n, len(self.v)) - 1] * max(1, n / len(self.v))

    def worth(self, chance, k, step, most):
        """Draft one more token, behind k of this round that are kept by this chance, for a draft step of that cost?"""
        price = step + self.v[k + 1] - self.v[k]
        rate = max(1.0, self.emitted / self.spent) if self.spent else 1.0  # tokens that a target step brings, so far
        lost = (self.spent or 0) + self.cost + price + self.v[k] - 1 - (self.emitted + 1)  # if no draft were kept
        purse = LOAN * (k == 0) + SHARE * self.emitted  # the loan buys single drafts, more of them only what was won
        gain, pays = 0.0, False  # the first draft is the dearest: maybe it pays with others behind it
        for i in range(k, most):
            chance *= self.chance(5)
            gain += chance - rate * ((step if i == k else self.c) + self.v[i + 1] - self.v[i])
            pays |= gain > 0
        self.trial |= k == 0 and not pays
        ever = self.first + self.v[1] - self.v[0] < 0.9  # would it pay, were it always right?
        may_try = k == 0 and ever and self.tried + price <= purse
        return (pays or may_try) and lost <= purse

    def learn(self, emitted):
        """From the round before, which emitted so many tokens: one more than it kept."""
        self.tried = max(0.0, self.tried + (self.cost - emitted) * self.trial)  # what came of it goes back to the purse
        if self.spent is None:  # of the first round, which is not timed, what it lost counts and what it won does not
            self.spent = max(0.0, self.cost - emitted)
        else:
            self.spent, self.emitted = self.spent + self.cost, self.emitted + emitted
        for i, kind in enumerate(self.bins[:emitted]):  # the last one of these was refused, if it is there
            for counts in (self.kept[kind], self.kept[5]):
                counts[:] = FORGET * counts[0] + (i < emitted - 1), FORGET * counts[1] + 1

    def chance(self, kind):
        return self.kept[kind][0] / self.kept[kind][1]
