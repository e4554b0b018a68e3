"""Measure speculative decoding: plain against speculative, with your pair, on your machine.

    python bench.py                    the showdown: per domain, plain against speculative
    python bench.py memory             what fits where, before any weight is read
    python bench.py watch "PROMPT"     live text, coloured by who wrote each token

A model (--target, --draft) is a folder or a Hub id; `--target tiny`, `qwen2.5` and `coder` name two at once.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections import namedtuple

import torch
from huggingface_hub.utils import tqdm

import memory
from machine import describe
from model import Config, Qwen2, find
from pairs import PAIRS, choose, prompts
from speculative import DraftModel, speculative_decode
from text import Stream, Text, check_same_ids

# One prompt, decoded once. The first round, which reads the prompt, is in `ids` but in none of the numbers.
Run = namedtuple("Run", "ids seconds tokens rounds drafted accepted rejected")


def now(device):
    if device.type != "cpu":  # where Python runs ahead of the kernels
        torch.accelerator.synchronize()
    return time.perf_counter()


def decode(pair, ids, gamma, args, limit, show=lambda round: None):
    """Decode one prompt, with caches and a generator of its own. pair: target, draft. show: called with each Round."""
    target, draft = pair
    generator = torch.Generator(target.device).manual_seed(args.seed)
    sampling = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "generator": generator}
    vocab = min(target.config.vocab_size, draft.config.vocab_size)
    drafter = DraftModel(draft, len(ids) + limit, vocab=vocab, **sampling)
    rounds, clock = [], []
    for round in speculative_decode(target, drafter, ids, limit, gamma, eos=target.config.eos, **sampling):
        clock.append(now(target.device))
        rounds.append(round)
        show(round)
    if not rounds:
        raise ValueError(f"the prompt fills the context of {len(ids)} tokens: shorten it")
    return Run(
        ids=[id for round in rounds for id in round.tokens],
        seconds=clock[-1] - clock[0],
        tokens=sum(len(round.tokens) for round in rounds[1:]),
        rounds=len(rounds) - 1,
        drafted=sum(round.drafted for round in rounds[1:]),
        accepted=sum(round.accepted for round in rounds[1:]),
        rejected=sum(round.accepted < round.drafted for round in rounds[1:]),  # at most one draft a round
    )


def total(runs):
    """Several runs as one: all tokens by all seconds, so that a long text weighs more than a short one."""
    return Run([], *(sum(getattr(run, name) for run in runs) for name in Run._fields[1:]))


def speed(run):
    """Tokens a second. 0 for a text that ended in its first round: there was nothing to time."""
    return run.tokens / run.seconds if run.tokens else 0.0


def costs(pair, gamma, repeat=7):
    """Cost ratio c = draft step / target step, verify cost v = target over gamma + 1 rows / over 1, as medians."""
    target, draft = pair
    context = max(1, min(128, *(model.config.max_position_embeddings - gamma - 1 for model in pair)))
    jobs = {"step": (target, 1), "verify": (target, gamma + 1), "draft": (draft, 1)}
    caches, seconds = {}, {job: [] for job in jobs}
    for job, (model, _) in jobs.items():
        caches[job] = model.new_cache(context + gamma + 1)
        model(torch.zeros(context, dtype=torch.long), caches[job], last=0)
    for _ in range(repeat + 1):  # in turn, because a machine's speed drifts
        for job, (model, rows) in jobs.items():
            start = now(model.device)
            model(torch.zeros(rows, dtype=torch.long), caches[job], last=rows)
            seconds[job].append(now(model.device) - start)
            caches[job].rollback(context)
    step, verify, draft = (statistics.median(seconds[job][1:]) for job in jobs)  # the first was the warm-up
    return draft / step, verify / step


def first_difference(target, ids, a, b):
    """Where the greedy texts a and b part, and how far apart the two tokens' logits are there. None if they do not."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if at is None:
        return None if len(a) == len(b) else (min(len(a), len(b)), float("nan"))
    logits = target(torch.tensor(ids + a[:at]), target.new_cache(len(ids) + at), last=1)[0]
    return at, (logits[a[at]] - logits[b[at]]).abs().item()


def summary(domain, mode, gamma, runs, plain, c, v):
    """One row of the table and of the JSON file. runs, plain: for each repetition, the Run of each prompt."""
    first, times = total(runs[0]), [(speed(total(a)), speed(total(b))) for a, b in zip(runs, plain, strict=True)]
    rounds = max(first.rounds, 1)
    a = first.accepted / max(first.accepted + first.rejected, 1)  # of the drafts that were judged
    return {
        "domain": domain,
        "mode": mode,
        "gamma": gamma,
        "tokens": first.tokens,
        "rounds": first.rounds,
        "drafted": first.drafted,
        "accepted": first.accepted,
        "acceptance_rate": first.accepted / max(first.drafted, 1),
        "tokens_per_round": first.tokens / rounds,
        "tokens_per_round_theory": sum(a**i for i in range(gamma + 1)),  # = (1 - a^(gamma + 1)) / (1 - a)
        "tokens_per_second": statistics.median(a for a, _ in times),
        "speedup": statistics.median(a / b if b else 0.0 for a, b in times),
        "predicted_speedup": first.tokens / (rounds * v + first.drafted * c) if gamma else 1.0,
        "cost_ratio": c,
    }


HEADER = "domain     mode         gamma   tok/s  speed-up  predicted  accepted  tok/round  theory  same text"
LEGEND = """
tok/s      tokens a second, the median of {repeat}. Reading the prompt is not part of it.
speed-up   tok/s over that of the plain row: the same target, prompts and lengths, decoded in turn. Median of {repeat}.
predicted  tok/round / (v + c drafts/round). A target pass over {rows} rows costs v = {v:.2f} passes over 1 row, a draft
           step c = {c:.2f}; both were measured just now, so this tells whether the speed-up is understood.
accepted   drafted tokens that the target kept. tok/round also counts the one that it adds itself.
theory     tok/round if each draft that is judged had the same chance: (1 - a^{rows}) / (1 - a), where a is the share of
           these that were kept (Leviathan et al. 2023, eq. 1). Drafts behind a rejected one are never judged.
same text  prompts whose greedy text is that of plain decoding, token for token."""


def line(row, parted):
    """A row as a line of the table. parted: for each greedy text, None where it is that of plain decoding."""
    cells = f"{row['domain']:<11}{row['mode']:<12}{row['gamma']:>6}"
    cells += f"{row['tokens_per_second']:>8.2f}{row['speedup']:>9.2f}x"
    if row["mode"] != "plain":
        cells += f"{row['predicted_speedup']:>10.2f}x{row['acceptance_rate']:>9.0%} {row['tokens_per_round']:>10.2f}"
        cells += f"{row['tokens_per_round_theory']:>8.2f}"
        cells += f"{parted.count(None):>6} of {len(parted)}" if parted else ""
    return cells


def showdown(pair, asked, args):
    """Decode the prompts, {domain: [ids]}, plainly and speculatively, in turn. Prints the table, returns its rows."""
    modes = {"plain": 0, "speculative": args.gamma}
    rows, notes = [], []
    steps = len(modes) * args.repeat * sum(map(len, asked.values()))
    with tqdm(total=steps, desc="warming up", unit="text", disable=None, leave=False) as bar:
        c, v = costs(pair, args.gamma)
        for gamma in modes.values():  # the shapes that are timed below
            decode(pair, next(iter(asked.values()))[0], gamma, args, 2 * gamma + 3)
        bar.write(HEADER)
        bar.set_description("decoding")
        for domain, texts in asked.items():
            runs = {mode: [[] for _ in range(args.repeat)] for mode in modes}
            for repetition in range(args.repeat):
                for ids in texts:
                    for mode, gamma in modes.items():
                        runs[mode][repetition].append(decode(pair, ids, gamma, args, args.max_new_tokens))
                        bar.update()
            both = zip(texts, runs["plain"][0], runs["speculative"][0], strict=True)
            parted = [first_difference(pair[0], ids, a.ids, b.ids) for ids, a, b in both if args.temperature == 0]
            for mode, gamma in modes.items():
                row = summary(domain, mode, gamma, runs[mode], runs["plain"], c, v)
                row["identical"] = None if args.temperature else mode == "plain" or not any(parted)
                rows.append(row)
                bar.write(line(row, parted))
            for number, (at, gap) in ((n, apart) for n, apart in enumerate(parted, 1) if apart):
                notes.append(f"{domain} prompt {number} parts at token {at}, where two logits are {gap:.1e} apart")
    print("\n".join([LEGEND.format(repeat=args.repeat, rows=args.gamma + 1, v=v, c=c), *notes]))
    return rows


def watch(pair, text, args):
    """Decode one prompt, the text appearing as it comes, each token in the colour of where it is from."""
    colours = {"drafted and kept": 32, "correction of a draft": 33, "the target's own": 36}
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def paint(kind, piece):
        return f"\033[{colours[kind]}m{piece}\033[0m" if coloured and piece else piece

    stream = Stream(text)

    def show(round):
        for i, id in enumerate(round.tokens):
            last = "correction of a draft" if round.accepted < round.drafted else "the target's own"
            kind = "drafted and kept" if i < round.accepted else last
            print(paint(kind, stream.feed(id)), end="", flush=True)

    print(", ".join(paint(kind, kind) for kind in colours), end="\n\n")
    ids = text.prompt(args.prompt)
    run = decode(pair, ids, args.gamma, args, args.max_new_tokens, show)
    print(stream.finish())
    plain = decode(pair, ids, 0, args, min(args.max_new_tokens, 17))
    per_round = run.tokens / max(run.rounds, 1)
    print(f"\n{len(run.ids)} tokens. After the first round, which reads the prompt, {speed(run):.2f} a second;")
    print(f"plain decoding, over {plain.tokens}: {speed(plain):.2f}")
    print(f"gamma {args.gamma}: {run.drafted} drafted, {run.accepted} kept, {per_round:.2f} tokens a round")


def parse(argv):
    class Parser(argparse.ArgumentParser):
        def error(self, message):
            self.exit(2, f"bench.py: {message}\n")

    def number(kind, low, high):
        def check(text):
            if not low <= kind(text) <= high:
                raise argparse.ArgumentTypeError(f"{text} is out of range, {low} to {high}")
            return kind(text)

        check.__name__ = kind.__name__  # argparse names it where text is no number at all
        return check

    many, inf = 10**9, float("inf")
    parser = Parser(prog="bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", default="showdown", choices=["showdown", "memory", "watch"])
    parser.add_argument("prompt", nargs="?", help="for watch: what to ask, or with a base model what to continue")
    parser.add_argument("--target", help=f"the large model, or a pair: {', '.join(PAIRS)}. Default: one that is here")
    parser.add_argument("--draft", help="the small model: folder or Hub id")
    parser.add_argument("--bits", type=int, choices=[4, 16, 32], help="Default: 32; 16 on a GPU; what a folder has")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    parser.add_argument("--gamma", type=number(int, 0, 64), default=4, help="tokens a round may draft. Default: 4")
    parser.add_argument("--temperature", type=number(float, 0, inf), default=0.0, help="0, the default, is greedy")
    parser.add_argument("--top-k", type=number(int, 0, many), default=0, help="0, the default, is no limit")
    parser.add_argument("--top-p", type=number(float, 1e-9, 1), default=1.0, help="1, the default, is no limit")
    parser.add_argument("--seed", type=number(int, 0, 2**63 - 1), default=0)
    parser.add_argument("--domain", default="all", choices=["code", "factual", "creative", "edit", "all"])
    parser.add_argument("--max-new-tokens", type=number(int, 2, many), default=64, help="of each text. Default: 64")
    parser.add_argument("--repeat", type=number(int, 1, 99), default=3, help="times to measure. Default: 3")
    parser.add_argument("--context", type=number(int, 8, many), default=4096, help="memory: of a text. Default: 4096")
    parser.add_argument("--measure", action="store_true", help="memory: load the pair, and compare")
    parser.add_argument("--json", metavar="FILE", help="write the table there, too")
    return parser.parse_args(argv)


def start(args):
    """Refuse what can be refused before any weight is read, load the pair, and do what was asked for."""
    if (args.command == "watch") != (args.prompt is not None):
        raise ValueError('watch takes a prompt and the showdown none: python bench.py watch "Why is the sky blue?" ...')
    if args.command != "memory" and args.max_new_tokens < args.gamma + 2:
        raise ValueError(f"--max-new-tokens must be --gamma + 2 or more, here {args.gamma + 2}: round 1 is not timed")
    if not {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}.get(args.device, True):
        raise ValueError(f"--device {args.device}: torch {torch.__version__} finds none here; leave it out for the CPU")
    if args.json and (os.path.isdir(args.json) or not os.access(os.path.dirname(os.path.abspath(args.json)), os.W_OK)):
        raise ValueError(f"--json {args.json}: not a file that can be written")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    target, draft, why = choose(args.target, args.draft, device, args.bits)
    if why:
        print(why)
    if args.command == "memory":
        rows = memory.report(target, draft, args, device)
        return write(args, describe(torch.device(device)), rows, target=target, draft=draft)
    folders = find(target), find(draft)
    texts = [Text(folder, Config.read(folder).eos) for folder in folders]
    check_same_ids(*texts)
    asked = {} if args.command == "watch" else prompts(texts[0].is_chat, args.domain)
    pair = [Qwen2.load(folder, args.bits, device) for folder in folders]
    kernel, dtype = type(pair[0].layers[0].qkv).__name__, str(pair[0].dtype).removeprefix("torch.")
    about, dtype = describe(pair[0].device), dtype if kernel == "Linear" else f"4 bits ({kernel})"
    how = f"temperature {args.temperature:g}" if args.temperature else "greedy"
    print(f"target {target}\ndraft  {draft}\n{dtype}, {how}, gamma {args.gamma}, up to {args.max_new_tokens} tokens")
    print(f"{about['name']} ({about['device']}, {about['threads']} threads), torch {about['torch']}\n")
    if args.command == "watch":
        return watch(pair, texts[0], args)
    ids = {domain: [texts[0].prompt(prompt) for prompt in some] for domain, some in asked.items()}
    write(args, about, showdown(pair, ids, args), target=target, draft=draft, dtype=dtype)


def write(args, about, rows, **pair):
    """The file of --json, if one was asked for."""
    if args.json:
        with open(args.json + ".part", "w") as f:
            json.dump({"machine": about, "pair": vars(args) | pair, "rows": rows}, f, indent=1)
        os.replace(args.json + ".part", args.json)


def main(argv=None):
    args = parse(argv)
    sys.stdout.reconfigure(errors="replace")  # a Windows console may lack a character of the text
    try:
        start(args)
    except (ValueError, OSError, FloatingPointError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise  # a fault of this program; out of memory is none, but torch has no exception for it on a CPU
        print(f"bench.py: {' '.join(str(error).split())[:400]}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
