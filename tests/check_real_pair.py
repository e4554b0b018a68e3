"""The checks that need real weights, float32 and half an hour: against transformers, and against plain decoding.

    python tests/check_real_pair.py --target DIR --draft DIR           everything
    python tests/check_real_pair.py --target DIR --draft DIR speed     one part: logits, greedy, self or speed

DIR: folders of, for instance, Qwen2.5-Coder-1.5B-Instruct and Qwen2.5-Coder-0.5B-Instruct. Both libraries hold the
target in float32 at once: about 15 GB of memory. Exit code 1 if a check fails. pytest does not collect this file.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))
from measure.showdown import first_difference, modes, race
from model import Qwen2
from pairs import prompts as known
from text import Text

NEW_TOKENS, GAMMAS, TOLERANCE = 64, (1, 3, 7), 1e-3
GREEDY = argparse.Namespace(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_new_tokens=NEW_TOKENS)


def logits(target, peer, prompts):
    """The largest difference of a logit between the two libraries, over all rows of three prompts."""
    worst = 0.0
    for name, ids in prompts[::4]:
        ours = target(ids, target.new_cache(len(ids)), len(ids))
        theirs = peer(torch.tensor([ids])).logits[0]
        difference = (ours - theirs).abs().max().item()
        worst = max(worst, difference)
        print(f"  {name:<12} {len(ids):>4} rows: largest difference of a logit {difference:.1e}", flush=True)
    return worst <= TOLERANCE


def greedy(target, draft, peer, prompts):
    """Speculative against plain against transformers, token for token; a difference must be a near tie."""
    names = ["transformers", *(f"gamma {gamma}" for gamma in GAMMAS)]
    print(f"  {'prompt':<12}{'tokens':>8}" + "".join(f"{name:>14}" for name in names) + "   acceptance")
    fine, every, notes = True, [], []
    for name, ids in prompts:
        plain, *runs = race(target, modes((target, draft), GAMMAS, None, GREEDY), ids, GREEDY)
        # The published generation config asks for a repetition penalty, which plain greedy decoding does not have.
        theirs = peer.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, repetition_penalty=1.0)
        cells = []
        for other in [theirs[0, len(ids) :].tolist()] + [run.ids for run in runs]:
            apart = first_difference(target, ids, plain.ids, other)
            if apart:
                notes.append(f"  {name}: parts at token {apart[0]}, where two logits are {apart[1]:.1e} apart")
            near = not apart or apart[1] <= TOLERANCE  # texts of different lengths: nan, which is not near
            cells.append("same" if not apart else "near tie" if near else "DIFFERS")
            fine &= near
        every += cells
        rates = " ".join(f"{share(run):.2f}" for run in runs)
        print(f"  {name:<12}{len(plain.ids):>8}" + "".join(f"{cell:>14}" for cell in cells) + f"   {rates}", flush=True)
    notes += [f"  {every.count(kind)} of {len(every)} {kind}" for kind in ("same", "near tie", "DIFFERS")]
    print("\n".join(notes))
    return fine


def itself(target, prompts):
    """The target as its own draft: every draft of every round must be kept."""
    runs = [race(target, modes((target, target), [4], None, GREEDY)[1:], ids, GREEDY)[0] for _, ids in prompts[::4]]
    rates = [share(run) for run in runs]
    print(f"  of the drafts are kept: {', '.join(f'{rate:.0%}' for rate in rates)}")
    return set(rates) == {1.0}


def share(run):
    """Of its drafts, those that were kept."""
    return sum(round.accepted for round in run.rounds) / max(sum(round.drafted for round in run.rounds), 1)


def speed(target, peer, prompts, repeat=15):
    """A step of plain decoding in both libraries, and a pass over 4 and 8 rows, in turn; medians of ratios."""
    ids = (prompts[0][1] * 9)[:200]
    cache, theirs = target.new_cache(300), transformers.DynamicCache()
    target(ids, cache, 0)
    peer(torch.tensor([ids]), cache=theirs)

    def step():
        peer(torch.tensor([ids[:1]]), cache=theirs, logits_to_keep=1)
        theirs.crop(-1)

    def rows(n):
        target(ids[:n], cache, n)
        cache.rollback(len(ids))

    jobs = {"transformers": step, 1: lambda: rows(1), 2: lambda: rows(2), 4: lambda: rows(4), 8: lambda: rows(8)}
    seconds = {job: [] for job in jobs}
    for _ in range(repeat + 1):
        for job, work in jobs.items():
            start = time.perf_counter()
            work()
            seconds[job].append(time.perf_counter() - start)
    ratio = {}
    for job, times in seconds.items():
        pairs = zip(times[1:], seconds[1][1:], strict=True)  # without the warm-up
        ratio[job] = statistics.median(a / b for a, b in pairs)
        what = job if job == "transformers" else f"{job} rows"
        print(f"  {what:<14}{1e3 * statistics.median(times[1:]):>8.0f} ms   {ratio[job]:.2f}x one row here")
    return ratio["transformers"] >= 1 and ratio[4] <= 1.3


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["logits", "greedy", "self", "speed"])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    target = Qwen2.load(args.target, bits=32, device="cpu")
    text = Text(args.target, target.config.eos)
    asked = known(True, "all").items()
    prompts = [(f"{domain} {i}", text.prompt(p)) for domain, some in asked for i, p in enumerate(some, 1)]
    draft = Qwen2.load(args.draft, bits=32, device="cpu") if args.part in (None, "greedy") else None
    peer = None
    if args.part != "self":
        peer = transformers.AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    parts = {
        "logits": lambda: logits(target, peer, prompts),
        "greedy": lambda: greedy(target, draft, peer, prompts),
        "self": lambda: itself(target, prompts),
        "speed": lambda: speed(target, peer, prompts),
    }
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, transformers {transformers.__version__}")
    failed = []
    for part in [args.part] if args.part else parts:
        print(f"{part}: {' '.join(globals()[part if part != 'self' else 'itself'].__doc__.split())}", flush=True)
        if not parts[part]():
            failed.append(part)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
