"""The long run of test_lossless.py: greedy speculation in 4 bits against plain decoding, token by token and bit by bit.

Every prompt is decoded plainly once, and the target's logits are kept. Then speculatively, with every gamma from 1 to 8
and four drafters: the draft model, the target itself, lookup and random ids. Each text must be the same, and so must
every row of logits that had a say in it. What is done is kept in a file, a line for each text, and not done again.
"""

import itertools
import json
import os

import torch
from huggingface_hub.utils import tqdm

from model import Config, Qwen2, find
from pairs import choose, prompts
from speculative import DraftModel, speculative_decode
from text import Text, check_same_ids
from toys import Random
from variants.prompt_lookup import PromptLookup

TOKENS = 128  # of a text


class Listened:
    """The target, and every row of logits that it gave: rows[i] is the latest that predicts the token at place i."""

    def __init__(self, model):
        self.model, self.rows, self.new_cache = model, {}, model.new_cache

    def __call__(self, ids, cache, last):
        logits = self.model(ids, cache, last)
        self.rows |= {cache.length - last + 1 + i: row for i, row in enumerate(logits)} if last else {}
        return logits


def decode(target, drafter, ids, gamma):
    """The greedy text, and the row of logits behind each of its tokens, [tokens, vocab]."""
    heard, text, rows = Listened(target), [], []
    for round in speculative_decode(heard, drafter, ids, TOKENS, gamma):
        rows += [heard.rows[len(ids) + len(text) + i] for i in range(len(round.tokens))]
        text += round.tokens
    return text, torch.stack(rows)


@torch.no_grad()
def main(args):
    if args.tokens < 1:
        raise ValueError(f"--tokens {args.tokens}: ask for one or more")
    folders = [find(model) for model in choose(args.target, args.draft, "cpu", 4)[:2]]
    text, other = (Text(folder, Config.read(folder).eos) for folder in folders)
    check_same_ids(text, other)
    target, draft = (Qwen2.load(folder, 4, "cpu") for folder in folders)
    whole = [text.prompt(prompt) for some in prompts(text.is_chat, "all").values() for prompt in some]
    vocab = min(target.config.vocab_size, draft.config.vocab_size)
    room = target.config.max_position_embeddings - TOKENS - 1
    asked = [ids[: max(8, len(ids) * part // 10)][:room] for part in (10, 9, 8, 7, 6, 5, 4, 3, 2) for ids in whole]
    drafters = {
        "draft model": lambda: DraftModel(draft, room + TOKENS, vocab=vocab),
        "target": lambda: DraftModel(target, room + TOKENS),
        "lookup": lambda: PromptLookup(shortest=1),
        "random": lambda: Random(target.config.vocab_size),
    }
    done = {}
    if os.path.exists(args.long):
        with open(args.long, encoding="utf-8") as file:
            lines = [line for line in file if line.endswith("\n")]  # the last may be cut off
        try:
            done = {tuple(line.pop("what")): line for line in map(json.loads, lines)}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"--long {args.long} is not the file of a long run: name another") from None
        with open(args.long, "w", encoding="utf-8") as file:
            file.writelines(lines)
    jobs = [
        (*folders, number, name, 1 + (number + 2 * i + more) % 8)  # after 4 prompts each drafter has had each gamma
        for number, (i, name), more in itertools.product(range(len(asked)), enumerate(drafters), (0, 4))
    ][: -(-args.tokens // TOKENS)]
    if len(jobs) * TOKENS < args.tokens:
        raise ValueError(f"--tokens {args.tokens}: the prompts are enough for {len(jobs) * TOKENS}")
    latest = None
    with open(args.long, "a", encoding="utf-8") as file, tqdm(jobs, unit="text", disable=None) as bar:
        for job in bar:
            if job not in done:
                *_, number, name, gamma = job
                if latest != number:
                    latest, (plain, right) = number, decode(target, None, asked[number], 0)
                found, rows = decode(target, drafters[name](), asked[number], gamma)
                same = found == plain
                done[job] = {"tokens": len(found), "same": same, "same bits": same and torch.equal(rows, right)}
                print(json.dumps({"what": job} | done[job]), file=file, flush=True)
    counted = [done[job] for job in jobs]
    differing = [job for job in jobs if not done[job]["same bits"]]
    tokens, texts = sum(line["tokens"] for line in counted), sum(not line["same"] for line in counted)
    print(f"{folders[0]} in 4 bits, gamma 1 to 8, {', '.join(drafters)}: {len(jobs):,} texts, {tokens:,} tokens.")
    print(f"{texts} texts differ from plain decoding, and {len(differing)} have a row of logits with another bit.")
    for job in differing[:10]:
        print("  prompt {}, {}, gamma {}".format(*job[2:]))
    return not differing
