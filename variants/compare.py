"""What bench.py does not measure of the variants, on a pair of your own. (It has lookup, hybrid and auto in its table.)

    python -m variants.compare --target DIR --draft DIR --bits 4 [rules] [hopeless]

rules      tokens a round at temperature 1: rejection, block and coupled, with the same number of drafts. Not timed
hopeless   adaptive gamma with two drafts that can only lose: one that is always wrong, and the target itself
"""

import argparse
import itertools
import sys

import torch
from huggingface_hub.utils import tqdm

from measure import costs, showdown
from measure.showdown import Mode
from model import Config, Qwen2, find
from pairs import choose, prompts
from speculative import DraftModel, rejection, speculative_decode
from text import Text, check_same_ids
from variants.adaptive_gamma import AdaptiveDraft
from variants.block_verification import block_verification
from variants.coupled_sampling import Coupled

MOST = 8  # drafts a round of the adaptive gamma


def rules(pair, asked, args):
    """Tokens a round and acceptance at temperature 1 of three rules, by domain, gamma 4 and 8."""
    vocab, widest = (f(model.config.vocab_size for model in pair) for f in (min, max))
    print(f"{'domain':<11}{'gamma':>6}{'':>5}{'rejection':<18}{'block':<18}coupled    (tokens a round, drafts kept)")
    texts = [(domain, ids) for domain, some in asked.items() for ids in some]
    jobs, table = list(itertools.product(texts, (4, 8), range(args.seeds))), {}
    for (domain, ids), gamma, seed in tqdm(jobs, unit="text", disable=None, leave=False):
        for rule in (rejection, block_verification, None):
            models, how = pair, {"temperature": 1.0, "generator": torch.Generator().manual_seed(seed)}
            if rule is None:
                models, how = [Coupled(model, seed, widest) for model in pair], {}
            drafter = DraftModel(models[1], len(ids) + args.max_new_tokens, vocab=vocab, **how)
            how |= {"rule": rule} if rule else {}
            eos = pair[0].config.eos
            rounds = [*speculative_decode(models[0], drafter, ids, args.max_new_tokens, gamma, eos=eos, **how)][1:]
            for where in (domain, "all"):
                table.setdefault((where, gamma, rule), []).extend(rounds)
    for domain, gamma in itertools.product((*asked, "all"), (4, 8)):
        cells = []
        for rule in (rejection, block_verification, None):
            rounds = table[domain, gamma, rule]
            tokens, drafted, accepted = (
                sum(len(r.tokens) for r in rounds),
                *(sum(r[i] for r in rounds) for i in (1, 2)),
            )
            cells.append(f"{tokens / max(len(rounds), 1):.2f} {accepted / max(drafted, 1):>4.0%}")
        print(f"{domain:<11}{gamma:>6}{'':>5}" + "".join(f"{cell:<18}" for cell in cells).rstrip())


class Wrong:
    """A draft that is sure of the wrong token: its logits, in the order of the ids turned round."""

    def __init__(self, model):
        self.model, self.new_cache = model, model.new_cache

    def __call__(self, ids, cache, last):
        logits = self.model(ids, cache, last)
        return logits.flip(-1) if last else logits


def hopeless(pair, asked, args):
    """Speed-up over plain decoding of adaptive gamma: a draft that is always wrong, and the target as its own."""
    target, draft = pair
    vocab, middle = (
        min(m.config.vocab_size for m in pair),
        max((ids for some in asked.values() for ids in some), key=len),
    )
    usual, dear = (costs.measure((target, model), middle, range(MOST + 1), {}) for model in (draft, target))
    print(f"c {usual.c:.2f}, of the target {dear.c:.2f}; v(n) " + " ".join(f"{v:.2f}" for v in usual.v))

    def adaptive(model, known):
        how, room = {"first": known.first, "vocab": vocab}, args.max_new_tokens
        return lambda ids, _: AdaptiveDraft(model, len(ids) + room, known.c, known.v, **how)

    modes = [Mode("plain", 0, None)]
    modes += [
        Mode("wrong draft", MOST, adaptive(Wrong(draft), usual)),
        Mode("dear draft", MOST, adaptive(target, dear)),
    ]
    print(f"{'domain':<11}" + "".join(f"{mode.name:>13}" for mode in modes[1:]) + "   (speed-up)")
    showdown.race(target, modes, middle, args)  # the first passes are slow
    for domain, texts in asked.items():
        runs = [showdown.race(target, modes, ids, args) for _ in range(args.repeat) for ids in texts]
        plain, *others = (showdown.speed([some]) for some in zip(*runs, strict=True))
        print(f"{domain:<11}" + "".join(f"{speed / plain:>12.2f}x" for speed in others), flush=True)


def main():
    parts = {"rules": rules, "hopeless": hopeless}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", metavar="PART", help=", ".join(parts))
    parser.add_argument("--target", default="tiny", help="as in bench.py. Default: tiny")
    parser.add_argument("--draft")
    parser.add_argument("--bits", type=int, choices=[4, 16, 32], default=32)
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of each text")
    parser.add_argument("--seeds", type=int, default=2, help="of each prompt, for rules")
    parser.add_argument("--repeat", type=int, default=3, help="of what is timed")
    parser.set_defaults(temperature=0.0, top_k=0, top_p=1.0, seed=0)
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
    if args.max_new_tokens < 16 or args.seeds < 1 or args.repeat < 1:
        raise ValueError("--max-new-tokens must be 16 or more, --seeds and --repeat 1 or more")
    folders = [find(model) for model in choose(args.target, args.draft, "cpu", args.bits)[:2]]
    text, other = (Text(folder, Config.read(folder).eos) for folder in folders)
    check_same_ids(text, other)
    pair = [Qwen2.load(folder, args.bits, "cpu") for folder in folders]
    asked = {domain: [text.prompt(one) for one in some] for domain, some in prompts(text.is_chat, "all").items()}
    print("target {}\ndraft  {}".format(*folders))
    print(f"{args.bits} bits, {torch.get_num_threads()} threads, {args.max_new_tokens} tokens a text")
    for name, part in parts.items():
        print(f"\n{name}: {part.__doc__}")
        part(pair, asked, args)


if __name__ == "__main__":
    main()
