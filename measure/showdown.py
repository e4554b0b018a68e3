"""The showdown: several ways of decoding the same prompts, in turn, and a table of what came of it."""

import statistics
from collections import namedtuple

import torch
from huggingface_hub.utils import tqdm

from measure import costs, memory, table
from measure.machine import now, read_bandwidth
from speculative import DraftModel, speculative_decode
from variants.adaptive_gamma import AdaptiveDraft
from variants.prompt_lookup import Hybrid, PromptLookup

WAYS = ["best", "auto", "lookup", "hybrid"]  # beside plain decoding, if --gamma does not say otherwise
MOST = 10  # drafts a round, where --gamma gives no number: a copied text is kept for longer than a guessed one
CHUNK = 16  # tokens that one mode decodes before the next has its turn
ENOUGH = 45  # seconds: without --repeat all is decoded as often as fits in here, once to three times

# gamma: the most that a round may draft. drafter: makes one for (ids of a prompt, sampling options), None for none.
Mode = namedtuple("Mode", "name gamma drafter")


class Run:
    """One prompt in one mode, decoded bit by bit. The first round, which reads the prompt, is in `ids` and in no
    number: `rounds` are those behind it, `seconds` is their time, draft.seconds and verify.seconds are parts of it."""

    def __init__(self, target, mode, ids, args):
        sampling = options(target, args)
        self.verify = costs.Timed(target, target.device)
        self.draft = costs.Timed(mode.drafter and mode.drafter(ids, sampling), target.device)
        self.coming = speculative_decode(self.verify, self.draft, ids, args.max_new_tokens, mode.gamma,
                                         eos=target.config.eos, **sampling)  # fmt: skip
        first = next(self.coming, None)
        if first is None:
            raise ValueError(f"the prompt fills the context of {len(ids)} tokens: shorten it")
        self.ids, self.rounds, self.seconds = [*first.tokens], [], 0.0
        self.draft.seconds = self.verify.seconds = 0.0

    def go_on(self, length):
        """Decode until `ids` holds so many tokens, or the text ends."""
        start = now(self.verify.device)
        while len(self.ids) < length and (round := next(self.coming, None)):
            self.rounds.append(round)
            self.ids += round.tokens
        self.seconds += now(self.verify.device) - start


def options(target, args):
    """How to sample, with a generator of its own: each text throws its own dice."""
    generator = torch.Generator(target.device).manual_seed(args.seed)
    return {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "generator": generator}


def race(target, modes, ids, args):
    """Decode one prompt in each mode. They take turns, 16 tokens at a time, so that whatever else the machine does
    meanwhile is met by all. Returns a Run for each."""
    runs = [Run(target, mode, ids, args) for mode in modes]
    for length in range(CHUNK, args.max_new_tokens + CHUNK, CHUNK):
        for run in runs:
            run.go_on(length)
    return runs


def modes(pair, ways, known, args):
    """The Mode of plain decoding, and those of `ways`: numbers, and "auto", "lookup", "hybrid". known: Costs."""
    draft, vocab = pair[1], min(model.config.vocab_size for model in pair)

    def model(ids, sampling):
        return DraftModel(draft, len(ids) + args.max_new_tokens, vocab=vocab, **sampling)

    def auto(ids, sampling):
        return AdaptiveDraft(draft, len(ids) + args.max_new_tokens, known.c, known.v, vocab=vocab, **sampling)

    others = {
        "auto": Mode("auto", len(known.v) - 1, auto),
        "lookup": Mode("lookup", MOST, lambda *_: PromptLookup()),
        "hybrid": Mode("hybrid", MOST, lambda *how: Hybrid(PromptLookup(), model(*how))),
    }
    return [Mode("plain", 0, None), *(others.get(way) or Mode("speculative", way, model) for way in ways)]


def look_ahead(pair, prompts, known, args, done):
    """The speed-up to expect of gamma 0, 1, 2, ... on these prompts. They are decoded once, with gamma 4, which also
    warms up what is timed later. done: called after each."""
    chances = []
    for ids in prompts:
        (run,) = race(pair[0], modes(pair, [4], known, args)[1:], ids, args)
        chances.append(costs.chances(pair, ids, run.ids, **options(pair[0], args)))
        done()
    return costs.curve(known, chances, args.max_new_tokens)


def showdown(pair, asked, args):
    """Measure the ways of args.gamma on the prompts {domain: [ids]}. Prints the table as it comes, returns its rows."""
    ways, count, rows, notes = args.gamma or WAYS, sum(map(len, asked.values())), [], []
    middle = sorted((ids for prompts in asked.values() for ids in prompts), key=len)[count // 2]
    known = costs.measure(pair, middle, max([MOST, *(w for w in ways if w not in WAYS)]), options(pair[0], args))
    minutes = count * args.max_new_tokens * known.round(0) / 60  # that a mode takes, if no slower than plain decoding
    repeat = args.repeat or min(3, max(1, int(ENOUGH / 60 / minutes / (1 + len(ways)))))
    texts = count * (1 + repeat * (1 + len(ways)))  # once to look ahead
    print(f"{texts} texts, up to {texts / count * minutes:.1f} minutes\n\n{table.HEADER}")
    with tqdm(total=texts, desc="decoding", unit="text", disable=None, leave=False) as bar:
        for domain, prompts in asked.items():
            foreseen = look_ahead(pair, prompts, known, args, bar.update)
            best = max(1, foreseen.index(max(foreseen)))
            racing = modes(pair, [best if way == "best" else way for way in ways], known, args)
            runs = [[[] for _ in range(repeat)] for _ in racing]  # [mode][repeat][prompt]
            for repetition in range(repeat):
                for ids in prompts:
                    for mode, run in zip(runs, race(pair[0], racing, ids, args), strict=True):
                        mode[repetition].append(run)
                        bar.update()
            for mode, mine in zip(racing, runs, strict=True):
                row = summary(domain, mode, mine, runs[0], known)
                both = zip(prompts, runs[0][0], mine[0], strict=True)
                parted = [first_difference(pair[0], ids, a.ids, b.ids) for ids, a, b in both if args.temperature == 0]
                row["identical"] = None if args.temperature else not any(parted)
                rows.append(row if mode.drafter else row | {"predicted_by_gamma": foreseen, "costs": vars(known)})
                bar.write(table.line(row, parted if mode.drafter else []))
                for n, (at, gap) in ((n, apart) for n, apart in enumerate(parted, 1) if apart):
                    where = f"{domain} prompt {n}, {mode.name}"
                    notes.append(f"{where}: parts at token {at}, where two logits are {gap:.1e} apart")
    reach = memory.read(pair[0], len(middle)) / known.verify[0] / 1e9 / read_bandwidth(pair[0].device)
    print("\n".join([table.legend(known, repeat), *notes, *table.verdict(rows, known, reach)]))
    return rows


def speed(runs):
    """Tokens a second: all tokens by all seconds, so that a long text weighs more than a short one. 0 if all texts
    ended in their first round: there was nothing to time."""
    tokens = sum(len(round.tokens) for run in runs for round in run.rounds)
    return tokens / sum(run.seconds for run in runs) if tokens else 0.0


def summary(domain, mode, runs, plain, known):
    """One row of the table and of the JSON file. runs, plain: [repeat][prompt], each a Run. known: Costs."""
    rounds = [round for run in runs[0] for round in run.rounds]
    tokens, drafting = sum(len(round.tokens) for round in rounds), [round for round in rounds if round.drafted]
    drafted, accepted = (sum(getattr(round, name) for round in rounds) for name in ("drafted", "accepted"))
    longest = max((round.drafted for round in rounds), default=0)
    # Drafts behind a refused one are never judged; nor are those behind an end of text that was kept.
    kept = [sum(round.accepted > i for round in rounds) for i in range(longest)]
    refused = [sum(r.accepted == i < r.drafted and len(r.tokens) > i for r in rounds) for i in range(longest)]
    speeds, usual = [speed(repetition) for repetition in runs], [speed(repetition) for repetition in plain]
    ratios = sorted(a / b if b else 0.0 for a, b in zip(speeds, usual, strict=True))
    if mode.name in ("plain", "speculative"):
        expected = sum(known.round(round.drafted) for round in rounds)
    else:  # what such a drafter takes cannot be foreseen: here it is as measured, in plain rounds of the same minutes
        expected = sum(known.verify[round.drafted] + known.other[round.drafted] for round in rounds)
        expected += sum(run.draft.seconds for run in runs[0]) * usual[0] * known.round(0)
    a = accepted / max(accepted + sum(refused), 1)
    return {
        "domain": domain,
        "mode": mode.name,
        "gamma": mode.gamma,
        "tokens": tokens,
        "rounds": len(rounds),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / max(drafted, 1),
        "tokens_per_round": tokens / max(len(rounds), 1),
        "tokens_per_round_theory": sum(a**i for i in range(mode.gamma + 1)),  # = (1 - a^(gamma + 1)) / (1 - a)
        "tokens_per_second": statistics.median(speeds),
        "speedup": statistics.median(ratios),
        "speedup_low": ratios[0],
        "speedup_high": ratios[-1],
        "predicted_speedup": tokens * known.round(0) / expected if rounds else 1.0,
        "cost_ratio": known.c,
        "judged": [a + b for a, b in zip(kept, refused, strict=True)],
        "kept": kept,
        "nothing_accepted": sum(round.accepted == 0 for round in drafting) / max(len(drafting), 1),
        "share": share([run for repetition in runs for run in repetition]) if rounds else None,
    }


def share(runs):
    """Where their time went, as parts of 1: drafting, passes of the target, and all else."""
    draft, verify = (sum(getattr(run, part).seconds for run in runs) for part in ("draft", "verify"))
    seconds = sum(run.seconds for run in runs)
    return {"draft": draft / seconds, "verify": verify / seconds, "other": 1 - (draft + verify) / seconds}


def first_difference(target, ids, a, b):
    """Where the greedy texts a and b part, and how far apart the two tokens' logits are there. None if they do not."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if at is None:
        return None if len(a) == len(b) else (min(len(a), len(b)), float("nan"))
    logits = target(torch.tensor(ids + a[:at]), target.new_cache(len(ids) + at), last=1)[0]
    return at, (logits[a[at]] - logits[b[at]]).abs().item()
