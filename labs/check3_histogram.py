"""The histogram of Lab 3: many texts of two tokens from the pair in tiny/, beside what the target's law says."""

import functools
import sys
from collections import Counter
from pathlib import Path

import torch
from check import Finding

sys.path.insert(0, str(Path(__file__).parent.parent))  # for the pair in tiny/

from model import Qwen2
from pairs import PAIRS, prompts
from speculative import warp
from text import Text

COUNT, TOP_K, TEMPERATURE, GAMMA, SHOWN = 10000, 8, 1.0, 2, 9
LIMIT = 1e-6  # A right rule falls below this chance once in a million seeds.


@functools.cache
def function(folder):
    """A model of tiny/ as Lab 3 has models: text -> logits [vocab]. Each text is computed once."""
    model, known = Qwen2.load(folder, 32, "cpu"), {}

    def logits(text):
        key = tuple(text)
        if key not in known:
            known[key] = model(torch.tensor(key), model.new_cache(len(key)), 1)[0]
        return known[key]

    return logits


def two_tokens(target, prompt):
    """{(a, b): probability} of the two tokens behind the prompt, by the chain rule, from the target alone."""

    def after(text):
        row = warp(target(text)[None], TEMPERATURE, TOP_K, 1.0)[0].double()
        return [(id, row[id].item()) for id in row.nonzero().flatten().tolist()]

    return {(a, b): p * q for a, p in after(prompt) for b, q in after([*prompt, a])}


def chi_square(found, expected):
    """Pearson's sum, its degrees of freedom, and the chance of such a sum or a larger one.

    found, expected: {text: count}, of independent texts. Texts that are expected less than 5 times are counted as one.
    """
    rare = [text for text, count in expected.items() if count < 5]
    cells = [([text], count) for text, count in expected.items() if count >= 5]
    cells += [(rare, sum(expected[text] for text in rare))] if rare else []
    chi2 = sum((sum(found.get(text, 0) for text in texts) - count) ** 2 / count for texts, count in cells)
    freedom = len(cells) - 1
    if any(text not in expected for text in found):
        return float("inf"), freedom, 0.0
    half = torch.tensor([freedom / 2, chi2 / 2], dtype=torch.double)
    return chi2, freedom, torch.special.gammaincc(*half).item()


def variation(found, expected):
    """Total variation: the share of texts that are another one than they should be."""
    off = sum(abs(found.get(text, 0) - expected.get(text, 0)) for text in found | expected)
    return off / 2 / sum(expected.values())


@torch.no_grad()
def compare(lab):
    """10,000 texts of two tokens, drawn by your rounds from the pair in tiny/, are distributed as the target's."""
    target, draft = (function(folder) for folder in PAIRS["tiny"])
    text = Text(PAIRS["tiny"][0], ())
    prompt = text.prompt(prompts(False, "factual")["factual"][1])[:24]
    law = two_tokens(target, prompt)
    expected, texts = {pair: COUNT * p for pair, p in law.items()}, list(law)
    drawn = torch.multinomial(torch.tensor([*law.values()]), COUNT, True, generator=torch.Generator().manual_seed(1))
    plain, yours = Counter(texts[i] for i in drawn.tolist()), Counter()
    lab.generator.manual_seed(2)
    drafted = kept = 0
    for _ in range(COUNT):
        found = []
        while len(found) < 2:
            new = lab.one_round(target, draft, [*prompt, *found], GAMMA, TEMPERATURE, TOP_K)
            drafted, kept = drafted + GAMMA, kept + len(new) - 1
            found += new
        yours[tuple(int(id) for id in found[:2])] += 1
    lines = [f"{'two tokens':<16}{'expected':>9}{'plain':>9}{'yours':>9}"]
    for pair in sorted(expected, key=expected.get, reverse=True)[:SHOWN]:
        numbers = f"{expected[pair]:>9,.0f}{plain[pair]:>9,}{yours[pair]:>9,}"
        lines.append(f"{text.decode(pair)!r:<16}{numbers}  {'#' * round(40 * yours[pair] / max(yours.values()))}")
    lines += ["...", f"{'':<16}{'chi-square':>11}{'freedom':>9}{'chance':>9}{'total variation':>17}"]
    for name, found in (("plain", plain), ("yours", yours)):
        chi2, freedom, chance = chi_square(found, expected)
        lines.append(f"{name:<16}{chi2:>11.1f}{freedom:>9}{chance:>9.2g}{variation(found, expected):>17.4f}")
    lines += [
        f"{kept / drafted:.0%} of the drafts were kept. By chance alone, chi-square is about as large as the degrees"
    ]
    lines += [f"of freedom. chance: to be so far off, or further, by chance alone. Below {LIMIT:g} it is none."]
    if chance < LIMIT:
        raise Finding("the histogram is not the target's", lines)
    return lines
