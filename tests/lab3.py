"""Lab 3: draw tens of thousands of tokens, and look whether they are distributed as the target's. Under a minute.

(It needs what the tests need: pip install -r requirements-dev.txt.)

    python test_lossless.py                      plain and speculative sampling, side by side, and a verdict
    python test_lossless.py --broken RULE        the same with a classic mistake in it, and which check finds it
    python test_lossless.py --plot FILE          also as a picture
    python test_lossless.py --long FILE          greedy text and logits, bit by bit, over 100,000 tokens: long_run.py
"""

import argparse
import importlib.util
import sys
from collections import Counter

import pytest
import torch
from huggingface_hub.utils import tqdm

import long_run
import speculative
from broken import CHECKS, RULES, broken, findings
from dice import law
from model import Qwen2
from pairs import PAIRS, prompts
from text import Text

PLACES, TOP_K, BINS = 3, 8, 9  # tokens a text, the choices for each, and rows of the histogram


class Remembered:
    """A model that computes each row once. All texts here begin alike, so that most rows were there before."""

    def __init__(self, model):
        self.model, self.rows = model, {}

    def new_cache(self, max_length):
        return Tokens(max_length)

    def __call__(self, ids, cache, last):
        cache.tokens += ids.tolist()
        texts = [tuple(cache.tokens[: len(cache.tokens) - last + 1 + i]) for i in range(last)]
        for text in texts:
            if text not in self.rows:
                self.rows[text] = self.model(torch.tensor(text), self.model.new_cache(len(text)), 1)
        return torch.cat([self.rows[text] for text in texts]) if texts else None


class Tokens:
    """What such a model has as a cache: the tokens themselves."""

    def __init__(self, max_length):
        self.tokens, self.max_length = [], max_length

    length = property(lambda self: len(self.tokens))

    def rollback(self, length):
        del self.tokens[length:]


def tiny():
    """The pair in tiny/, the beginning of a text, and its tokenizer."""
    target, draft = (Remembered(Qwen2.load(folder, 32, "cpu")) for folder in PAIRS["tiny"])
    text = Text(PAIRS["tiny"][0], target.model.config.eos)
    return target, draft, text.prompt(prompts(False, "factual")["factual"][1])[:24], text


def sample(module, target, draft, prompt, gamma, count, seed, bar):
    """Counter of `count` texts, and the share of drafts that were kept."""
    generator, found, drafted, kept = torch.Generator().manual_seed(seed), Counter(), 0, 0
    how = {"temperature": 1.0, "top_k": TOP_K, "generator": generator}
    for _ in range(count):
        drafter, text = module.DraftModel(draft, len(prompt) + PLACES, **how), []
        for round in module.speculative_decode(target, drafter, prompt, PLACES, gamma, **how):
            text += round.tokens
            drafted, kept = drafted + round.drafted, kept + round.accepted
        found[tuple(text)] += 1
        bar.update()
    return found, kept / max(drafted, 1)


def histogram(texts, bins):
    """How often each id of `bins` stands in the texts, {text: weight}. The last entry: all other ids. [bins + 1]."""
    counts = torch.zeros(len(bins) + 1, dtype=torch.double)
    for text, weight in texts.items():
        for id in text:
            counts[bins.index(id) if id in bins else -1] += weight
    return counts


def chi_square(found, expected, bins):
    """The chance of a histogram as far off as that of `found`, if the texts have the law `expected`.

    The tokens of one text depend on each other, so this is not Pearson's sum. But the mean m and the covariance C of
    the counts in one text are known, and with n texts d = counts - n m has d^T (n C)^-1 d distributed as chi-square.
    Returns (chi-square, degrees of freedom, the chance).
    """
    n = sum(found.values())
    one = torch.stack([histogram({text: 1.0}, bins) for text in expected])  # [texts, bins + 1]
    p = torch.tensor(list(expected.values()), dtype=torch.double)[:, None]
    mean = (p * one).sum(0)
    covariance = n * ((p * one).T @ one - mean[:, None] * mean)  # singular: the counts add up to n PLACES
    d = histogram(found, bins) - n * mean
    if any(text not in expected for text in found):
        return torch.inf, len(bins), 0.0
    chi2 = (d @ torch.linalg.pinv(covariance, rtol=1e-9, hermitian=True) @ d).item()
    df = int(torch.linalg.matrix_rank(covariance, rtol=1e-9, hermitian=True))
    return chi2, df, torch.special.gammaincc(torch.tensor(df / 2).double(), torch.tensor(chi2 / 2).double()).item()


def likeliest(expected):
    """The ids that the histogram shows: the most frequent ones."""
    weight = Counter()
    for text, p in expected.items():
        for id in text:
            weight[id] += p
    return [id for id, _ in weight.most_common(BINS)]


def experiment(module, count, seed=0):
    """Draw `count` texts plainly and as many speculatively with gamma 2, by `module`. Returns what there is to show."""
    target, draft, prompt, text = tiny()
    expected = law(target, prompt, PLACES, 1.0, TOP_K)
    bins = likeliest(expected)
    with tqdm(total=2 * count, desc="drawing", unit="text", disable=None, leave=False) as bar:
        plain, _ = sample(speculative, target, draft, prompt, 0, count, seed, bar)
        found, kept = sample(module, target, draft, prompt, 2, count, seed + 1, bar)
    words = [repr(text.decode([id])) for id in bins] + ["all others"]
    return text.decode(prompt), expected, bins, words, {"plain": plain, "speculative": found}, kept


def show(count, start, expected, bins, words, found, kept):
    """Print the histograms and what follows from them. Returns whether the speculative one is the target's."""
    print(f"{count:,} texts of {PLACES} tokens each way, by tiny/: temperature 1, top-k {TOP_K}, gamma 2, after\n")
    print("    " + "\n    ".join(start.splitlines()))
    columns = {"expected": count * histogram(expected, bins)}
    columns |= {name: histogram(texts, bins) for name, texts in found.items()}
    most = max(column[:-1].max().item() for column in columns.values())
    print(f"\n{'token':<14}" + "".join(f"{name:>12}{'':<16}" for name in columns).rstrip())
    for i, word in enumerate(words):
        bars = ["#" * round(14 * column[i].item() / most) * (word != words[-1]) for column in columns.values()]
        cells = (f"{column[i]:>12,.0f} {bar:<15}" for column, bar in zip(columns.values(), bars, strict=True))
        print(f"{word:<14}" + "".join(cells).rstrip())
    print(f"\n{'':<14}{'chi-square':>12}{'freedom':>10}{'chance':>11}{'total variation':>18}")
    for name, texts in found.items():
        chi2, df, chance = chi_square(texts, expected, bins)
        off = (columns[name] - columns["expected"]).abs().sum().item() / (2 * count * PLACES)
        print(f"{name:<14}{chi2:>12.1f}{df:>10}{chance:>11.2g}{off:>18.4f}")
    print(LEGEND)
    right = chance > LIMIT
    print(f"{kept:.0%} of the drafts were kept. The speculative histogram is {'' if right else 'NOT '}the target's.")
    return right


LIMIT = 1e-6
LEGEND = f"""
expected         computed: the chance of every text, from the target alone
chi-square       how far off the histogram is. It is about as large as the degrees of freedom, if by chance alone
chance           to be so far off, or further, if every token is drawn from the target's distribution. Below {LIMIT:g}
                 it is no chance: that would happen once in a million runs
total variation  the share of tokens that are another one than they should be, chance included
"""


def picture(file, expected, bins, words, found):
    """The histograms as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    columns = {"expected": histogram(expected, bins) / PLACES}
    columns |= {name: histogram(texts, bins) / sum(texts.values()) / PLACES for name, texts in found.items()}
    for i, (name, column) in enumerate(columns.items()):
        axes.bar([place + 0.27 * (i - 1) for place in range(len(words))], 100 * column, 0.25, label=name)
    axes.set_xticks(range(len(words)), words, fontsize=12)
    axes.set_ylabel("share of the tokens, %", fontsize=13)
    axes.legend(fontsize=13)
    figure.savefig(file, dpi=120)
    print(f"drawn to {file}")


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="test_lossless.py", description=__doc__, formatter_class=raw)
    parser.add_argument("--broken", metavar="RULE", choices=RULES, help="one of: " + ", ".join(RULES))
    parser.add_argument("--count", type=int, default=20000, help="texts of 3 tokens, each way. Default: 20000")
    parser.add_argument("--plot", metavar="FILE", help="png or svg; needs matplotlib")
    parser.add_argument("--long", metavar="FILE", help="the long run; what is done goes to FILE, and is not done again")
    parser.add_argument("--target", default="tiny", help="of the long run: as in bench.py. Default: tiny")
    parser.add_argument("--draft", help="of the long run")
    parser.add_argument("--tokens", type=int, default=100000, help="of the long run, at least. Default: 100000")
    args = parser.parse_args()
    if args.count < 1:
        parser.exit(2, f"test_lossless.py: --count {args.count}: ask for one or more\n")
    if args.long and (args.broken or args.plot):
        parser.exit(2, "test_lossless.py: --long goes without --broken and --plot\n")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        parser.exit(2, "test_lossless.py: --plot needs matplotlib: pip install matplotlib\n")
    try:
        right = long_run.main(args) if args.long else lab(args)
    except (OSError, ValueError) as error:
        parser.exit(2, f"test_lossless.py: {error}\n")
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(not right)


@torch.no_grad()
def lab(args):
    torch.set_num_threads(1)  # for rows this short a second one costs more than it brings
    module = broken(args.broken) if args.broken else speculative
    if args.broken:
        what, name, lines = RULES[args.broken]
        print(f"{what}\n")
        for right, wrong in lines:
            print(f"  - {right}\n  + {wrong}")
        print(f"\n{'check':<14}what it finds")
    found = findings(module, pytest.MonkeyPatch()) if args.broken else {}
    for check, what in found.items():
        print(f"{check:<14}{(what or 'nothing')[:100]}")
    if args.broken:
        print(f"\nThe check for this is {name!r}. {' '.join(CHECKS[name].__doc__.split())}\n")
    results = experiment(module, args.count)
    right = show(args.count, *results)
    if args.plot:
        picture(args.plot, *results[1:5])
    return right and not any(found.values())
