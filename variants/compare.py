"""What the variants bring, on a pair of your own. Each part is a table.

    python -m variants.compare --target DIR --draft DIR --bits 4 [rules] [lookup] [adaptive]

rules      tokens a round at temperature 1: rejection, block and coupled, with the same drafts a round. Not timed.
lookup     speed of lookup and of the hybrid on prompts that repeat what they were given, against plain decoding
adaptive   speed of adaptive gamma against fixed ones, and against two drafts that are no use
"""

import argparse
import itertools
import statistics
import sys
import time
from collections import namedtuple

import torch
from huggingface_hub.utils import tqdm

from model import Config, Qwen2, find
from pairs import choose, prompts
from speculative import DraftModel, rejection, speculative_decode
from text import Text, check_same_ids
from variants.adaptive_gamma import AdaptiveDraft
from variants.block_verification import block_verification
from variants.coupled_sampling import Coupled
from variants.prompt_lookup import Hybrid, PromptLookup

Run = namedtuple("Run", "seconds tokens rounds drafted accepted ids")  # of one text, without its first round


def run(target, drafter, ids, count, gamma, **how):
    rounds, clock = [], []
    for round in speculative_decode(target, drafter, ids, count, gamma, **how):
        rounds.append(round)
        clock.append(time.perf_counter())
    numbers = (sum(len(r.tokens) for r in rounds[1:]), len(rounds) - 1)
    numbers += tuple(sum(getattr(r, name) for r in rounds[1:]) for name in ("drafted", "accepted"))
    return Run(clock[-1] - clock[0], *numbers, [id for r in rounds for id in r.tokens])


def sums(runs):
    return [sum(getattr(run, name) for run in runs) for name in ("tokens", "rounds", "drafted", "accepted")]


def rules(target, draft, asked, args):
    """Tokens a round and acceptance at temperature 1 of three rules, by domain, gamma 4 and 8."""
    sizes, eos = (target.config.vocab_size, draft.config.vocab_size), target.config.eos
    print(f"{'domain':<11}{'gamma':>6}{'':>5}{'rejection':<18}{'block':<18}coupled    (tokens a round, drafts kept)")
    texts = [(domain, ids) for domain, some in asked.items() for ids in some]
    jobs, table = list(itertools.product(texts, (4, 8), range(args.seeds))), {}
    for (domain, ids), gamma, seed in tqdm(jobs, unit="text", disable=None, leave=False):
        for rule in (rejection, block_verification, None):
            pair, how = (target, draft), {"temperature": 1.0, "generator": torch.Generator().manual_seed(seed)}
            if rule is None:
                pair, how = [Coupled(model, seed, max(sizes)) for model in pair], {}
            drafter = DraftModel(pair[1], len(ids) + args.tokens, vocab=min(sizes), **how)
            how |= {"rule": rule} if rule else {}
            done = run(pair[0], drafter, ids, args.tokens, gamma, eos=eos, **how)
            for where in (domain, "all"):
                table.setdefault((where, gamma, rule), []).append(done)
    for domain in (*asked, "all"):
        for gamma in (4, 8):
            cells = []
            for rule in (rejection, block_verification, None):
                tokens, rounds, drafted, accepted = sums(table[domain, gamma, rule])
                cells.append(f"{tokens / max(rounds, 1):.2f} {accepted / max(drafted, 1):>4.0%}")
            print(f"{domain:<11}{gamma:>6}{'':>5}" + "".join(f"{cell:<18}" for cell in cells).rstrip())


def race(target, modes, texts, args):
    """Decode all texts in all modes, {name: (drafter for ids, gamma)}, in turn. {name: (speed-up, [runs])}, medians."""
    runs, eos = {name: [[] for _ in range(args.repeat)] for name in modes}, target.config.eos
    for drafter, gamma in modes.values():  # the first pass of each shape is slow
        run(target, drafter(texts[0]), texts[0], min(24, args.tokens), gamma)
    with tqdm(total=args.repeat * len(texts) * len(modes), unit="text", disable=None, leave=False) as bar:
        for repetition in range(args.repeat):
            for number, ids in enumerate(texts):
                turned = [*modes.items()][number % len(modes) :] + [*modes.items()][: number % len(modes)]
                for name, (drafter, gamma) in turned:  # so that no mode always has the same neighbours in time
                    runs[name][repetition].append(run(target, drafter(ids), ids, args.tokens, gamma, eos=eos))
                    bar.update()
    seconds = {name: [sum(one.seconds for one in r) or 1.0 for r in some] for name, some in runs.items()}
    speed = {name: [max(sums(r)[0], 1e-9) / s for r, s in zip(runs[name], seconds[name], strict=True)] for name in runs}
    return {
        name: (statistics.median(a / b for a, b in zip(speed[name], speed["plain"], strict=True)), some[0])
        for name, some in runs.items()
    }


def lookup(target, draft, asked, args):
    """Prompts whose answer repeats them, if the target is an instruct model; else the beginnings of texts."""
    vocab = min(target.config.vocab_size, draft.config.vocab_size)
    modes = {
        "plain": (lambda ids: None, 0),
        "draft model": (lambda ids: DraftModel(draft, len(ids) + args.tokens, vocab=vocab), 4),
        "lookup": (lambda ids: PromptLookup(), 10),
        "hybrid": (lambda ids: Hybrid(PromptLookup(), DraftModel(draft, len(ids) + args.tokens, vocab=vocab)), 10),
    }
    names = "".join(f"{name:<22}" for name in list(modes)[1:])
    print(f"{'prompt':<12}{names}(speed-up, tokens a round, same text)")
    for what, ids in repeating(asked):
        results, cells = race(target, modes, [ids], args), []
        for name in list(modes)[1:]:
            speedup, (one,) = results[name]
            same = "same" if one.ids == results["plain"][1][0].ids else "other"
            cells.append(f"{speedup:.2f}x {one.tokens / max(one.rounds, 1):>5.2f} {same}")
        print(f"{what:<12}" + "".join(f"{cell:<22}" for cell in cells).rstrip(), flush=True)


def repeating(asked):
    """(name, ids) of each prompt of the domain edit, or of the first of each domain."""
    if "edit" in asked:
        return [(f"edit {number}", ids) for number, ids in enumerate(asked["edit"], 1)]
    return [(domain, some[0]) for domain, some in asked.items()]


class Wrong:
    """A draft that is sure of the wrong token: its logits, in the order of the ids turned round."""

    def __init__(self, model):
        self.model, self.new_cache = model, model.new_cache

    def __call__(self, ids, cache, last):
        logits = self.model(ids, cache, last)
        return logits.flip(-1) if last else logits


def adaptive(target, draft, asked, args):
    """Speed-up over plain decoding of fixed gammas and of the adaptive one; then two drafts that cannot pay."""
    vocab = min(target.config.vocab_size, draft.config.vocab_size)
    c, v = costs(target, draft, 9)
    dear = costs(target, target, 9)[0]
    print(f"c {c:.2f}   v(n) " + " ".join(f"{x:.2f}" for x in v))

    def fixed(gamma):
        return lambda ids: DraftModel(draft, len(ids) + args.tokens, vocab=vocab), gamma

    def adapt(model, c):
        return lambda ids: AdaptiveDraft(model, len(ids) + args.tokens, c, v, vocab=vocab), 8

    modes = {"plain": (lambda ids: None, 0)} | {f"gamma {gamma}": fixed(gamma) for gamma in (1, 2, 4, 8)}
    modes |= {"adaptive": adapt(draft, c), "wrong draft": adapt(Wrong(draft), c), "dear draft": adapt(target, dear)}
    print(f"{'domain':<11}" + "".join(f"{name:>13}" for name in list(modes)[1:]) + "   (speed-up)")
    for domain, texts in asked.items():
        results = race(target, modes, texts, args)
        cells = (f"{results[name][0]:>12.2f}x" for name in list(modes)[1:])
        print(f"{domain:<11}" + "".join(cells), flush=True)


def costs(target, draft, rows, repeat=9):
    """c and [v(1) .. v(rows)]: a draft step and target passes over n rows, in target passes over one row. Medians."""
    jobs = [(target, n) for n in range(1, rows + 1)] + [(draft, 1)]
    caches, seconds = [model.new_cache(128 + rows) for model, _ in jobs], [[] for _ in jobs]
    for (model, _), cache in zip(jobs, caches, strict=True):
        model(torch.zeros(128, dtype=torch.long), cache, 0)
    for _ in range(repeat + 1):
        for (model, n), cache, times in zip(jobs, caches, seconds, strict=True):
            start = time.perf_counter()
            model(torch.zeros(n, dtype=torch.long), cache, n)
            times.append(time.perf_counter() - start)
            cache.rollback(128)
    one, *more = (statistics.median(times[1:]) for times in seconds)
    return more[-1] / one, [1.0, *(time / one for time in more[:-1])]


def main():
    parts = {"rules": rules, "lookup": lookup, "adaptive": adaptive}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", metavar="PART", help=", ".join(parts))
    parser.add_argument("--target", default="tiny", help="as in bench.py. Default: tiny")
    parser.add_argument("--draft")
    parser.add_argument("--bits", type=int, choices=[4, 16, 32], default=32)
    parser.add_argument("--tokens", type=int, default=128, help="of each text")
    parser.add_argument("--seeds", type=int, default=2, help="of each prompt, for rules")
    parser.add_argument("--repeat", type=int, default=3, help="of what is timed")
    args = parser.parse_args()
    if unknown := set(args.part) - parts.keys():
        parser.exit(2, f"compare.py: there is no part {', '.join(unknown)}: take {', '.join(parts)}\n")
    try:
        compare(args, {name: parts[name] for name in args.part or parts})
    except (OSError, ValueError) as error:
        parser.exit(2, f"compare.py: {' '.join(str(error).split())}\n")
    except KeyboardInterrupt:
        sys.exit(130)


@torch.no_grad()
def compare(args, parts):
    if args.tokens < 16 or args.seeds < 1 or args.repeat < 1:
        raise ValueError("--tokens must be 16 or more, --seeds and --repeat 1 or more")
    folders = [find(model) for model in choose(args.target, args.draft, "cpu", args.bits)[:2]]
    text, other = (Text(folder, Config.read(folder).eos) for folder in folders)
    check_same_ids(text, other)
    target, draft = (Qwen2.load(folder, args.bits, "cpu") for folder in folders)
    asked = {domain: [text.prompt(one) for one in some] for domain, some in prompts(text.is_chat, "all").items()}
    print("target {}\ndraft  {}".format(*folders))
    print(f"{args.bits} bits, {torch.get_num_threads()} threads, {args.tokens} tokens a text")
    for name, part in parts.items():
        print(f"\n{name}: {part.__doc__}")
        part(target, draft, asked, args)


if __name__ == "__main__":
    main()
