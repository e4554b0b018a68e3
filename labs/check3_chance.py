"""Walk through every outcome of uniform() and draw(), and so compute the law of what Lab 3's functions return."""

from contextlib import contextmanager

import torch
from check import Finding, table

GRID = 20  # how many values, evenly spread, uniform() has here: right code's thresholds are multiples of 1/20


class Dice:
    """Stands in for uniform() and draw(): shows what `path` says, then what is possible first, and notes the rest."""

    def __init__(self, path, high=False):
        self.path, self.high, self.probability, self.shown, self.others = path, high, 1.0, 0, []

    def choose(self, weights):
        if self.shown == len(self.path):
            first, *rest = [i for i, weight in enumerate(weights) if weight > 3e-7]  # else rounding
            self.others += [[*self.path, i] for i in rest]
            self.path = [*self.path, first]
        self.shown += 1
        self.probability *= weights[self.path[self.shown - 1]]
        return self.path[self.shown - 1]

    def uniform(self):
        return 1 - 1e-9 if self.high else (self.choose([1 / GRID] * GRID) + 0.5) / GRID

    def draw(self, probs):
        """As lab3.draw: what is missing to a sum of 1 goes to the last id."""
        if not isinstance(probs, torch.Tensor) or probs.dim() != 1:
            raise Finding(f"draw() takes one distribution, a tensor [vocab], and was given {probs!r:.80}")
        if probs.min() < -1e-6 or probs.isinf().any():
            raise Finding("draw() was given negative or infinite numbers: warp logits first, and clamp p - q at 0")
        if probs.isnan().any():
            said = "draw() was given NaN: where p and q are equal up to rounding, the residual is 0, and 0 / 0 is NaN"
            raise Finding(f"{said}. Draw from p then")
        cdf = probs.double().cumsum(0).clamp(max=1).tolist()
        return self.choose([b - a for a, b in zip([0, *cdf[:-2]], cdf[:-1], strict=False)] + [1 - ([0, *cdf][-2])])


@contextmanager
def instead(place, **functions):
    """Put functions in the place of others."""
    before = {name: getattr(place, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(place, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(place, name, function)


def other_dice(*args, **kwargs):
    raise Finding("all chance must come from uniform() and draw(): the checker cannot see any other")


def outcomes(lab, run, high=False):
    """[(probability, what run() returns)] for every way in which uniform() and draw() may turn out."""
    found, paths = [], [[]]
    with instead(torch, rand=other_dice, multinomial=other_dice):
        while paths:
            dice = Dice(paths.pop(), high)
            with instead(lab, uniform=dice.uniform, draw=dice.draw):
                result = run()
            found.append((dice.probability, result))
            paths += dice.others
    return found


def law(pairs, size):
    """The law of ids: [size], from [(probability, id)], divided by its sum."""
    weights = torch.zeros(size, dtype=torch.double)
    for probability, id in pairs:
        weights[int(id)] += probability
    return weights / weights.sum()


def same(a, b, off=0.5 / GRID):
    """Whether two laws are one, but for what the grid of uniform() may add to those that are not multiples of it."""
    return a.shape == b.shape and bool((a.double() - b.double()).abs().max() < off)


def numbers(name, row):
    return [name, *(f"{x:.3f}" for x in row.tolist())]


def name(found, due, mistakes, otherwise, where):
    """Raise a Finding unless the law found is the one due. mistakes: [(what is wrong, the law it leads to)]"""
    if not same(found, due, 1e-5):
        known = [said for said, wrong in mistakes if same(found, wrong)]
        raise Finding(known[0] if known else otherwise, [where, *table([numbers("due", due), numbers("yours", found)])])
