"""The checks of Lab 2 that look at whole texts: where they end, the target's cache from round to round, and tiny/."""

import sys
import time
from pathlib import Path

from check import Finding, table
from check2_models import Partly, Scripted, chain, history, play, right

sys.path.insert(0, str(Path(__file__).parent.parent))  # the library is the judge of tiny/

from model import Qwen2
from pairs import PAIRS, prompts
from speculative import speculative_decode
from text import Text


def stopping(lab):
    """Nothing is emitted behind an EOS, wherever in a round it stands, and never more than max_new_tokens."""
    for newest, drafts, eos, due, kept in (
        (3, [4, 5, 6, 7], [6], [4, 5, 6], 3),
        (5, [6, 7, 0], [6], [6], 1),
        (3, [4, 5, 6], [6], [4, 5, 6], 3),
        (3, [4, 5], [6], [4, 5, 6], 2),  # as the bonus
        (3, [4, 0], [5], [4, 5], 1),  # as a correction
        (3, [4, 5, 6], [7, 5], [4, 5], 2),  # a model may have several
    ):
        rounds, _, error = play(lab, chain(), Scripted(drafts), [newest], 20, 4, eos, rounds=3)
        if not rounds:
            raise error
        new = rounds[0][0]
        yours = [["and then" if i else "you emit", *round[0]] for i, round in enumerate(rounds)]
        show = table([["the text ends in", newest], ["drafts", *drafts], ["EOS", *eos], ["to emit", *due], *yours])
        if len(new) > len(due) and new[: len(due)] == due:
            said = f"accepted tokens after EOS: {new[len(due) :]} behind {due[-1]}"
            raise Finding(f"{said}. It may be among the accepted drafts: ask of each new token if it is in eos", show)
        if new == due[:-1]:
            raise Finding("the EOS is missing: it ends the text, and is a part of it", show)
        if new != due:
            raise Finding("not what is due", show)
        if len(rounds) > 1:
            raise Finding("the text is cut at the EOS, but the loop goes on after it: set `ended`", show)
        if rounds[0][2] != kept:
            said = f"the tokens are right, but {kept} drafts were kept, and you yield {rounds[0][2]}"
            if kept < len(due):
                why = "the EOS is the target's own token, and the drafts before it were kept"
            elif rounds[0][2] < kept:
                why = "the EOS is itself a draft, and was kept"
            else:
                why = "drafts behind the EOS do not count as kept"
            raise Finding(f"{said}: {why}", show)
        if error:
            raise error
    for count in (0, 1, 2, 3, 7, 12):
        rounds, _, error = play(lab, chain(), Partly(chain()), [3], count, 5, rounds=20)
        total = sum(len(new) for new, _, _ in rounds)
        full = "has room for" in str(error)
        if total > count or full:
            what = "the target's cache is too full" if full else f"{total} tokens came"
            raise Finding(
                f"more than max_new_tokens: with max_new_tokens={count}, {what}. A round may draft what is left, less "
                "the one that the target adds (blank 2), counted anew in each round"
            )
        if error:
            raise error
        if total < count:
            raise Finding(f"the text ends early: with max_new_tokens={count}, {total} tokens came")


def target_cache(lab):
    """At each pass the target has the text in its cache, all but the newest token, and nothing else."""
    tokens, kept_of, rejected = [1, 2, 4], [2, 1, 0, 4, 3, 0, 4, 1], []
    rounds, calls, error = play(lab, history(), Partly(history(), *kept_of), tokens, 40, 4, rounds=len(kept_of))
    for i, kept in enumerate(kept_of):
        if i == len(calls):
            raise error or Finding(f"the text ends after {i} rounds")
        ids = right(history(), tokens, 5)
        drafts, due = ids[:kept] + [(id + 1) % 7 for id in ids[kept:4]], ids[: kept + 1]
        call, new = calls[i], rounds[i][0] if i < len(rounds) else []
        off, gap = call.before - (len(tokens) - 1), [""] * len(tokens)
        show = table(
            [
                [f"round {i + 1}, the text", *tokens],
                ["drafts", *gap, *drafts],
                ["due in the cache", *tokens[:-1]],
                ["in your cache", *call.seen[: call.before]],
                ["fed behind it", *[""] * call.before, *call.fed],
                ["to emit", *gap, *due],
                ["you emit", *gap, *new],
            ]
        )
        if call.fed == tokens + drafts:
            raise Finding(f"the whole text is fed again in round {i + 1}: roll back only what was rejected", show)
        if off > 0 and off == len(rejected):
            raise Finding(f"the rejected drafts' rows are still in the target's cache: {rejected}", show)
        if off == 1:
            said = "a row too many in the target's cache: the newest token was not fed yet, so in its place stands a"
            raise Finding(f"{said} rejected draft. Roll back to len(tokens) - 1", show)
        if call.before == 0:
            raise Finding("the target's whole cache is thrown away: roll back only what was rejected", show)
        if off < 0:
            said = f"{-off} too few rows in the target's cache"
            said += ": those of the kept drafts are gone, too" if -off == kept_of[i - 1] > 1 else ""
            raise Finding(f"{said}. Roll back to len(tokens) - 1", show)
        if call.seen != tokens + drafts:
            raise Finding("the target has something else in sight than the text and the drafts", show)
        if new != due:
            raise error or Finding("the target saw the right tokens, but the round does not emit what is due", show)
        rejected, tokens = drafts[kept:], tokens + due
    if error:
        raise error


def together(lab):
    """The target as its own draft: the text is right, and every draft is kept, in every round."""
    for gamma in (1, 3, 4):
        rounds, _, error = play(lab, history(), lab.Draft(history(), 99), [1, 2], 24, gamma, rounds=30)
        if error:
            raise error
        text, due = [id for new, _, _ in rounds for id in new], right(history(), [1, 2], 24)
        drafted, kept = sum(round[1] for round in rounds), sum(round[2] for round in rounds)
        if text != due:
            raise Finding(f"with gamma {gamma} the text is wrong", table([["due", *due], ["yours", *text]]))
        if kept < drafted:
            said = f"right text, but {kept / drafted:.0%} accepted, of drafts that are the target's own"
            raise Finding(f"{said}: with gamma {gamma}, in some round the draft's cache does not hold the text")


def tiny(lab):
    """The text of plain decoding, on a real pair of models."""
    target, draft = (Qwen2.load(folder, 32, "cpu") for folder in PAIRS["tiny"])
    text, count, gamma = Text(PAIRS["tiny"][0], target.config.eos), 64, 4
    drafted = kept = emitted = rounds = 0
    clock = {"plain": [0, 0.0], "yours": [0, 0.0]}  # tokens and seconds, behind the first round of each text
    for prompt in [some[0] for some in prompts(False, "all").values()]:
        ids = text.prompt(prompt)
        plain = timed(speculative_decode(target, None, ids, count, 0), clock["plain"])
        due, found = [id for new, _, _ in plain for id in new], []
        yours = lab.speculative(target, lab.Draft(draft, len(ids) + count), ids, count, gamma)
        for new, k, n in timed(yours, clock["yours"]):
            at, found = len(found), found + [int(id) for id in new]
            drafted, kept, emitted, rounds = drafted + int(k), kept + int(n), emitted + len(new), rounds + 1
            if found != due[: len(found)] or not new:
                words = [[repr(text.decode([id])) for id in part] for part in (due[at : len(found) + 1], found[at:])]
                show = table([["due", *words[0]], ["you emit", *words[1]]])
                raise Finding(f"the text is not that of plain decoding behind {text.decode(found[:at])[-30:]!r}", show)
        if len(found) < len(due):
            raise Finding(f"plain decoding writes {len(due)} tokens behind {prompt[-30:]!r}, and you {len(found)}")
    if not kept:
        raise Finding("right text, but 0 % accepted")
    fast, slow = (clock[name][0] / clock[name][1] for name in ("yours", "plain"))
    return table(
        [
            ["acceptance rate", f"{kept / drafted:.0%}", f"{kept} of {drafted} drafts kept, with gamma {gamma}"],
            ["tokens per round", f"{emitted / rounds:.2f}", f"{emitted} tokens in {rounds} rounds"],
            ["speed", f"{fast / slow:.2f}x", f"{fast:.0f} tokens a second, and {slow:.0f} of plain decoding"],
        ]
    )


def timed(rounds, clock):
    """The rounds. Adds to clock how many tokens came behind the first of them, and in how many seconds."""
    start = None
    for round in rounds:
        if start is not None:
            clock[0] += len(round[0])
            clock[1] += time.perf_counter() - start
        yield round
        start = time.perf_counter()
