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
    gamma_help = (
        "tokens a round may draft, or how to decide; or several: 1,2,4,auto. Default: best,auto,lookup,hybrid; "
    )
    parser.add_argument("--gamma", type=gammas, metavar="N|auto", help=gamma_help + "for watch and memory 4")
    parser.add_argument("--temperature", type=number(float, 0, inf), default=0.0, help="0, the default, is greedy")
    parser.add_argument("--top-k", type=number(int, 0, many), default=0, help="0, the default, is no limit")
    parser.add_argument("--top-p", type=number(float, 1e-9, 1), default=1.0, help="1, the default, is no limit")
    parser.add_argument("--seed", type=number(int, 0, 2**63 - 1), default=0)
    parser.add_argument("--domain", default="all", choices=["code", "factual", "creative", "edit", "all"])
    parser.add_argument("--max-new-tokens", type=number(int, 2, many), default=64, help="of each text. Default: 64")
    parser.add_argument("--repeat", type=number(int, 1, 99), help="Default: 1 to 3, by time; verify 9; other engines 1")
    parser.add_argument("--context", type=number(int, 8, many), default=4096, help="memory: of a text. Default: 4096")
    parser.add_argument("--measure", action="store_true", help="memory: load the pair, and compare")
    parser.add_argument("--engine", default="ours", choices=["ours", "transformers", "server"])
    parser.add_argument("--url", help="of the server, or several with commas, the first without speculation")
    parser.add_argument("--json", metavar="FILE", help="write the table there, too")
    parser.add_argument("--plot", metavar="FILE", help="draw it there: .png or .svg")
    return parser.parse_intermixed_args(argv)  # the files of compare may stand behind an option


def check(args):
    """Refuse what can be refused before any weight is read."""
    if args.command != "compare" and len(args.what) != (args.command == "watch"):
        raise ValueError(
            f'{args.command}: what is {args.what}? watch takes one prompt: python bench.py watch "Why ...?"'
        )
    if args.command == "compare" and not args.what:
        raise ValueError("compare takes files that --json wrote: python bench.py compare A.json B.json")
    if args.engine != "ours" and (args.command != "showdown" or args.gamma or args.temperature):
        raise ValueError(f"--engine {args.engine} is for the showdown, greedy, and without --gamma")
    if (args.engine == "server") != bool(args.url):
        raise ValueError("--engine server needs a --url, as http://127.0.0.1:8080, and no other engine does")
    if args.command == "watch" and args.gamma not in (None, ["auto"], numbers(args.gamma)[:1]):
        raise ValueError("watch takes one --gamma: a number, or auto")
    most = max(numbers(args.gamma), default=4 if args.command == "watch" else showdown.MOST)
    if args.command in ("showdown", "watch") and args.max_new_tokens < most + 2:
        raise ValueError(f"--max-new-tokens must be {most + 2} or more, as {most} are drafted and round 1 is not timed")
    if not {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}.get(args.device, True):
        raise ValueError(f"--device {args.device}: torch {torch.__version__} finds none here; leave it out for the CPU")
    if args.json and (os.path.isdir(args.json) or not os.access(os.path.dirname(os.path.abspath(args.json)), os.W_OK)):
        raise ValueError(f"--json {args.json}: not a file that can be written, in a folder that is there")
    for flag, commands in (("json", ("watch", "compare")), ("plot", ("watch", "memory"))):
        if getattr(args, flag) and args.command in commands:
            raise ValueError(f"--{flag} {getattr(args, flag)}: {args.command} has nothing to put there")
    if args.plot:
        plots.check(args.plot)


def numbers(gammas):
    """Those of --gamma, a list or None, that are numbers."""
    return [gamma for gamma in gammas or [] if isinstance(gamma, int)]


def start(args):
    """Do what was asked for."""
    check(args)
    if args.command == "compare":
        documents = board.compare(args.what)
        return plots.draw(documents, args.plot) if args.plot else None
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    alone = args.command == "verify" or args.engine == "server"  # without our draft model
    draft = args.target if alone and args.target not in PAIRS else args.draft
    target, draft, why = choose(args.target, draft, device, args.bits)
    if why:
        print(why)
    names = {"target": target, "draft": None if alone else draft, "engine": args.engine}
    if args.command == "memory":
        rows = memory.report(target, draft, max(numbers(args.gamma) or [4]), args, device)
        return finish(args, rows, names, describe(torch.device(device)))
    folders = [find(model) for model in ([target] if alone else [target, draft])]
    texts = [Text(folder, Config.read(folder).eos) for folder in folders]
    check_same_ids(texts[0], texts[-1])
    asked = prompts(texts[0].is_chat, args.domain) if args.command == "showdown" else {}
    asked = {domain: [texts[0].prompt(prompt) for prompt in some] for domain, some in asked.items()}
    others = {}
    if args.engine == "transformers":
        others = engines.transformers_modes(*folders, device, args.bits or (32 if device == "cpu" else 16))
    elif args.engine == "server":
        others = engines.server_modes(args.url.split(","))
    models = [Qwen2.load(f, args.bits, device, head_bits=args.head_bits) for f in (folders[:1] if others else folders)]
    about, kinds = describe(models[0].device), ", draft ".join(dict.fromkeys(kind(model, args) for model in models))
    names |= {"dtype": None if args.engine == "server" else kinds}  # of its weights we know nothing
    names |= {"prompts": hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:8]}  # by which compare knows others
    print(f"target {target}\n" + f"draft  {draft}\n" * (not alone) + kinds, end=", ")
    print(f"{about['name']} ({about['device']}, {about['threads']} threads), torch {about['torch']}")
    if args.command == "verify":
        rows, more, measured = verify.report(models[0], args)
    else:
        how = f"temperature {args.temperature:g}" if args.temperature else "greedy"
        print(f"{how}, up to {args.max_new_tokens} tokens a text\n")
    if args.command == "watch":
        return live(models, texts[0], args)
    if others:
        rows, more, measured = peers.peers(models[0], texts[0], args.engine, others, asked, args)
    elif args.command == "showdown":
        rows, more, measured = showdown.showdown(models, asked, args)
    finish(args, rows, names | more, about | measured)


def kind(model, args):
    """What the weights of a model are, in words."""
    name, config = type(model.layers[0].qkv).__name__, model.config.quantization_config or vars(args)
    if name == "Linear":
        return str(model.dtype).removeprefix("torch.")
    return f"4 bits ({name})" + ", head in 8" * (config.get("head_bits") == 8)


def live(pair, text, args):
    """Let watch decode. --gamma auto needs to know what passes cost, here behind this prompt."""
    (prompt,), (gamma,) = args.what, args.gamma or [4]
    dice, drafter = showdown.options(pair[0], args), None
    dice["generator"].manual_seed(args.seed + 1)  # not those of the target
    if gamma == "auto":
        known = costs.measure(pair, text.prompt(prompt), range(showdown.MOST + 1), dice)
        (_, auto) = showdown.modes(pair, ["auto"], known, args)
        drafter = auto.drafter(text.prompt(prompt), dice)
    watch.watch(pair, text, prompt, gamma, args, drafter)


def finish(args, rows, pair, machine):
    """The files of --json and --plot, if they were asked for: all that is needed to draw and compare it again."""
    document = {"machine": machine, "pair": vars(args) | pair, "rows": rows}
    if args.json:
        with open(args.json + ".part", "w", encoding="utf-8") as f:
            json.dump(document, f, indent=1)
        os.replace(args.json + ".part", args.json)
    if args.plot:
        plots.draw([document], args.plot)


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
