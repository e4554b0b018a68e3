"""Checks labs/lab4.py, and runs it on a prompt of each domain. The texts are compared with our own plain decoding.

check4.findings(module) -> None, or a line that says what is wrong. Blanks 1, 2 and 3 are looked at by themselves, and
4 to 7 when all of them are filled: only a whole run shows what they do.
"""

import argparse
import json
import linecache
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from types import SimpleNamespace

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

import torch  # noqa: E402

from model import Config, Qwen2, find  # noqa: E402
from pairs import PAIRS, choose, prompts  # noqa: E402
from speculative import speculative_decode  # noqa: E402
from text import Text, check_same_ids  # noqa: E402

LIMIT, PREFILL = 32, 10000.0  # tokens a text here, and what reading the prompt takes on the clock that is put in
HINTS = {
    1: "Load the model: transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)",
    2: "model.generation_config = transformers.GenerationConfig(eos_token_id=...)",
    3: "Append to self.tokens and to self.times. `ids` is a tensor [1, n] for the prompt, [n] later: flatten, tolist",
    4: 'how["assistant_model"] = ..., and how["prompt_lookup_num_tokens"] = ...; neither, if there is none',
    5: "target.generate(prompt, ..., **how). Greedily is do_sample=False",
    6: "streamer.times[0] is from before the prompt was read; streamer.times[1] is when the first round's tokens came",
    7: "k drafts are judged by k + 1 rows, and a accepted ones bring a + 1 tokens",
}
# Like Qwen2.5's own, only stronger, so that 32 tokens are enough to see it.
ASKS = {"do_sample": True, "temperature": 1.5, "repetition_penalty": 3.0, "num_assistant_tokens": 1}
ASKS |= {"num_assistant_tokens_schedule": "heuristic", "eos_token_id": 4093}


def copies(folder):
    """The pair in tiny/, copied to `folder`, each with a generation_config.json that asks for more than greedy."""
    for name, source in zip(("target", "draft"), PAIRS["tiny"], strict=True):
        to = shutil.copytree(source, os.path.join(folder, name))
        with open(os.path.join(to, "generation_config.json"), "w", encoding="utf-8") as f:
            json.dump(ASKS, f)
        yield to


class Watched:
    """A model under observation: how generate() was called, how many tokens each round brought, and how many rows each
    pass had. Each pass moves the clock: the first, which reads the prompt, by PREFILL, and the others by 1."""

    def __init__(self, model, clock):
        self.model, self.clock, self.rows, self.put, self.asked = model, clock, [], [], {}

    def __enter__(self):
        self.hook = self.model.register_forward_hook(self.passed)
        self.model.generate = self.generate
        return self

    def __exit__(self, *_):
        self.hook.remove()
        del self.model.generate  # that of the class is back

    def passed(self, module, args, output):
        self.rows.append(output.logits.shape[1])
        self.clock[0] += PREFILL if len(self.rows) == 1 else 1.0

    def generate(self, *args, **how):
        self.asked = how
        if how.get("streamer"):
            put = how["streamer"].put

            def count(ids):
                self.put.append(ids.numel())
                put(ids)

            how["streamer"].put = count
        return type(self.model).generate(self.model, *args, **how)


def findings(lab):
    """What is wrong with the first blank that is not right, as a line; or None. lab: the module, labs/lab4.py."""
    clock = [0.0]
    lab.time = SimpleNamespace(**dict.fromkeys(("perf_counter", "time", "monotonic"), lambda: clock[0]))
    with tempfile.TemporaryDirectory() as folder:
        try:
            return judge(lab, folder, clock)
        except NotImplementedError as empty:
            return f"blank {empty.args[0]} is empty. {HINTS[empty.args[0]]}"
        except Exception as error:  # whatever their code runs into; a traceback would mostly be of transformers
            own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith("lab4.py")]
            line, blank = own[-1].lineno if own else "?", ""
            if own:
                above = "".join(linecache.getlines(own[-1].filename)[:line])
                marks = re.findall(r"# >>> your code, (blank \d)|# <<<", above)
                blank = f"{marks[-1]}, " if marks and marks[-1] else ""
            return f"{blank}labs/lab4.py, line {line}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        finally:
            lab.time = time


def judge(lab, folder, clock):
    source = PAIRS["tiny"][0]
    ids = Text(source, Config.read(source).eos).prompt(prompts(False, "code")["code"][0])
    rounds = speculative_decode(Qwen2.load(source, 32, "cpu"), None, ids, LIMIT, 0)
    right = [id for round in rounds for id in round.tokens]
    target, draft = (lab.load(path) for path in copies(folder))
    for model in (target, draft):
        if not hasattr(model, "generate") or model.dtype != torch.float32:
            return f"blank 1: load() must return a model with generate(), in float32: {HINTS[1]}"
        config = model.generation_config
        if type(config).__name__ != "GenerationConfig":
            return f"blank 2: model.generation_config must be a GenerationConfig, and is {config!r:.60}. {HINTS[2]}"
    noted = lab.Streamer()
    for ids_of_call in ([[5, 6, 7]], [8, 9]):
        noted.put(torch.tensor(ids_of_call))
    if noted.tokens != [[5, 6, 7], [8, 9]] or not all(type(id) is int for ids in noted.tokens for id in ids):
        return f"blank 3: of the ids 5, 6, 7 and then 8, 9 self.tokens is {noted.tokens!r:.100}. {HINTS[3]}"
    if noted.times != [clock[0]] * 2:
        return f"blank 3: self.times is to have a number for each call, and is {noted.times!r:.100}. {HINTS[3]}"
    for way, how in (WAYS | {"with lookup": lambda draft: {"lookup": 7}}).items():  # not the 10 that stands on the page
        written = []
        for seed in (1, 2):
            with Watched(target, clock) as seen, torch.random.fork_rng():
                torch.manual_seed(seed)
                try:
                    written.append(lab.write(target, ids, LIMIT, **how(draft)))
                except Exception as error:  # of what `called` knows better: an argument, or then an empty list
                    known = called(seen, how(draft))
                    if not known or (known[0] == "blank 5" and not isinstance(error, IndexError)):
                        raise
            what = called(seen, how(draft)) or texts(seen, written, right) or numbers(seen, written[-1])
            if what:
                return f"{what[0]}: {way}, {what[1]}"
        if written[0] != written[1]:
            what = 'the schedule "heuristic" carries the number of drafts over from text to text'
            return f"blank 2: {way}, the same prompt is drafted otherwise the second time: {what}. {HINTS[2]}"


WAYS = {
    "without drafts": lambda draft: {},
    "with the draft model": lambda draft: {"draft": draft},
    "with lookup": lambda draft: {"lookup": 10},
}


def called(seen, how):
    """What is wrong with the call of generate()."""
    uncalled = "blank 5", f"generate() of the target was not called with the streamer. {HINTS[5]}"
    if not seen.asked.get("streamer"):
        return uncalled
    given = {"draft": "assistant_model", "lookup": "prompt_lookup_num_tokens"}
    for name, argument in given.items():
        if bool(seen.asked.get(argument)) != (name in how):
            return "blank 4", f"generate() was {'not ' * (name in how)}given {argument}. {HINTS[4]}"
        if name == "lookup" in how and seen.asked[argument] != how[name]:
            return "blank 4", f"lookup is {how[name]}, and {argument} {seen.asked[argument]}"
    return None if seen.rows else uncalled


def texts(seen, written, right):
    """What is wrong with the text. written: in all runs with the same prompt, this being the last."""
    first, new, config = written[0][0], written[-1][0], seen.model.generation_config
    if sum(seen.put[1:]) != len(new):
        return "blank 3", f"{sum(seen.put[1:])} tokens came and {len(new)} were noted. {HINTS[3]}"
    if seen.asked.get("do_sample") is not False and (config.do_sample or new != first):
        return "blank 5", "the text is drawn by lot, as the folder asks for. do_sample=False is greedy"
    asked = seen.asked.get("repetition_penalty", config.repetition_penalty)
    if new != right and asked not in (None, 1.0):
        what = f"do_sample=False leaves the repetition_penalty of {asked} on, which generation_config.json asks for"
        return "blank 2", f"the text is not the greedy one: {what}. {HINTS[2]}"
    if config.eos_token_id is None and "eos_token_id" not in seen.asked:
        return "blank 2", f"without an eos_token_id no text would ever end. {HINTS[2]}"
    if new == right[: len(new)] and len(new) < LIMIT:
        return "blank 5", f"the text ends after {len(new)} of {LIMIT} tokens. {HINTS[5]}"
    if new != right:
        at = next((i for i, (a, b) in enumerate(zip(new, right, strict=False)) if a != b), 0)
        return "blank 5", f"from token {at} on the text is not the target's greedy one. {HINTS[5]}"


def numbers(seen, written):
    """What is wrong with the time and the counts."""
    new, tokens, seconds, drafted, accepted = written
    rounds, behind = len(seen.rows) - 1, sum(seen.put[2:])
    if seconds >= PREFILL:
        return "blank 6", f"the time includes reading the prompt. {HINTS[6]}"
    if seconds != rounds:
        what = f"seconds is {seconds:g} on the checker's clock, and {rounds} from the first round to the last"
        return "blank 6", f"{what}. {HINTS[6]}"
    if tokens != behind:
        return (
            "blank 6",
            f"{behind} tokens came behind the first round, and tokens is {tokens}. Those before are not timed",
        )
    right = sum(seen.rows[1:]) - rounds, behind - rounds
    if drafted in (sum(seen.rows), sum(seen.rows[1:])) and drafted != right[0]:
        return "blank 7", f"drafted counts rows, and each pass has one more of them than drafts: {drafted}"
    if drafted == sum(seen.rows) - rounds - 1 != right[0]:
        return "blank 7", "drafted includes the first round, which is in no other number"
    if drafted != right[0]:
        return "blank 7", f"drafted is {drafted}, and {right[0]} were. {HINTS[7]}"
    if accepted in (behind, len(new)) and accepted != right[1]:
        return "blank 7", "accepted counts every token. One of each round is the target's own"
    if accepted != right[1]:
        return "blank 7", f"accepted is {accepted}, and {right[1]} were. {HINTS[7]}"


def table(lab, args):
    """Their code on a prompt of each domain."""
    target, draft, _ = choose(args.target, args.draft, "cpu", 32)
    folders = find(target), find(draft)
    text = Text(folders[0], Config.read(folders[0]).eos)
    check_same_ids(text, Text(folders[1], Config.read(folders[1]).eos))
    models = [lab.load(folder) for folder in folders]
    print(f"\n{'domain':<12}{'':<22}{'tok/s':>8}{'speed-up':>10}{'accepted':>10}{'tok/round':>11}")
    for domain, (prompt, *_) in prompts(text.is_chat, "all").items():
        ids, usual = text.prompt(prompt), None
        lab.write(models[0], ids, 8)  # the first time is slower
        for way, how in WAYS.items():
            _, tokens, seconds, drafted, accepted = lab.write(models[0], ids, args.max_new_tokens, **how(models[1]))
            speed = tokens / max(seconds, 1e-9)
            usual = usual or speed
            kept = f"{accepted / drafted:.0%}" if drafted else ""
            line = f"{domain:<12}{way:<22}{speed:>8.2f}{speed / usual:>9.2f}x{kept:>10}"
            print(f"{line}{tokens / max(tokens - accepted, 1):>11.2f}", flush=True)


def main(lab, argv=None):
    """The status to end with: 0 if all is right."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="lab4.py", description=lab.__doc__, formatter_class=raw)
    parser.add_argument("--target", help="tiny, coder or qwen2.5; or a folder or Hub id")
    parser.add_argument("--draft", help="a folder or Hub id")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args(argv)
    wrong = findings(lab)
    print(wrong or "All seven blanks are right.")
    if wrong or not args.target:
        return int(bool(wrong))
    try:
        table(lab, args)
    except (OSError, ValueError) as error:
        print(f"lab4.py: {' '.join(str(error).split())[:400]}", file=sys.stderr)
        return 2
    return 0
