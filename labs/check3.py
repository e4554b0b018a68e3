"""The checks of Lab 3: every outcome of each random choice on small distributions, then a histogram of many tokens."""

import check3_histogram
import check3_rule
import torch
from check import Finding, run, table
from check3_chance import Dice, instead, law, name, numbers, outcomes, same
from check3_rule import P, Q

HINTS = {  # number of a blank -> how to begin
    1: "Begin here: set the logits below the top_k-th largest to -inf, divide by the temperature, take the softmax.",
    2: "For each draft: warp what the draft model says behind text + drafts so far, draw from it, and note it as q.",
    3: "Go through the drafts: keep draft i with probability min(1, p/q) of its id, and stop at the first that falls.",
    4: "p has a row for each place: the target behind text + drafted[:i], i from 0 to gamma, warped. Then judge.",
}
LOGITS = {
    "target": [[2.0, 1.0, 0.5, -1.0], [0.3, 1.2, 2.1, 0.0], [0.9, -0.6, 0.1, 1.7]],
    "draft": [[1.0, 1.6, 0.2, 0.1], [1.4, 0.2, 0.9, -0.5], [0.3, 0.8, -0.4, 1.1]],
}
HOW = 0.5, 2  # temperature and top-k


def model(name):
    """A function of the text, as lab3.py has models. Its logits depend on all of the text."""
    return lambda text: torch.tensor(LOGITS[name][sum(text) % 3])


def warped(logits, temperature=1.0, top_k=0):
    """As blank 1 is due."""
    limit = logits.sort().values[-top_k] if top_k else -torch.inf
    return (logits.masked_fill(logits < limit, -torch.inf) / temperature).softmax(-1)


def warping(lab):
    """warp divides by the temperature, keeps the top_k largest, and sums to 1."""
    logits = torch.tensor([2.0, 1.0, 0.5, -1.0, 1.5])
    for temperature, top_k in ((1.0, 0), (0.5, 0), (1.0, 2), (0.5, 3), (2.0, 1)):
        found, due = lab.warp(logits.clone(), temperature, top_k), warped(logits, temperature, top_k)
        if not isinstance(found, torch.Tensor) or found.shape != due.shape:
            raise Finding(f"warp must return a tensor {list(due.shape)}, and returned {found!r:.80}")
        mistakes = [
            ("the logits are not divided by the temperature", warped(logits, 1.0, top_k)),
            ("the logits are multiplied by the temperature", warped(logits, 1 / temperature, top_k)),
            ("no top-k: the logits below the top_k-th largest must become -inf", warped(logits, temperature, 0)),
            ("what top-k leaves is not divided by its sum", warped(logits, temperature, 0) * (due > 0)),
            ("top-k keeps one token too many", warped(logits, temperature, min(top_k + 1, 5))),
            ("top-k keeps one token too few", warped(logits, temperature, max(top_k - 1, 1))),
        ]
        where = f"temperature {temperature}, top_k {top_k} of the logits {[round(x, 1) for x in logits.tolist()]}"
        name(found, due, mistakes, "not the distribution that is due", where)


def ids(found):
    """Whether it is a list of ids, and not of tensors: these compare as ids do, but no dictionary finds them again."""
    return isinstance(found, list) and all(type(id) is int for id in found)


def shown(found):
    """In one line."""
    return f"{' '.join(repr(found).split()):.100}"


def unchanged(text, who):
    if text != [1]:
        raise Finding(f"{who} changes `text`, which belongs to its caller: text + drafted makes a new list")


def proposing(lab):
    """Each draft is drawn from the draft's warped distribution, and q is that very distribution."""
    draft, text = model("draft"), [1]

    def propose():
        result = lab.propose(draft, text, 2, *HOW)
        unchanged(text, "propose")
        return result

    found = outcomes(lab, propose)
    for _, result in found:
        drafted, q = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
        if not (ids(drafted) and len(drafted) == 2 and getattr(q, "shape", None) == (2, 4)):
            said = "propose must return a list of gamma ids, each an int, and a tensor q [gamma, vocab], here [2, 4]"
            raise Finding(f"{said}. It returned {shown(result)}")
        for i in range(2):
            raw, known = draft(text + drafted[:i]), "q is not what the draft was drawn from: q without"
            mistakes = [
                (f"{known} temperature and top-k", warped(raw)),
                (f"{known} top-k", warped(raw, HOW[0])),
                (f"{known} the temperature", warped(raw, 1.0, HOW[1])),
                ("each draft must be drawn behind those before it: text + drafted[:i]", warped(draft(text), *HOW)),
                ("q holds the logits, and is to hold probabilities", raw),
            ]
            where = f"row {i} of q, temperature {HOW[0]}, top_k {HOW[1]}"
            name(q[i], warped(raw, *HOW), mistakes, "q is not what the draft was drawn from", where)
    raw = draft(text)
    mistakes = [
        ("the draft is drawn without temperature and top-k, and q has them", warped(raw)),
        ("the draft is drawn without top-k", warped(raw, HOW[0])),
        ("the draft is drawn without the temperature", warped(raw, 1.0, HOW[1])),
        (
            "the draft is the likeliest token, not drawn: then q would be 1 for it and 0 for all others",
            warped(raw, 0.01),
        ),
    ]
    drawn = law([(probability, drafted[0]) for probability, (drafted, _) in found], 4)
    name(drawn, warped(raw, *HOW), mistakes, "draft 0 is not drawn from q", "the law of draft 0")


def rounds(lab):
    """p is the target's, warped as q is, row i behind text + drafted[:i], and what is kept is emitted."""
    target, draft, text = model("target"), model("draft"), [1]
    given = []

    def judge(p, q, drafted):
        given.append((p, q, drafted))
        return kept, 3

    for kept in (0, 1, 2):
        given.clear()
        dice = Dice([2])  # draft 0 is id 2, the second likeliest
        with instead(lab, judge=judge, uniform=dice.uniform, draw=dice.draw):
            new = lab.one_round(target, draft, text, 2, *HOW)
        unchanged(text, "one_round")
        if not given:
            raise Finding("one_round must ask judge(p, q, drafted), once")
        p, q, drafted = given[0]
        if not ids(drafted):
            raise Finding(f"judge takes p, q and the drafts, in this order, and was given {shown(drafted)} as drafts")
        if getattr(p, "shape", None) != (3, 4):
            raise Finding(f"p must be a tensor [gamma + 1, vocab], here [3, 4], and is {getattr(p, 'shape', p)!s:.60}")
        for i in range(3):
            raw, late = target(text + drafted[:i]), target(text + drafted[: i + 1])
            mistakes = [
                ("p is not divided by the temperature: warp target and draft alike", warped(raw, 1.0, HOW[1])),
                ("p is without top-k: warp target and draft alike", warped(raw, HOW[0])),
                ("p is neither divided by the temperature nor cut by top-k: warp it as q is", warped(raw)),
                ("p is the target's logits: warp them", raw),
                ("the rows of p begin one late: row i is the target's behind text + drafted[:i]", warped(late, *HOW)),
                ("the rows of p are all for one place: row i is behind text + drafted[:i]", warped(target(text), *HOW)),
                ("p is what the draft says, not the target", warped(draft(text + drafted[:i]), *HOW)),
            ]  # fmt: skip
            where = f"row {i} of p behind the text and {i} drafts, temperature {HOW[0]}, top_k {HOW[1]}"
            name(p[i], warped(raw, *HOW), mistakes, "not the target's distribution", where)
            if i < 2 and not same(q[i], warped(draft(text + drafted[:i]), *HOW), 1e-5):
                raise Finding("q is not what propose returned")
        due = [*drafted[:kept], 3]
        if not ids(new):
            raise Finding(f"one_round must return a list of ids, each an int, and returned {shown(new)}")
        if new != due:
            said = f"judge kept {kept} of the drafts {drafted} and drew 3: due is {due}, and you return {new}"
            raise Finding(said)


def exact(lab):
    """The first token of a round has the target's law, computed from every outcome, though q is another."""
    found = outcomes(
        lab, lambda: lab.one_round(lambda ids: P[len(ids) - 1].log(), lambda ids: Q[len(ids) - 1].log(), [0], 1, 1, 0)
    )
    first = law([(chance, new[0]) for chance, new in found], 4)
    row = numbers("q", Q[0]), numbers("p, due", P[0]), numbers("yours", first)
    if not same(first, P[0], 1e-5):
        raise Finding("the law of the first token is not the target's", table(row))
    return table([["id", 0, 1, 2, 3], *row])


CHECKS = {
    "1 warp": (1, warping),
    "2 propose": (2, proposing),
    "3 judge (keep)": (3, check3_rule.keeping),
    "3 judge (replace)": (3, check3_rule.replacing),
    "3 judge (p = q)": (3, check3_rule.nothing_left),
    "4 one round": (4, rounds),
    "the law": (0, exact),
    "the histogram": (0, check3_histogram.compare),
}


def main(lab):
    """Check labs/lab3.py. Returns the exit code: 0 if all is right, else 1."""
    torch.set_num_threads(1)  # for rows this short a second one costs more than it brings
    if not run(lab, CHECKS, HINTS):
        return 1
    print(
        "\nAll is right. Now read rejection and warp in speculative.py. `python test_lossless.py --broken RULE` shows"
    )
    print("what a histogram makes of nine classic mistakes. What to try next is at the end of labs/lab3.md.")
    return 0
