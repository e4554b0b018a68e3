"""Walk through every outcome of every random choice, and so compute a distribution instead of sampling from it."""

import math

import torch

import speculative
from variants import coupled_sampling


class Dice:
    """Shows what `path` says, then always the first that is possible, noting what else was.

    `draw` and `noisy` stand in for the functions of those names, which make all random choices that there are.
    """

    def __init__(self, path):
        self.path, self.probability, self.shown, self.others, self.luck = path, 1.0, 0, [], {}

    def choose(self, weights):
        """One id, where weights [n] are not 0."""
        if self.shown == len(self.path):
            first, *rest = weights.nonzero().flatten().tolist()
            self.others += [[*self.path, id] for id in rest]
            self.path = [*self.path, first]
        id = self.path[self.shown]
        self.probability *= (weights[id] / weights.sum()).item()
        self.shown += 1
        return id

    def draw(self, probs, generator):
        return torch.tensor([self.choose(row) for row in probs.double()], dtype=torch.long)

    def noisy(self, p, seed, place, vocab):
        """Draft and target share the luck u of a place, and draw the id in whose part of the cdf u lies. Each draw says
        a little more of where in 0 .. 1 it is."""
        low, high = self.luck.get(place, (0.0, 1.0))
        ends = p.double().cumsum(0) / p.double().sum()
        starts = ends - p.double() / p.double().sum()
        overlap = ends.clamp(max=high) - starts.clamp(min=low)
        id = self.choose(torch.where(overlap > 1e-9, overlap, 0))
        self.luck[place] = max(low, starts[id].item()), min(high, ends[id].item())
        return torch.eye(len(p), dtype=torch.double)[id]


def outcomes(run, monkeypatch, module=speculative):
    """Call run() once for every way in which its random choices can turn out. Returns [(probability, result)].

    It is the real algorithm that runs. Only the dice are replaced.
    """
    results, paths = [], [[]]
    while paths:
        dice = Dice(paths.pop())
        with monkeypatch.context() as patch:
            patch.setattr(module, "draw", dice.draw)
            patch.setattr(coupled_sampling, "noisy", dice.noisy)
            result = run()
        results.append((dice.probability, result))
        paths += dice.others
    assert abs(sum(probability for probability, _ in results) - 1) < 1e-6
    return results


def distribution(run, monkeypatch, module=speculative):
    """{result: probability} of what run() may return."""
    found = {}
    for probability, result in outcomes(run, monkeypatch, module):
        found[result] = found.get(result, 0.0) + probability
    return found


def expected_warp(row, temperature, top_k, top_p):
    """Temperature, top-k and top-p once more, in plain Python and from their definitions. No two entries are equal."""
    weights = [math.exp(x / temperature) for x in row]
    order = sorted(range(len(row)), key=lambda id: -weights[id])[: top_k or None]
    inside, mass = [], 0.0
    for id in order:  # the smallest set of likeliest tokens that reaches top_p of what top-k has left
        if not inside or mass < top_p:
            inside.append(id)
        mass += weights[id] / sum(weights[id] for id in order)
    return [weights[id] / sum(weights[id] for id in inside) if id in inside else 0.0 for id in range(len(row))]


def law(model, prompt, length, temperature=1.0, top_k=0, top_p=1.0):
    """{text: probability} by the chain rule, from a model without a cache: what any decoding must give."""
    texts = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, probability in texts.items():
            ids = torch.tensor([*prompt, *text])
            row = model(ids, model.new_cache(len(ids)), 1)[0].tolist()
            for id, p in enumerate(expected_warp(row, temperature, top_k, top_p)):
                if p:
                    longer[*text, id] = probability * p
        texts = longer
    return texts


def distance(a, b):
    """Total variation of two such distributions."""
    return sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys()) / 2
