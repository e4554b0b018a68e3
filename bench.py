"""Measure speculative decoding: plain against speculative, on your machine, with your pair.

    python bench.py --target DIR --draft DIR             the showdown: per domain, plain against speculative
    python bench.py watch "PROMPT" --target DIR --draft DIR   live text, coloured by who wrote each token

A model is a folder, a Hub id, or the name of a known pair (--target qwen2.5 or coder: both models at once).
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass

import torch
from huggingface_hub.utils import tqdm

from model import Config, Qwen2, find
from speculative import DraftModel, speculative_decode
from text import Stream, Text, check_same_ids

PAIRS = {
    "qwen2.5": ("Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
    "coder": ("Qwen/Qwen2.5-Coder-1.5B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct"),
}

STATEMENT = "def total(items):\n    sum = 0\n    for i in range(len(items)):\n        sum = sum + items[i].price\n    return sum"
NOTICE = (
    "The library will be closed on Friday the 3rd of May for maintenance of the heating. Books that are due on that day "
    "can be returned until Monday without a fee. The reading room on the second floor stays open from nine to five."
)
PROMPTS = {
    "code": [
        "Write a Python function that merges two sorted lists into one sorted list.",
        "Write a Python class for a stack with push, pop, peek and is_empty, with docstrings.",
        "Write a Python function that reads a CSV file and returns the average of one column.",
    ],
    "factual": [
        "What causes the seasons of the year? Explain in one paragraph.",
        "List the planets of the solar system in order, with one fact about each.",
        "How does a refrigerator work? Explain in simple terms.",
    ],
    "creative": [
        "Write the beginning of a story about a lighthouse keeper who finds a letter.",
        "Write a short poem about rain on a tin roof.",
        "Describe a city that only exists at night, in the voice of a tired taxi driver.",
    ],
    "edit": [
        f"Rewrite this code with the parameter renamed to `products`, and change nothing else:\n\n{STATEMENT}",
        f"Correct the date to the 10th of May and repeat the text, otherwise word for word:\n\n{NOTICE}",
        f"Summarise this notice in two sentences:\n\n{NOTICE}",
    ],
}


@dataclass
class Run:
    """One prompt decoded once. The first round, which includes reading the prompt, counts for neither rate."""

    ids: list
    seconds: float
    tokens: int
    rounds: int
    drafted: int
    accepted: int


def now(device):
    if device.type == "cuda":
        torch.cuda.synchronize()  # kernels are only queued when Python goes on
    return time.perf_counter()


def decode(pair, ids, gamma, args, limit, show=None):
    """Decode one prompt with fresh caches and a fresh generator. The time is that of all rounds but the first.

    pair: (target, draft). show: called with each Round as it comes.
    """
    target, draft = pair
    sampling = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    sampling["generator"] = torch.Generator().manual_seed(args.seed)
    vocab = min(target.config.vocab_size, draft.config.vocab_size)
    drafter = DraftModel(draft, len(ids) + limit, vocab=vocab, **sampling)
    rounds, clock = [], [now(target.device)]
    for round in speculative_decode(target, drafter, ids, limit, gamma, eos=target.config.eos, **sampling):
        rounds.append(round)
        clock.append(now(target.device))
        if show:
            show(round)
    later = rounds[1:]
    return Run(
        ids=[id for round in rounds for id in round.tokens],
        seconds=clock[-1] - clock[min(1, len(rounds))],
        tokens=sum(len(round.tokens) for round in later),
        rounds=len(later),
        drafted=sum(round.drafted for round in later),
        accepted=sum(round.accepted for round in later),
    )


def total(runs):
    """Many runs as one: rates are of all tokens by all seconds, so a long text weighs more than a short one."""
    fields = ("seconds", "tokens", "rounds", "drafted", "accepted")
    return Run([], *(sum(getattr(run, field) for run in runs) for field in fields))


def costs(pair, gamma, repeat=7):
    """Cost ratio c = draft step / target step, and verify cost v = target over gamma + 1 rows / over 1 row, as medians."""
    target, draft = pair
    ids = [0] * min(128, target.config.max_position_embeddings // 2)
    jobs = {"step": (target, 1), "verify": (target, gamma + 1), "draft": (draft, 1)}
    caches, seconds = {}, {job: [] for job in jobs}
    for job, (model, _) in jobs.items():
        caches[job] = model.new_cache(len(ids) + gamma + 1)
        model(ids, caches[job], last=0)
    for _ in range(repeat + 1):  # in turn, because a machine's speed drifts; the first of each is the warm-up
        for job, (model, rows) in jobs.items():
            start = now(model.device)
            model([0] * rows, caches[job], last=rows)
            seconds[job].append(now(model.device) - start)
            caches[job].rollback(len(ids))
    step, verify, draft = (statistics.median(seconds[job][1:]) for job in jobs)
    return draft / step, verify / step


def first_difference(target, ids, a, b):
    """Where two greedy texts a and b part, and how far apart their tokens' logits are there. None if they are the same."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if at is None:
        return None if len(a) == len(b) else (min(len(a), len(b)), float("nan"))
    logits = target(ids + a[:at], target.new_cache(len(ids) + at), last=1)[0]
    return at, (logits[a[at]] - logits[b[at]]).abs().item()


COLUMNS = "domain     mode          gamma    tok/s  speed-up  predicted  accepted  tok/round  same text"
LEGEND = """
tok/s      tokens a second while decoding; reading the prompt is not counted. Median of {repeat}, taken in turn.
speed-up   against the plain row above it, the same target decoding alone. Median of {repeat}.
predicted  tok/round / (v + gamma c): v = {v:.2f} is what a target pass over {rows} rows costs, c = {c:.2f} what a draft
           step costs, both measured now, as multiples of a target pass over 1 row.
accepted   drafted tokens that the target kept. tok/round: tokens that one round adds, its own one included.
same text  prompts whose greedy text is token for token that of plain decoding."""


def showdown(pair, text, args):
    """Decode every prompt plainly and speculatively, in turn; print two lines for each domain. Returns the JSON rows."""
    domains = list(PROMPTS) if args.domain == "all" else [args.domain]
    prompts = {domain: [text.prompt(prompt) for prompt in PROMPTS[domain]] for domain in domains}
    modes = {"plain": 0, "speculative": args.gamma}
    c, v = costs(pair, args.gamma)
    for gamma in modes.values():  # warm-up: the shapes that are timed below
        decode(pair, prompts[domains[0]][0], gamma, args, 2 * gamma + 3)

    print(COLUMNS)
    rows, notes = [], []
    steps = 2 * args.repeat * sum(map(len, prompts.values()))
    with tqdm(total=steps, desc="decoding", unit="text", disable=None, leave=False) as bar:
        for domain in domains:
            runs = {mode: [[] for _ in range(args.repeat)] for mode in modes}  # mode -> repetition -> prompt
            for repetition in range(args.repeat):
                for ids in prompts[domain]:
                    for mode, gamma in modes.items():
                        runs[mode][repetition].append(decode(pair, ids, gamma, args, args.max_new_tokens))
                        bar.update()
            texts = zip(prompts[domain], runs["plain"][0], runs["speculative"][0], strict=True)
            parted = [first_difference(pair[0], ids, a.ids, b.ids) for ids, a, b in texts] if args.temperature == 0 else []
            for mode, gamma in modes.items():
                row = summary(domain, mode, gamma, runs[mode], runs["plain"], c, v)
                same = f"{parted.count(None)} of {len(parted)}" if gamma and parted else ""
                row["identical"] = not any(parted) if parted else None
                bar.write(
                    f"{domain:<11}{mode:<12}{gamma:>7}{row['tokens_per_second']:>9.2f}{row['speedup']:>9.2f}x"
                    + (f"{row['predicted_speedup']:>10.2f}x{row['acceptance_rate']:>9.0%} " if gamma else " " * 21)
                    + f"{row['tokens_per_round']:>11.2f}  {same:>9}"
                )
                rows.append(row)
            for number, apart in enumerate(parted, 1):
                if apart:
                    notes.append(f"{domain} prompt {number} parts at token {apart[0]}: logits {apart[1]:.1e} apart")
    print(LEGEND.format(repeat=args.repeat, v=v, c=c, rows=args.gamma + 1))
    print("\n".join(notes))
    return rows


def summary(domain, mode, gamma, runs, plain, c, v):
    """One row of the JSON file. runs, plain: per repetition, a Run for each prompt."""
    first, times = total(runs[0]), [(total(a), total(b)) for a, b in zip(runs, plain, strict=True)]
    per_round = first.tokens / max(first.rounds, 1)
    return {
        "domain": domain,
        "mode": mode,
        "gamma": gamma,
        "tokens": first.tokens,
        "rounds": first.rounds,
        "drafted": first.drafted,
        "accepted": first.accepted,
        "acceptance_rate": first.accepted / max(first.drafted, 1),
        "tokens_per_round": per_round,
        "tokens_per_second": statistics.median(a.tokens / a.seconds for a, _ in times),
        "speedup": statistics.median((a.tokens / a.seconds) / (b.tokens / b.seconds) for a, b in times),
        "predicted_speedup": per_round / (v + gamma * c) if gamma else 1.0,
        "cost_ratio": c,
    }


def watch(pair, text, args):
    """Decode one prompt with the text appearing as it comes, coloured by who wrote each token."""
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    paint = (lambda code, piece: f"\033[{code}m{piece}\033[0m" if piece else "") if colour else lambda code, piece: piece
    stream = Stream(text)

    def show(round):
        for i, id in enumerate(round.tokens):
            code = 32 if i < round.accepted else 33 if round.accepted < round.drafted else 36
            print(paint(code, stream.feed(id)), end="", flush=True)

    print(paint(32, "drafted and kept") + ", " + paint(33, "corrected") + ", " + paint(36, "bonus"), end="\n\n")
    ids = text.prompt(args.prompt)
    run = decode(pair, ids, args.gamma, args, args.max_new_tokens, show)
    print(stream.finish())
    plain = decode(pair, ids, 0, args, min(args.max_new_tokens, 17))
    print(
        f"\n{len(run.ids)} tokens at {run.tokens / max(run.seconds, 1e-9):.2f} tok/s; plain {plain.tokens / max(plain.seconds, 1e-9):.2f}. "
        f"gamma {args.gamma}: drafted {run.drafted}, kept {run.accepted}, {run.tokens / max(run.rounds, 1):.2f} tokens a round"
    )


def parse(argv):
    class Parser(argparse.ArgumentParser):
        def error(self, message):  # without the usage lines: one line says it
            self.exit(2, f"bench.py: {message}\n")

    def number(kind, low, high, what):
        def check(text):
            value = kind(text)
            if not low <= value <= high:
                raise argparse.ArgumentTypeError(f"{text} is out of range: {what}")
            return value

        check.__name__ = kind.__name__
        return check

    inf = float("inf")
    parser = Parser(prog="bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", default="showdown", choices=["showdown", "watch"])
    parser.add_argument("prompt", nargs="?", help="what to ask, for watch")
    parser.add_argument("--target", help="large model: folder, Hub id, or " + ", ".join(PAIRS))
    parser.add_argument("--draft", help="small model: folder or Hub id")
    parser.add_argument("--bits", type=int, choices=[16, 32], help="of the weights; default 32 on a CPU, else 16")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    parser.add_argument("--gamma", type=number(int, 0, 64, "0 to 64"), default=4, help="tokens a round may draft (4)")
    parser.add_argument("--temperature", type=number(float, 0, inf, "0 or more"), default=0.0, help="0 is greedy (0)")
    parser.add_argument("--top-k", type=number(int, 0, inf, "0 or more"), default=0, help="0 is no limit (0)")
    parser.add_argument("--top-p", type=number(float, 1e-9, 1, "above 0, up to 1"), default=1.0, help="1 is no limit (1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--domain", default="all", choices=[*PROMPTS, "all"])
    parser.add_argument("--max-new-tokens", type=number(int, 1, inf, "1 or more"), default=64, help="per prompt (64)")
    parser.add_argument("--repeat", type=number(int, 1, 99, "1 to 99"), default=3, help="the median is reported (3)")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there too")
    return parser.parse_args(argv)


def machine(device):
    """What the numbers were measured on; they mean nothing without it."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
    elif os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as f:
            name = next((line.split(":")[1].strip() for line in f if line.startswith("model name")), name)
    return {"device": str(device), "name": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


def run(args):
    if not args.target:
        raise ValueError("no pair: pass --target DIR --draft DIR, or --target coder to download one (4.1 GB)")
    target, draft = PAIRS.get(args.target, (args.target, args.draft))
    if not draft:
        raise ValueError(f"--target {target} needs a --draft, a smaller model with the same tokenizer")
    if args.command == "watch" and args.prompt is None:
        raise ValueError('watch needs a prompt: python bench.py watch "Why is the sky blue?" ...')
    if args.json and not os.path.isdir(os.path.dirname(os.path.abspath(args.json))):
        raise ValueError(f"--json {args.json}: there is no such folder to write to")
    names, folders = (target, draft), (find(target), find(draft))
    texts = [Text(folder, Config.read(folder).eos) for folder in folders]
    check_same_ids(*texts)
    device = None if args.device == "auto" else args.device
    pair = [Qwen2.load(folder, args.bits, device) for folder in folders]
    about = machine(pair[0].device)
    print(f"target {names[0]}, draft {names[1]}, {str(pair[0].dtype).removeprefix('torch.')}")
    print(f"on {about['name']} ({about['device']}, {about['threads']} threads, torch {about['torch']}), ", end="")
    print(f"gamma {args.gamma}, " + (f"temperature {args.temperature}" if args.temperature else "greedy") + "\n")
    if args.command == "watch":
        return watch(pair, texts[0], args)
    rows = showdown(pair, texts[0], args)
    if args.json:
        settings = {"target": names[0], "draft": names[1], "dtype": str(pair[0].dtype), **vars(args)}
        with open(args.json + ".part", "w") as f:
            json.dump({"machine": about, "pair": settings, "rows": rows}, f, indent=1)
        os.replace(args.json + ".part", args.json)


def main(argv=None):
    args = parse(argv)
    try:
        run(args)
    except (ValueError, OSError, NotImplementedError, FloatingPointError) as error:
        sys.exit(print(f"bench.py: {error}", file=sys.stderr) or 2)


if __name__ == "__main__":
    main()
