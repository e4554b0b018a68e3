"""The checks of Lab 2: one round after the other on small models, then whole texts. The code is in labs/lab2.py."""

from collections import namedtuple

import check2_texts
from check import Finding, Stuck, blank_of, run, table
from check2_models import Partly, Scripted, chain, history, play, right

HINTS = {  # number of a blank -> how to begin
    1: "Begin here: roll the cache back, feed it what it lacks, take the first choice, and feed that, gamma times.",
    2: "The text may grow by limit - len(tokens), and one of these tokens is the target's own.",
    3: "Feed the newest token and the drafts, in one call, and ask for a row of logits for each.",
    4: "Row i judges draft i. Compare rows.argmax(-1) with the drafts, up to the first that differs.",
    5: "An EOS may be anywhere among the new tokens.",
    6: "The newest token has not been fed yet, so the cache should hold len(tokens) - 1 rows.",
}


def drafting(lab):
    """Draft.propose guesses what its model says, on a cache that holds the text, after any round."""
    model, extra = history(), False
    draft, tokens, last = lab.Draft(model, 99), [1, 2], None  # last: the drafts before, and how many of them were kept
    for gamma, kept in [(3, 1), (3, 3), (4, 0), (2, 2), (1, 1), (3, 3)]:
        model.calls.clear()
        at = f"behind a round that kept {last[1]} of {len(last[0])} drafts" if last else "in the first round"
        due = right(model, tokens, gamma)
        try:
            guesses = draft.propose(tokens, gamma)
        except Exception:
            rows = getattr(draft.cache, "tokens", [])
            if last and not model.calls and rows[: len(tokens)] != tokens[: len(rows)]:
                said = f"{at}, the rows of rejected drafts are still in the draft's cache, which holds {rows}"
                said += f", and the text is {tokens}: before you feed it, roll it back to len(tokens) - 1 at most"
                raise Finding(f"{said}, as the newest token was never fed") from None
            raise
        if not isinstance(guesses, list):
            raise Finding(f"propose must return a list of {gamma} ids, and returned {guesses!r:.80}")
        guesses, calls = [int(id) for id in guesses], model.calls
        extra = extra or len(calls) > gamma
        saw = ["the draft saw", *(calls[0].seen if calls else [])]
        show = table([["the text", *tokens], saw, ["your guesses", *guesses], ["due", *due]])
        if calls:
            first_call(calls[0], tokens, last, at, show)
        if any(call.seen != tokens + due[:i] for i, call in enumerate(calls[1:gamma], 1) if guesses[:i] == due[:i]):
            raise Finding("the draft is not fed its own guesses: each must be fed to get the next", show)
        if len(guesses) != gamma:
            raise Finding(f"propose was asked for {gamma} drafts and returned {len(guesses)}", show)
        if guesses != due:
            if calls and calls[0].last > 1 and guesses[0] != due[0]:
                said = f"the guess is not from the last of the {calls[0].last} rows of the draft's logits"
                raise Finding(f"{said}: only that one predicts what follows the text", show)
            raise Finding("the draft saw the right tokens, but propose does not return its first choices", show)
        last = guesses, kept
        tokens += guesses[:kept] + [right(model, tokens + guesses, 1)[0] if kept == gamma else (due[kept] + 1) % 7]
    return ["Right, but you also feed the last guess: one pass of the draft more in each round."] if extra else None


def first_call(call, tokens, last, at, show):
    """Whether the draft has the text in sight when it makes the first guess of a round, and at the least cost."""
    drafts, kept = last or ([], 0)
    stale = drafts[kept:-1] if call.seen[: len(tokens) - 1] == tokens[:-1] else []  # the last draft need not be fed
    if call.seen == tokens:
        if last and call.before == 0:
            said = f"right guesses, but the draft reads all of the text again, {len(call.fed)} tokens"
            raise Finding(f"{said}: roll its cache back and feed what is new", show)
        return
    if drafts and kept == len(drafts) and call.seen == tokens[:-2] + tokens[-1:]:
        said = (
            f"the draft's cache is one token short after a full acceptance: all of its {kept} drafts were kept, but it "
        )
        said += f"was never fed the last of them, {tokens[-2]}. Two tokens are to be fed then"
    elif stale and call.seen[len(tokens) - 1 :][: len(stale)] == stale:
        said = f"{at}, the rows of rejected drafts are still in the draft's cache: {stale}"
    elif call.seen == tokens + tokens[-1:]:
        said = "the newest token is in the draft's cache twice: roll back to len(tokens) - 1 at most before you feed it"
    elif call.seen == tokens[:-1]:
        said = f"the newest token, {tokens[-1]}, was not fed to the draft"
    elif call.before == 0 and call.seen == tokens[-len(call.seen) :]:
        said = f"the draft has only {call.seen} of the text in sight: feed it all that its cache lacks"
    elif call.before == len(tokens) and call.seen[-1] == tokens[-1]:
        said = f"{at}, one row of a rejected draft is still in the draft's cache: roll back to len(tokens) - 1 at most"
    else:
        said = f"{at}, the draft has {call.seen} in sight, and the text is {tokens}"
    raise Finding(said, show)


def room(lab):
    """A round asks for gamma drafts, and for fewer before max_new_tokens: the target adds a token itself."""
    for count, gamma in ((20, 3), (4, 3), (3, 5), (2, 4), (1, 4), (9, 1)):
        draft, due = Partly(chain()), min(gamma, count - 1)
        _, _, error = play(lab, chain(), draft, [3], count, gamma)
        asked = max(draft.asked, default=0)
        if error and not draft.asked and due:
            raise error
        asks = f"gamma {gamma} and {count} tokens to go: you ask for {asked} drafts, and {due} can be used"
        if asked > gamma:
            raise Finding(f"a round may not draft more than gamma. {asks}")
        if asked > due:
            raise Finding(f"this gives more than max_new_tokens, as the target adds a token to the drafts. {asks}")
        if asked < due:
            raise Finding(f"fewer drafts than there is room for. {asks}")


def one_pass(lab):
    """The target is called once a round, with the newest token and the drafts, and gives k + 1 rows."""
    for prompt, drafts in (([3], [4, 5, 6]), ([1, 2, 3], [4, 5, 6]), ([1, 2, 3], [4, 0]), ([3], [])):
        _, calls, error = play(lab, chain(), Scripted(drafts), prompt, 20, 3)
        due, fed = [prompt[-1], *drafts], [id for call in calls for id in call.fed]
        if not calls:
            raise error or Finding("the target was not called")
        if isinstance(error, Stuck):
            raise error
        gap, yours = [""] * len(prompt), [["and then" if i else "you fed", *call.fed] for i, call in enumerate(calls)]
        at = gap[1:] if fed != [*prompt, *drafts] else []  # below the text, unless that was fed, too
        yours = [[name, *at, *ids] for name, *ids in yours]
        show = table([["the text", *prompt], ["drafts", *gap, *drafts], ["to feed", *gap[1:], *due], *yours])
        if len(calls) > 1:
            said = f"the target was called {len(calls)} times in a round of {len(drafts)} drafts: the text may come"
            raise Finding(f"{said} out right, but nothing is gained. Feed all tokens in one call, once per round", show)
        if fed == drafts:
            said = "the newest token was not fed, only the drafts: the row that judges the first draft is the newest"
            raise Finding(f"{said} token's, so the first draft goes unchecked", show)
        if fed == [*prompt, *drafts] != due:
            raise Finding("the text is fed again, though the cache has it: feed the newest token and the drafts", show)
        if fed != due:
            raise Finding("the target is to be fed the newest token and then the drafts", show)
        if calls[0].last != len(due):
            said = f"you want last={calls[0].last} rows, and {len(due)} are due: one to judge each draft, and the last"
            raise Finding(f"{said} row, which gives the bonus token", show)


def matches(drafts, choices):
    """How many of the first drafts are the choices."""
    pairs = list(zip(drafts, choices, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def all_matches(drafts, choices):
    return sum(a == b for a, b in zip(drafts, choices, strict=False))


def late(drafts, choices):
    return drafts[: matches(drafts, choices[1:])] + [choices[1:][matches(drafts, choices[1:])]]


# What a round emits that makes this mistake. d: k drafts, c: the k + 1 first choices, n: how many drafts are right.
MISTAKES = [
    ("your slice begins one row late: row i judges draft i, and row 0 judges the first", lambda d, c, n: late(d, c)),
    (
        "right text, but 0 % accepted: no draft is kept, not even the target's own choice. Is draft i compared with "
        "row i, and an id with an id?",
        lambda d, c, n: c[:1],
    ),
    (
        "no bonus token: when all k drafts are kept, the last row gives one more for nothing",
        lambda d, c, n: d[:n] + c[n:][: n < len(d)],
    ),
    (
        "an error where all drafts are kept: this compares the bonus row with a draft, of which there is none, or the "
        "slice ends one row early",
        lambda d, c, n: d[:n] + [c[:-1][n]],
    ),
    (
        "drafts behind a wrong one are counted: count only up to the first that differs",
        lambda d, c, n: d[: all_matches(d, c)] + [c[all_matches(d, c)]],
    ),
    (
        "drafts behind a wrong one are kept, and only that one is left out: stop at the first that differs",
        lambda d, c, n: [a for a, b in zip(d, c, strict=False) if a == b] + [c[all_matches(d, c)]],
    ),
    (
        "the first draft is kept unchecked: row 0 judges it",
        lambda d, c, n: d[: 1 + matches(d[1:], c[1:])] + [c[1 + matches(d[1:], c[1:])]],
    ),
    (
        "all drafts are kept, whatever the target says: keep those that are its choice, up to the first that is not",
        lambda d, c, n: d + c[-1:],
    ),
    (
        "all of the target's choices are emitted, also those behind a wrong draft, which answer to it",
        lambda d, c, n: c,
    ),
    (
        "the token behind the kept drafts is from the row before: n drafts kept, so it is row n",
        lambda d, c, n: d[:n] + [c[n - 1]],
    ),
    (
        "you always take the token behind the kept drafts from the last row: with n drafts kept it is row n",
        lambda d, c, n: d[:n] + c[-1:],
    ),
    (
        "the rejected draft itself is emitted: in its place belongs the target's choice, row n",
        lambda d, c, n: d[: n + 1] + c[n:][: n == len(d)],
    ),
    (
        "no token from the target: behind n kept drafts always comes its own choice, from row n: n + 1 ids in all",
        lambda d, c, n: d[:n],
    ),
    (
        "no token from the target where a draft is rejected: in its place belongs the target's choice, row n",
        lambda d, c, n: d[:n] + c[n:][: n == len(d)],
    ),
]
Case = namedtuple("Case", "newest drafts choices")  # the newest token, the drafts, and the target's choice behind each
ROUNDS = [(3, [4, 5, 0]), (3, [5, 6, 7]), (3, [4, 5, 6]), (5, [6, 7]), (3, [4, 7, 0]), (3, [4]), (3, [6])]
CASES = [Case(newest, drafts, [(id + 1) % 8 for id in [newest, *drafts]]) for newest, drafts in ROUNDS]


def emitted(rule, case):
    """What a rule of MISTAKES makes of a case; None for an error."""
    try:
        return rule(case.drafts, case.choices, matches(case.drafts, case.choices))
    except IndexError:
        return None


def accepting(lab):
    """A round keeps the drafts that are the target's choices, up to the first that is not, and adds one token."""
    found = [play(lab, chain(), Scripted(case.drafts), [case.newest], 20, 3) for case in CASES]
    yours = [rounds[0][0] if rounds else None for rounds, _, _ in found]
    for case, (rounds, _, error), new in zip(CASES, found, yours, strict=True):
        if isinstance(error, NotImplementedError) or (error and blank_of(lab, error) in (5, 6)):
            raise error  # not what this check is about
        n = matches(case.drafts, case.choices)
        due = case.drafts[:n] + case.choices[n : n + 1]
        show = table(
            [
                ["drafts", "", *case.drafts],
                ["fed to the target", case.newest, *case.drafts],
                ["its choice, row by row", *case.choices],
                ["this judges", *(f"draft {i}" for i in range(len(case.drafts))), "none: bonus"],
                ["to emit", *due],
                ["you emit", *(["an error"] if new is None else new)],
            ]
        )
        if new != due:
            known = [name for name, rule in MISTAKES if [emitted(rule, case) for case in CASES] == yours]
            if not known and error:
                raise error
            raise Finding(known[0] if known else "not what the target would have written", show)
        _, drafted, kept = rounds[0]
        if drafted != len(case.drafts):
            raise Finding(f"right tokens, but {len(case.drafts)} were drafted, and you yield {drafted} as that", show)
        if kept > drafted:
            raise Finding(f"you say that {kept} of {drafted} drafts were kept: this counts the bonus as a draft", show)
        if kept != n:
            raise Finding(f"right tokens, but {n} drafts of {drafted} were kept, and you yield {kept} as that", show)
    rounds, _, error = play(lab, chain(), Scripted([]), [3], 20, 3)
    if error or rounds != [([4], 0, 0)]:
        raise error or Finding(f"no drafts is one plain step: behind a 3 due is ([4], 0, 0), and you yield {rounds[0]}")


CHECKS = {
    "1 draft": (1, drafting),
    "2 room": (2, room),
    "3 verify": (3, one_pass),
    "4 accept": (4, accepting),
    "5 stop": (5, check2_texts.stopping),
    "6 roll back": (6, check2_texts.target_cache),
    "all together": (0, check2_texts.together),
    "the pair in tiny/": (0, check2_texts.tiny),
}


def main(lab):
    """Check labs/lab2.py. Returns the exit code: 0 if all is right, else 1."""
    if not run(lab, CHECKS, HINTS):
        return 1
    print("\nAll is right. Now read speculative.py, where the same is done with sampling, too: blank 1 is")
    print(
        "DraftModel.propose, blank 4 greedy, the others are in speculative_decode. What to try next: see labs/lab2.md."
    )
    return 0
