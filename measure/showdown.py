"""The showdown: several ways of decoding the same prompts, in turn, and a table of what came of it."""

import itertools
import statistics
from collections import namedtuple

import torch
from huggingface_hub.utils import tqdm

from measure import memory, table
from measure.costs import TURN, Timed, Timing, chances, curve, measure
from measure.machine import now, read_bandwidth
from speculative import DraftModel, speculative_decode
from variants.adaptive_gamma import AdaptiveDraft
from variants.prompt_lookup import Hybrid, PromptLookup

WAYS = ["best", "auto", "lookup", "hybrid"]  # beside plain decoding, if --gamma does not say otherwise
MOST = 10  # drafts a round, where --gamma gives no number: a copied text is kept for longer than a guessed one
ENOUGH = 53  # seconds: without --repeat all is decoded as often as fits in here, so that a minute is enough for all
REPEAT = 3  # but not more often than this

# gamma: the most that a round may draft. drafter: makes one for (ids of a prompt, sampling options), None for none.
Mode = namedtuple("Mode", "name gamma drafter")


class Run:
    """One prompt in one mode, decoded bit by bit. The first round, which reads the prompt, is in `ids` and in no
    number: `rounds` are those behind it, `seconds` is their time, draft.seconds and verify.seconds are parts of it."""

    def __init__(self, target, mode, ids, args):
        sampling = options(target, args)
        self.verify = Timed(target, target.device)
        self.draft = Timed(mode.drafter and mode.drafter(ids, sampling), target.device)
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


def race(target, modes, ids, args, between=lambda: None):
    """Decode one prompt in each mode. They take turns, so many tokens at a time, so that whatever else the machine does
    meanwhile is met by all. between: called after each. Returns a Run for each."""
    runs = [Run(target, mode, ids, args) for mode in modes]
    for length in range(TURN, args.max_new_tokens + TURN, TURN):
        for run in runs:
            run.go_on(length)
        between()
    for run in runs:  # what has been counted stays, the caches go
        run.coming.close()
        run.draft.inner = None
    return runs


def modes(pair, ways, known, args, best=4):
    """The Mode of plain decoding, and those of `ways`: numbers, and "auto", "lookup", "hybrid", which asks the draft
    model for `best` tokens. known: Costs."""
    draft, vocab = pair[1], min(model.config.vocab_size for model in pair)

    def of_model(ids, sampling):
        return DraftModel(draft, len(ids) + args.max_new_tokens, vocab=vocab, **sampling)

    def auto(ids, sampling):
        room, how = len(ids) + args.max_new_tokens, {"first": known.first, "vocab": vocab} | sampling
        return AdaptiveDraft(draft, room, known.c, known.v, **how)

    others = {
        "auto": Mode("auto", MOST, auto),
        "lookup": Mode("lookup", MOST, lambda *_: PromptLookup()),
        "hybrid": Mode("hybrid", MOST, lambda *how: Hybrid(PromptLookup(), of_model(*how), best)),
    }
    return [Mode("plain", 0, None), *(others.get(way) or Mode("speculative", way, of_model) for way in ways)]


def look_ahead(pair, prompts, args, done):
    """How likely each draft is to be kept: for each prompt, the `chances` of its text. They are decoded once, with
    gamma 4, which also warms up what is timed later. done: called after each."""
    found = []
    for ids in prompts:
        (run,) = race(pair[0], modes(pair, [4], None, args)[1:], ids, args)
        found.append(chances(pair, ids, run.ids, **options(pair[0], args)))
        done()
    return found


def plan(target, asked, ways, gammas, args):
    """Print how long all will take, from a few passes. Returns how often to repeat it, None for as often as fits."""
    cache, seconds, prompts = target.new_cache(8), [], [ids for some in asked.values() for ids in some]
    while len(seconds) < 8 or sum(seconds) < 0.5:  # the first are slow
        start = now(target.device)
        target(torch.zeros(1, dtype=torch.long), cache, last=1)
        seconds.append(now(target.device) - start)
        cache.rollback(0)
    one = statistics.median(seconds[len(seconds) // 2 :])
    # As if no mode were faster than plain decoding, a given gamma slower by a tenth for each draft, a pass read 8 tokens
    # of a prompt, and a draft step were half a pass.
    once = one * (len(prompts) * args.max_new_tokens + sum(map(len, prompts)) / 8)  # for each mode
    before = one * 12 * sum(1.5 + 0.6 * k for k in gammas)
    fixed = [1.0, *(1.0 if way == "best" else 1 + way / 10 for way in ways if way == "best" or way not in WAYS)]
    race = 1.5 * sum(fixed) + 1 + len(ways) - len(fixed)  # those are timed between the turns too, half as often
    whole = before + once * (1 + (args.repeat or 1) * race)
    repeat = args.repeat or (None if whole < 2 * ENOUGH else 1)  # mostly it takes but half as long
    often = f"{repeat or f'1 to {REPEAT}'}x: {(whole if repeat else max(whole, ENOUGH)) / 60:.1f} minutes at most"
    print(f"{len(prompts)} prompts in {1 + len(ways)} modes, {often}")
    return repeat


class Contest:
    """The prompts of a domain: what is known of them beforehand, and the runs [mode][repeat][prompt] on them.
    known: the Costs by which the modes decide how much to draft."""

    def __init__(self, pair, domain, prompts, ways, known, args, done):
        self.pair, self.domain, self.prompts, self.args, self.before = pair, domain, prompts, args, known
        self.found, self.longest = look_ahead(pair, prompts, args, done), 0.0
        foreseen = curve(known, self.found, args.max_new_tokens)
        best, self.ways = max(1, foreseen.index(max(foreseen))), ["plain", *ways]
        self.modes = modes(pair, [best if way == "best" else way for way in ways], known, args, best)
        self.runs = [[] for _ in self.modes]
        # What the rounds of the fixed gammas cost is timed again, between the turns of the races.
        fixed = sorted({mode.gamma for mode in self.modes if mode.name in ("plain", "speculative")})
        self.timing, self.turns = Timing(pair, middle(prompts), fixed, options(pair[0], args)), itertools.count()

    def race(self, done):
        """Race once more on each prompt."""

        def between():
            if next(self.turns) % 2 == 0:  # after every second turn: that is enough, and cheaper
                self.timing.turn()

        start = now(self.pair[0].device)
        for of_mode in self.runs:
            of_mode.append([])
        for ids in self.prompts:
            for of_mode, run in zip(self.runs, race(self.pair[0], self.modes, ids, self.args, between), strict=True):
                of_mode[-1].append(run)
                done()
        self.longest = max(self.longest, now(self.pair[0].device) - start)

    def end(self, bandwidth):
        """Returns the Costs, the rows of the table, and lines on texts that are not those of plain decoding."""
        costs, notes, rows, target = self.timing.costs(self.before), [], [], self.pair[0]
        self.timing = None  # its caches can go
        foreseen = curve(costs, self.found, self.args.max_new_tokens)
        reach = memory.read(target, len(middle(self.prompts))) / costs.verify[0] / 1e9 / bandwidth
        for way, mode, mine in zip(self.ways, self.modes, self.runs, strict=True):
            row = {"domain": self.domain, "way": way} | summary(mode, mine, self.runs[0], costs, foreseen)
            if self.args.temperature == 0:
                row |= compare(target, self.prompts, mine, self.runs[0])
                where = "{}, {}, prompt {}: parts at token {}, where two logits are {:.1e} apart"
                notes += [where.format(self.domain, mode.name, *parted) for parted in row["parted"]]
            more = {"predicted_by_gamma": foreseen, "costs": vars(costs), "reach": reach}
            rows.append(row if mode.drafter else row | more)
        return costs, rows, notes


def middle(prompts):
    """The one of middling length."""
    return sorted(prompts, key=len)[len(prompts) // 2]


def showdown(pair, asked, args):
    """Measure the ways of args.gamma on the prompts {domain: [ids]}, and print the table as it comes. Returns its rows,
    and what --json adds to "pair" and "machine"."""
    ways, rows, notes, known, device = args.gamma or WAYS, [], [], {}, pair[0].device
    end, gammas = now(device) + ENOUGH, [*range(MOST + 1), *sorted({w for w in ways if w not in WAYS and w > MOST})]
    repeat, bandwidth = plan(pair[0], asked, ways, gammas, args), read_bandwidth(device)
    texts = [ids for some in asked.values() for ids in some]
    costs, contests = measure(pair, middle(texts), gammas, options(pair[0], args)), []
    print(f"\n{table.HEADER}")
    with tqdm(desc="decoding", unit="text", disable=None, leave=False) as bar:

        def show(contest):
            known[contest.domain], some, parted = contest.end(bandwidth)
            rows.extend(some)
            notes.extend(parted)
            bar.write("\n".join(map(table.line, some)))

        bar.total = len(texts) * (1 + (repeat or 1) * (1 + len(ways)))
        for domain, prompts in asked.items():
            contests.append(Contest(pair, domain, prompts, ways, costs, args, bar.update))
            contests[-1].race(bar.update)
            if repeat == 1:
                show(contests[-1])
        if not repeat:
            times = min(REPEAT, 1 + max(0.0, end - now(device)) / sum(contest.longest for contest in contests))
            bar.total = int(len(texts) * (1 + times * (1 + len(ways))))
        # All domains, and then all again: what slows the machine down for some seconds is not in all runs of one.
        for contest in contests * ((repeat or REPEAT) - 1):
            if not repeat and now(device) + contest.longest > end:
                break
            contest.race(bar.update)
            if len(contest.runs[0]) == repeat:
                show(contest)
        for contest in contests[len(known) :]:
            show(contest)
    times = sorted({len(contest.runs[0]) for contest in contests})
    print("\n".join([table.legend(times, TURN), *notes, *table.verdict(rows, known)]))
    return rows, {"repeat": times[0]}, {"bandwidth": bandwidth}


def speed(runs):
    """Tokens a second of runs [repeat][prompt]: all tokens by all seconds, so that a long text weighs more, with the
    median of the repetitions for each prompt. 0 if all ended in their first round: there was nothing to time."""
    tokens = sum(len(round.tokens) for run in runs[0] for round in run.rounds)
    seconds = sum(statistics.median(run.seconds for run in of_prompt) for of_prompt in zip(*runs, strict=True))
    return tokens / seconds if tokens else 0.0


def compare(target, prompts, runs, plain):
    """Of greedy texts [repeat][prompt]: how many are those of plain decoding, and where the others part from it."""
    parted = []
    for mine, usual in zip(runs, plain, strict=True):
        for number, (ids, a, b) in enumerate(zip(prompts, usual, mine, strict=True), 1):
            if (apart := first_difference(target, ids, a.ids, b.ids)) is not None:
                parted.append((number, *apart))
    texts = len(runs) * len(prompts)
    return {"texts": texts, "same": texts - len(parted), "parted": parted, "identical": not parted}


def summary(mode, runs, plain, known, foreseen):
    """What a row tells of a mode. runs, plain: [repeat][prompt], each a Run. known: Costs. foreseen: by gamma."""
    rounds = [round for run in runs[0] for round in run.rounds]
    tokens, drafting = sum(len(round.tokens) for round in rounds), [round for round in rounds if round.drafted]
    drafted, accepted = (sum(getattr(round, name) for round in rounds) for name in ("drafted", "accepted"))
    longest = max((round.drafted for round in rounds), default=0)
    # Drafts behind a refused one are never judged; nor are those behind an end of text that was kept.
    kept = [sum(round.accepted > i for round in rounds) for i in range(longest)]
    refused = [sum(r.accepted == i < r.drafted and len(r.tokens) > i for r in rounds) for i in range(longest)]
    ratios = [speed([mine]) / (speed([usual]) or 1.0) for mine, usual in zip(runs, plain, strict=True)]
    alone = [[[[run] for run in of_prompt] for of_prompt in zip(*some, strict=True)] for some in (runs, plain)]
    if mode.name in ("plain", "speculative"):
        predicted = foreseen[mode.gamma]
    else:  # how such a drafter will draft cannot be foreseen: its rounds and its seconds are taken from the run
        expected = sum(known.verify[round.drafted] + known.other[round.drafted] for round in rounds)
        expected += sum(run.draft.seconds for run in runs[0]) * speed(plain[:1]) * known.round(0)
        predicted = tokens * known.round(0) / expected if rounds else 1.0
    a = accepted / max(accepted + sum(refused), 1)
    return {
        "mode": mode.name,
        "gamma": mode.gamma,
        "tokens": tokens,
        "rounds": len(rounds),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / max(drafted, 1),
        "tokens_per_round": tokens / max(len(rounds), 1),
        "tokens_per_round_theory": sum(a**i for i in range(mode.gamma + 1)),  # = (1 - a^(gamma + 1)) / (1 - a)
        "tokens_per_second": speed(runs),
        "speedup": speed(runs) / (speed(plain) or 1.0),
        "speedup_low": min(ratios),
        "speedup_high": max(ratios),
        "by_prompt": [speed(mine) / (speed(usual) or 1.0) for mine, usual in zip(*alone, strict=True)],
        "predicted_speedup": predicted,
        "cost_ratio": known.c,
        "judged": [a + b for a, b in zip(kept, refused, strict=True)],
        "kept": kept,
        "nothing_accepted": sum(round.accepted == 0 for round in drafting) / max(len(drafting), 1),
        "share": share([run for repetition in runs for run in repetition]) if rounds else None,
        "identical": None,  # sampled texts are not compared
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
