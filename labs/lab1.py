"""Lab 1: with a stopwatch, what does verifying 8 tokens cost against generating one?

    python labs/lab1.py                     check the two functions below, on a clock that cannot lie, and when they
                                            are right measure the large model of the pair in tiny/ with them
    python labs/lab1.py --target coder      the same with another model; --bits 4, --device cuda

Fill in the two blanks. labs/lab1.md says what they are for. Behind them stands the checker, which you need not read.
"""

import argparse
import contextlib
import itertools
import re
import statistics
import sys
import time
import traceback
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the library

from kv_cache import KVCache
from measure import verify
from measure.machine import now
from model import Qwen2
from pairs import PAIRS

MOST = 32  # tokens in a pass, at most


def measure(model, repeat, context):
    """Seconds of passes over 1 .. MOST tokens, each behind `context` others: MOST lists of `repeat` numbers.

    model(ids, cache, last) adds the tokens ids [n] to the cache and returns the logits of the last rows [last, vocab].
    Which ids does not matter: torch.zeros(n, dtype=torch.long) will do. now(model.device) gives the time, in seconds.
    """
    # >>> your code
    # 1. A new cache, model.new_cache(length), and the context read into it. That needs no logits: last=0.
    # 2. `repeat` turns. In each, for n = 1 .. MOST: the time; one pass over n tokens, with the logits of all n; the
    #    time again; and cache.rollback(length), so that the next pass begins where this one did.
    # 3. Before these, one turn that you do not note: the first pass of each shape is slow.
    raise NotImplementedError
    # <<<


def verify_cost(seconds):
    """v(n) for n = 1 .. MOST: what a pass over n tokens costs, in passes over one. seconds: what `measure` returns.

    Other programs run on this machine, too, so now and then a number is far too large: it must not count.
    """
    # >>> your code
    raise NotImplementedError
    # <<<


# The checker. It runs `measure` on a model whose passes each take a time that no other pass takes, so that every number
# it returns tells which passes lie in it. Nothing here depends on how fast this machine is.

TICK = 2.0**-20  # seconds; sums of these are exact
REPEAT, CONTEXT = 3, 128
NOT_ROLLED_BACK = (
    "The cache is not rolled back: a pass begins behind the tokens of the one before. v rises with every call."
)
# How many passes there were before, tokens, how many lay in the cache, rows of logits, and is it the first of its n?
Pass = namedtuple("Pass", "at n before last first")


class Machine:
    """A model on a device with a clock of its own. queued: passes run behind Python's back, as they do on a GPU."""

    def __init__(self, queued):
        self.queued, self.running, self.clock, self.passes, self.reads, self.early = queued, 0.0, 0.0, [], [], False
        self.device, self.config = torch.device("cpu"), SimpleNamespace(max_position_embeddings=10**6)

    def new_cache(self, max_length):
        return KVCache(1, 1, 1, max_length)

    def __call__(self, ids, cache, last):
        ids = torch.as_tensor(ids)
        assert ids.dim() == 1 and 0 <= last <= len(ids), f"ids must be [n] and last 0 .. n, not {ids.shape} and {last}"
        one = Pass(len(self.passes), len(ids), cache.length, last, len(ids) not in {p.n for p in self.passes})
        cache.append(0, *torch.zeros(2, 1, len(ids), 1))
        cache.advance(len(ids))
        self.running += TICK * (4096 * (10 + one.n) + one.at) + one.first
        self.passes.append(one)
        if not self.queued:
            self.wait()
        return torch.zeros(last, 8)

    def wait(self, *_):
        self.clock, self.running = self.clock + self.running, 0.0

    def now(self, device):
        self.wait()
        return self.read()

    def read(self):
        """A clock that does not wait for the device."""
        self.early = self.early or self.running > 0
        self.reads.append((self.clock, len(self.passes)))
        return self.clock

    def covered(self):
        """{number: the passes in it} for all differences of two readings; of several, those with the fewest passes."""
        found = {}
        for j, (end, last) in enumerate(self.reads):
            for start, first in self.reads[j::-1]:
                known = found.setdefault(end - start, (first, last))
                if last - first < known[1] - known[0]:
                    found[end - start] = first, last
        return {seconds: self.passes[first:last] for seconds, (first, last) in found.items()}

    def run(self, function):
        """What function returns on this machine, or what it raises."""
        clocks = {now: self.now} | dict.fromkeys([time.perf_counter, time.time, time.monotonic], self.read)
        names = {name: fake for real, fake in clocks.items() for name, value in function.__globals__.items()
                 if value is real}  # fmt: skip
        with contextlib.ExitStack() as stack:
            for real in (time.perf_counter, time.time, time.monotonic):
                stack.enter_context(mock.patch.object(time, real.__name__, self.read))
            stack.enter_context(mock.patch.dict(function.__globals__, names))
            for module in (torch.cuda, torch.accelerator):
                stack.enter_context(mock.patch.object(module, "synchronize", self.wait))
            try:
                return function(self, REPEAT, CONTEXT), None
            except Exception as error:  # whatever an unfinished function may do
                return None, error


def check_measure(function):
    """What is wrong with a `measure`, one line a finding; [] if nothing is."""
    machine = Machine(queued=True)
    result, error = machine.run(function)
    found = []
    if machine.early:
        found.append("You read the clock while the device is still at work: on a GPU a call returns before the pass is "
                     "done. Use now(model.device), which waits for it.")  # fmt: skip
        machine = Machine(queued=False)
        result, error = machine.run(function)
    if isinstance(error, NotImplementedError):
        return ["measure() is still empty. Begin with step 1: a cache, and the context read into it."]
    if error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__)
                 if f.filename == function.__code__.co_filename]  # fmt: skip
        if any(p.n <= MOST and p.before > CONTEXT for p in machine.passes):
            return [*found, NOT_ROLLED_BACK]
        return [*found, f"measure() stops in line {lines[-1] if lines else '?'}: {type(error).__name__}: {error}"]
    try:
        result = [[float(seconds) for seconds in times] for times in result]
    except (TypeError, ValueError):
        return [*found, f"measure() returns {type(result).__name__} and should return {MOST} lists of numbers."]
    if len(result) != MOST:
        return [*found, f"measure() returns {len(result)} lists and should return {MOST}: for n = 1, 2, ... {MOST}."]
    if {len(times) for times in result} != {REPEAT}:
        few = min(map(len, result))
        many = "A single one can be anything; you need several for a median." if few == 1 else "One each turn."
        return [*found, f"With repeat={REPEAT} some n has {few} measurements, not {REPEAT}. {many}"]
    kinds = {}
    for line in judge(machine, result):
        kinds.setdefault(re.sub(r"\d", "", line), line)
    return found + list(kinds.values())


def judge(machine, result):
    """Yield what the numbers cover that they should not. result: [MOST][REPEAT]."""
    covered, order = machine.covered(), {}
    if not any(p.before + p.n >= CONTEXT for p in machine.passes):
        yield f"The context is missing: read {CONTEXT} tokens into the cache first, and start no clock for that."
        return
    for n, times in enumerate(result, 1):
        for seconds in times:
            passes = covered.get(seconds)
            if passes is None:
                milliseconds = seconds / 1000 in covered or any(abs(1000 * s - seconds) < TICK for s in covered if s)
                yield ("These are milliseconds: return seconds, as `now` gives them." if milliseconds else
                       f"A number of n = {n} is not the difference of two readings of the clock.")  # fmt: skip
                return
            if passes and passes[0].n <= MOST and passes[0].before > CONTEXT:
                yield NOT_ROLLED_BACK
            if not passes:
                yield f"No pass lies between the two readings for n = {n}: one before it, and one behind it."
            elif any(p.n > MOST for p in passes):
                yield f"Reading the context of {CONTEXT} tokens is in the time: do that before the clock starts."
            elif len(passes) > 1 and {p.n for p in passes} == {1}:
                yield (f"For n = {n} you make {len(passes)} passes over one token, which is generating, not verifying: "
                       "give the model all n tokens in one call.") if len(passes) == n else (
                       f"{len(passes)} passes over one token lie in a time for n = {n}: one pass, over n.")  # fmt: skip
            elif len(passes) > 1:
                yield ("Several passes lie between two readings: read the clock right before each pass and right "
                       "behind it.")  # fmt: skip
            elif passes[0].n != n:
                yield f"List {n - 1} should be for {n} tokens and is for {passes[0].n}: n begins at 1."
            else:
                one, order[passes[0].at] = passes[0], n
                if one.before < CONTEXT:
                    yield (f"A pass begins behind {one.before} tokens, not behind {CONTEXT}: roll back to the context, "
                           "and no further.")  # fmt: skip
                if one.first:
                    yield "No warm-up: the first pass of a shape is among the numbers. Make one turn that is not noted."
                if one.last != n:
                    yield (f"A pass over {n} tokens asks for {one.last} rows of logits: to verify {n} tokens you need "
                           f"all {n} (last=n).")  # fmt: skip
    order = [order[i] for i in sorted(order)]
    if sum(a == b for a, b in itertools.pairwise(order)) >= MOST:
        yield ("All measurements of one n come in a row: when the machine slows down for a second, only that n is hit. "
               "Take turns, n = 1 .. MOST in each.")  # fmt: skip


def check_cost(function):
    """What is wrong with a `verify_cost`; [] if nothing is."""
    seconds = [[10.0 + n] * 5 for n in range(1, MOST + 1)]
    right = [times[0] / 11 for times in seconds]
    for n, turn in ((1, 3), (8, 0), (9, 4), (20, 1)):
        seconds[n - 1][turn] *= 50
    try:
        v = function([list(times) for times in seconds])
        v = None if v is None else [float(ratio) for ratio in v]
    except NotImplementedError:
        return ["verify_cost() is still empty: one number for each n, over that of n = 1."]
    except Exception as error:  # whatever an unfinished function may do
        return [f"verify_cost() stops: {type(error).__name__}: {error}"]

    def like(other):
        return v is not None and len(v) == MOST and all(abs(a - b) < 1e-6 * b for a, b in zip(v, other, strict=True))

    mean, ratios = statistics.mean, [[t / one for t, one in zip(times, seconds[0], strict=True)] for times in seconds]
    for wrong, said in [
        ([1 / ratio for ratio in right], "v is upside down: v(n) is the time of n over the time of 1, so it grows."),
        ([11 * ratio for ratio in right], "v(1) must be 1: divide by the time of n = 1."),
        ([ratio / n for n, ratio in enumerate(right, 1)], "v(n) is for the whole pass: do not divide by n."),
        ([mean(times) / mean(seconds[0]) for times in seconds], "That is a mean, and a single outlier moves it."),
        ([mean(turns) for turns in ratios], "That is a mean, and a single outlier moves it."),
        ([times[0] / seconds[0][0] for times in seconds], "That is the first measurement alone; use all."),
        ([times[-1] / seconds[0][-1] for times in seconds], "That is the last measurement alone; use all."),
    ]:
        if like(wrong):
            return [f"verify_cost(): {said} Take the median." if "mea" in said else f"verify_cost(): {said}"]
    return [] if like(right) else [f"verify_cost() should return {MOST} numbers: for n, the median of its times over "
                                   "the median of those of n = 1."]  # fmt: skip


def compare(model):
    """Measure with the attendee's functions and with bench.py's, and print both."""
    context = min(CONTEXT, model.config.max_position_embeddings - MOST)
    yours, ours = [[] for _ in range(MOST)], [[] for _ in range(MOST)]
    for _ in verify.tqdm(range(3), "measuring, yours and bench.py's in turn", disable=None, leave=False):
        for seconds, function in ((yours, measure), (ours, verify.measure)):
            for times, more in zip(seconds, function(model, 3, context), strict=True):
                times += more
    print(f"{'n':>3}{'ms':>9}{'v(n)':>7}   bench.py: {'ms':>6}{'v(n)':>7}")
    for n in (1, 2, 4, 8, 16, 32):
        times = [1e3 * statistics.median(seconds[n - 1]) for seconds in (yours, ours)]
        v = [verify_cost(seconds)[n - 1] for seconds in (yours, ours)]
        print(f"{n:>3}{times[0]:>9.2f}{v[0]:>7.2f}{times[1]:>19.2f}{v[1]:>7.2f}")
    print(
        f"\nVerifying 8 tokens costs {verify_cost(yours)[7]:.2f} times as much as generating one. Generating 8 costs 8."
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tiny", help=f"{', '.join(PAIRS)}, a folder, or a Hub id. Default: tiny")
    parser.add_argument("--bits", type=int, choices=[4, 16, 32], help="as bench.py has it")
    parser.add_argument("--device", choices=["cpu", "cuda", "mps"], help="Default: a CUDA GPU if there is one")
    args = parser.parse_args(argv)
    found = check_measure(measure) + check_cost(verify_cost)
    print("\n".join(found) or "measure() and verify_cost() are right.\n")
    if found:
        return 1
    try:
        compare(Qwen2.load(PAIRS.get(args.target, [args.target])[0], args.bits, args.device))
    except (ValueError, OSError) as error:
        print(f"lab1.py: {' '.join(str(error).split())[:400]}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
