"""Measure speculative decoding: plain against speculative, with your pair, on your machine.

    python bench.py                    the showdown: per domain, plain against speculative
    python bench.py verify             what a pass over 1 to 32 tokens costs, and against which bandwidth (Lab 1)
    python bench.py memory             what fits where, before any weight is read
    python bench.py watch "PROMPT"     live text, coloured by who wrote each token
    python bench.py compare A.json B.json ...      what --json wrote, on other machines or with other engines

A model (--target, --draft) is a folder or a Hub id; `--target tiny`, `qwen2.5` and `coder` name two at once.
Below each table stands what its columns mean.
"""

import argparse
import hashlib
import json
import os
import sys

import torch

from labs import engines
from measure import board, costs, memory, peers, plots, showdown, verify, watch
from measure.machine import describe
from model import Config, Qwen2, find
from pairs import PAIRS, choose, prompts
from text import Text, check_same_ids


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

    def gammas(text):
        """Of "4", "1,2,4,8", "auto", "best,lookup": numbers and names."""
        found = [int(word) if word.isdecimal() else word for word in text.split(",")]
        if unknown := [g for g in found if g not in showdown.WAYS and not (isinstance(g, int) and 0 < g <= 64)]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is neither 1 to 64 nor one of {', '.join(showdown.WAYS)}")
        return found

    many, inf = 10**9, float("inf")
    parser = Parser(prog="bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = ["showdown", "verify", "memory", "watch", "compare"]
    parser.add_argument("command", nargs="?", default="showdown", choices=commands)
    parser.add_argument("what", nargs="*", help="for watch: the prompt; for compare: files")
    parser.add_argument("--target", help=f"the large model, or a pair: {', '.join(PAIRS)}. Default: one that is here")
    parser.add_argument("--draft", help="the small model: folder or Hub id")
    parser.add_argument("--bits", type=int, choices=[4, 16, 32], help="Default: 32; 16 on a GPU; what a folder has")
    parser.add_argument("--head-bits", type=int, choices=[4, 8], default=4, help="with --bits 4. Default: 4")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    parser.add_argument("--gamma", type=gammas, metavar="N|auto", help="tokens a round may draft, or how that and the "
                        "drafts are found; or several, as 1,2,4,auto. Default: best,auto,lookup,hybrid")  # fmt: skip
    parser.add_argument("--temperature", type=number(float, 0, inf), default=0.0, help="0, the default, is greedy")
    parser.add_argument("--top-k", type=number(int, 0, many), default=0, help="0, the default, is no limit")
    parser.add_argument("--top-p", type=number(float, 1e-9, 1), default=1.0, help="1, the default, is no limit")
    parser.add_argument("--seed", type=number(int, 0, 2**63 - 1), default=0)
    parser.add_argument("--domain", default="all", choices=["code", "factual", "creative", "edit", "all"])
    parser.add_argument("--max-new-tokens", type=number(int, 2, many), default=64, help="of each text. Default: 64")
    parser.add_argument("--repeat", type=number(int, 1, 99), help="Default: what fits in 45 seconds")
    parser.add_argument("--context", type=number(int, 8, many), default=4096, help="memory: of a text. Default: 4096")
    parser.add_argument("--measure", action="store_true", help="memory: load the pair, and compare")
    parser.add_argument("--engine", default="ours", choices=["ours", "transformers", "server"])
    parser.add_argument("--url", help="of the server, or several with commas, the first without speculation")
    parser.add_argument("--json", metavar="FILE", help="write the table there, too")
    parser.add_argument("--plot", metavar="FILE", help="draw it there: .png or .svg")
    return parser.parse_args(argv)


def check(args):
    """Refuse what can be refused before any weight is read."""
    if (args.command == "watch") != (len(args.what) == 1) and args.command != "compare":
        raise ValueError(f'watch takes a prompt, {args.command} none: python bench.py watch "Why is the sky blue?" ...')
    if args.command == "compare" and not args.what:
        raise ValueError("compare takes files that --json wrote: python bench.py compare A.json B.json")
    if args.engine != "ours" and (args.command != "showdown" or args.gamma or args.temperature):
        raise ValueError(f"--engine {args.engine} is for the showdown, greedy, and without --gamma")
    if (args.engine == "server") != bool(args.url):
        raise ValueError("--engine server needs a --url, as http://127.0.0.1:8080, and no other engine does")
    most = max([g for g in args.gamma or [] if isinstance(g, int)], default=4)
    if args.command in ("showdown", "watch") and args.max_new_tokens < most + 2:
        raise ValueError(f"--max-new-tokens must be --gamma + 2 or more, here {most + 2}: round 1 is not timed")
    if not {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}.get(args.device, True):
        raise ValueError(f"--device {args.device}: torch {torch.__version__} finds none here; leave it out for the CPU")
    if args.json and (os.path.isdir(args.json) or not os.access(os.path.dirname(os.path.abspath(args.json)), os.W_OK)):
        raise ValueError(f"--json {args.json}: not a file that can be written")
    if args.plot and args.command in ("memory", "watch"):
        raise ValueError(f"--plot {args.plot}: {args.command} has nothing to draw")
    if args.plot:
        plots.check(args.plot)
    if args.command == "watch" and args.gamma and args.gamma != ["auto"] and not isinstance(args.gamma[-1], int):
        raise ValueError("watch takes one --gamma: a number, or auto")
    return most


def start(args):
    """Load the pair, and do what was asked for."""
    most = check(args)
    if args.command == "compare":
        return finish(args, board.compare(args.what))
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    alone = args.target if args.command == "verify" and args.target not in PAIRS else None
    target, draft, why = choose(args.target, args.draft or alone, device, args.bits)
    if why:
        print(why)
    names = {"target": target, "draft": None if args.command == "verify" else draft, "engine": args.engine}
    if args.command == "memory":
        args.gamma, about = most, describe(torch.device(device))
        return finish(args, [result(args, about, memory.report(target, draft, args, device), names)])
    folders = find(target), find(draft)
    texts = [Text(folder, Config.read(folder).eos) for folder in folders]
    check_same_ids(*texts)
    asked = prompts(texts[0].is_chat, args.domain) if args.command == "showdown" else {}
    others, alone = {}, args.command == "verify" or args.engine != "ours"  # then our draft model is not needed
    if args.engine == "transformers":
        others = engines.transformers_modes(*folders, device, args.bits or (32 if device == "cpu" else 16))
    elif args.engine == "server":
        others = engines.server_modes(args.url.split(","))
    pair = [Qwen2.load(folder, args.bits, device, head_bits=args.head_bits) for folder in folders[: 1 if alone else 2]]
    kernel, dtype = type(pair[0].layers[0].qkv).__name__, str(pair[0].dtype).removeprefix("torch.")
    about, names["dtype"] = describe(pair[0].device), dtype if kernel == "Linear" else f"4 bits ({kernel})"
    how = f"temperature {args.temperature:g}" if args.temperature else "greedy"
    print(f"target {target}")
    if args.command != "verify":
        print(f"draft  {draft}\n{how}, up to {args.max_new_tokens} tokens a text")
    print(
        f"{names['dtype']}, {about['name']} ({about['device']}, {about['threads']} threads, torch {about['torch']})\n"
    )
    if args.command == "watch":
        return live(pair, texts[0], args)
    if args.command == "verify":
        rows, more, bandwidth = verify.report(pair[0], args)
        return finish(args, [result(args, about | bandwidth, rows, names | more)])
    ids = {domain: [texts[0].prompt(prompt) for prompt in some] for domain, some in asked.items()}
    names["prompts"] = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:8]  # by which compare knows others
    if others:
        rows = peers.peers(pair[0], texts[0], args.engine, others, ids, args)
    else:
        rows = showdown.showdown(pair, ids, args)
    finish(args, [result(args, about, rows, names)])


def live(pair, text, args):
    """Let watch decode. --gamma auto needs to know what passes cost, here behind this prompt."""
    args.prompt, (args.gamma, *_), drafter = args.what[0], args.gamma or [4], None
    if args.gamma == "auto":
        known = costs.measure(pair, text.prompt(args.prompt), showdown.MOST, showdown.options(pair[0], args))
        auto = showdown.modes(pair, ["auto"], known, args)[1].drafter
        dice = showdown.options(pair[0], args)
        dice["generator"].manual_seed(args.seed + 1)  # not those of the target

        def drafter(ids, limit):
            return auto(ids, dice)

    watch.watch(pair, text, args, drafter)


def result(args, about, rows, names):
    """What --json writes: enough to draw and to compare everything again."""
    return {"machine": about, "pair": vars(args) | names, "rows": rows}


def finish(args, documents):
    """The files of --json and --plot, if they were asked for."""
    if args.json:
        with open(args.json + ".part", "w", encoding="utf-8") as f:
            json.dump(documents[0], f, indent=1)
        os.replace(args.json + ".part", args.json)
    if args.plot:
        plots.draw(documents, args.plot)


def main(argv=None):
    args = parse(argv)
    sys.stdout.reconfigure(errors="replace")  # a Windows console may lack a character of the text
    try:
        start(args)
    except BrokenPipeError:  # whoever read this, `head` say, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ValueError, OSError, FloatingPointError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise  # a fault of this program; out of memory is none, but torch has no exception for it on a CPU
        print(f"bench.py: {' '.join(str(error).split())[:400]}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
