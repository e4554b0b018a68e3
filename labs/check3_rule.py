"""The checks of Lab 3's judge: which drafts are kept how often, and what law the token behind them has."""

import torch
from check import Finding, place, table
from check3_chance import law, numbers, outcomes, same

# With these p/q, p and p - q are multiples of 1/20, as the checker's uniform() is: see check3_chance.py.
P = torch.tensor([[0.5, 0.25, 0.15, 0.1], [0.1, 0.2, 0.4, 0.3], [0.2, 0.3, 0.05, 0.45]])
Q = torch.tensor([[0.25, 0.2, 0.3, 0.25], [0.4, 0.25, 0.2, 0.15]])
DRAFTS = [[0, 2], [1, 0], [2, 1], [3, 3], [2, 0], [3, 1], [0, 0], [0, 1], [0, 3]]


def keep_law(a, b):
    """The law of how many of two drafts are kept, a and b the chance of each."""
    return torch.tensor([1 - a, a * (1 - b), a * b])


def right_chance(i, d):
    return min(1.0, (P[i, d] / Q[i, d]).item())


# Mistakes, and with which chance they keep draft i, d its id.
CHANCES = [
    ("the ratio is upside down: p/q, and not q/p", lambda i, d: min(1.0, (Q[i, d] / P[i, d]).item())),
    ("the comparison is the wrong way round: keep where uniform() is below min(1, p/q)",
     lambda i, d: 1 - right_chance(i, d)),
    ("kept with chance p: it must be p/q, which says how much too often q draws it",
     lambda i, d: P[i, d].item()),
    ("kept where p is at least q, and else never: keep it with probability p/q then",
     lambda i, d: float(P[i, d] >= Q[i, d])),
    ("every draft is kept", lambda i, d: 1.0),
    ("no draft is kept", lambda i, d: 0.0),
    ("kept only where it is the target's likeliest: that is the greedy rule", lambda i, d: float(P[i].argmax() == d)),
    ("draft i is judged by row i + 1 of p: row i is for its place",
     lambda i, d: min(1.0, (P[i + 1, d] / Q[i, d]).item())),
    ("draft i is judged by the draft's next row: it was drawn from row i of q",
     lambda i, d: min(1.0, (P[0, d] / Q[1, d]).item()) if i == 0 else 1.0),
    ("each draft is judged by row 0", lambda i, d: min(1.0, (P[0, d] / Q[0, d]).item())),
    ("kept with probability p - q: take the ratio", lambda i, d: max(0.0, (P[i, d] - Q[i, d]).item())),
]  # fmt: skip


def judged(lab, p, q, drafted, high=False):
    """[(probability, (n, token))], n an int."""

    def judge():
        given = p.clone(), q.clone(), list(drafted)
        result = lab.judge(*given)
        if not (given[0].equal(p) and given[1].equal(q) and given[2] == list(drafted)):
            raise Finding("judge changes p, q or drafted, which belong to its caller: p[i] - q[i] makes a new tensor")
        return result

    try:
        results = outcomes(lab, judge, high)
    except IndexError as error:
        if "out of bounds" not in str(error):
            raise
        said = (
            f"{place(lab, error)}: {error}. Draft i was drawn from row i of q, not from the draft's next row: q has k"
        )
        raise Finding(f"{said} rows, and p k + 1, the last for the bonus") from None
    found = []
    for probability, result in results:
        n, id = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
        if not (type(n) is int and 0 <= n <= len(drafted) and (id is None or type(id) is int)):
            said = f"judge must return (n, id), two ints, n from 0 to {len(drafted)}"
            raise Finding(f"{said}, and returned {' '.join(repr(result).split()):.80}")
        found.append((probability, (n, id)))
    return found


def keeping(lab):
    """Draft i is kept with probability min(1, p/q), up to the first that falls."""
    found = {}
    for drafted in DRAFTS:
        outcome = judged(lab, P, Q, drafted)
        found[tuple(drafted)] = law([(probability, n) for probability, (n, _) in outcome], 3)
    due = {(a, b): keep_law(right_chance(0, a), right_chance(1, b)) for a, b in found}
    wrong = [ids for ids in found if not same(found[ids], due[ids], 1e-5)]
    if not wrong:
        return
    a, b = wrong[0]
    show = [f"drafts {a} and {b}, whose p are {P[0, a]:.2f} and {P[1, b]:.2f}, and q {Q[0, a]:.2f} and {Q[1, b]:.2f}"]
    show += [f"kept      {'0':>7}{'1':>7}{'2':>7} drafts, with probability"]
    for who, row in (("due", due[a, b]), ("yours", found[a, b])):
        show.append(f"{who:<10}" + "".join(f"{x:7.3f}" for x in row.tolist()))
    for said, rule in CHANCES:
        if all(same(found[a, b], keep_law(rule(0, a), rule(1, b))) for a, b in found):
            raise Finding(said, show)
    if all(same(found[a, b], behind(a, b)) for a, b in found):
        raise Finding("drafts behind a rejected one are kept: stop at the first that falls", show)
    for said, rule in (("one number from uniform() for all drafts: draw a new one for each", once),
                       ("n counts the draft that fell, too: it is how many were kept", counted)):  # fmt: skip
        if all(same(found[a, b], rule(right_chance(0, a), right_chance(1, b))) for a, b in found):
            raise Finding(said, show)
    first = {a: law[1:].sum().item() for (a, _), law in found.items()}  # the chance that draft 0 is kept
    dropped = [d for d in first if first[d] < 1e-6]
    if dropped and all(abs(first[d] - right_chance(0, d)) < 1e-5 for d in first if d not in dropped):
        ids = ", ".join(f"{d} with p {P[0, d]:.2f} and q {Q[0, d]:.2f}" for d in dropped)
        said = "a draft is dropped because its own probability is low: only p/q counts, however rare the token is"
        raise Finding(f"{said} (never kept: {ids})", show)
    raise Finding("not the chance min(1, p/q)", show)


def behind(a, b):
    """The law of n where each draft is judged, no matter whether one before it fell."""
    a, b = right_chance(0, a), right_chance(1, b)
    return torch.tensor([(1 - a) * (1 - b), a * (1 - b) + (1 - a) * b, a * b])


def once(a, b):
    """The law of n where both drafts, kept with chances a and b, are judged by the same random number."""
    return torch.tensor([1 - a, max(0.0, a - b), min(a, b)])


def counted(a, b):
    """The law of n where the draft that falls is counted."""
    return torch.tensor([0.0, 1 - a, a])


UNIT = torch.eye(4)


def norm(weights):
    return weights / weights.sum()


def left(p, q):
    """The residual, as it is due: what q gives too rarely."""
    return norm((p - q).clamp(min=0))


# Mistakes in the token behind n kept drafts, d the one that fell (n = 2: in the bonus), and the law they lead to.
REPLACEMENTS = [
    ("softmax over the residual: divide max(0, p - q) by its sum", lambda n, d: (P[n] - Q[n]).clamp(min=0).softmax(0)),
    (
        "resample from p: in place of a rejected draft only max(0, p - q) is due, what q gives too rarely",
        lambda n, d: P[n],
    ),
    (
        "the residual is not renormalised: divide max(0, p - q) by its sum",
        lambda n, d: (P[n] - Q[n]).clamp(min=0) + UNIT[3] * (1 - (P[n] - Q[n]).clamp(min=0).sum()),
    ),
    ("the replacement is drawn from q", lambda n, d: Q[n]),
    ("the residual is max(0, q - p), and must be max(0, p - q)", lambda n, d: left(Q[n], P[n])),
    ("the residual is |p - q|: what is negative counts as 0", lambda n, d: norm((P[n] - Q[n]).abs())),
    ("the likeliest token of the residual is taken: draw from it", lambda n, d: UNIT[(P[n] - Q[n]).argmax()]),
    ("the target's likeliest token is taken: draw from max(0, p - q)", lambda n, d: UNIT[P[n].argmax()]),
    (
        "p without the rejected draft: the residual is max(0, p - q), for all tokens",
        lambda n, d: norm(P[n] * (1 - UNIT[d])),
    ),
    (
        "the replacement is drawn from the next row of p: its place is the rejected draft's, row n",
        lambda n, d: P[n + 1],
    ),
    ("the residual uses the draft's next row: p[n] - q[n], of one place", lambda n, d: left(P[n], Q[1])),
    ("the residual uses the next row of p: p[n] - q[n], of one place", lambda n, d: left(P[n + 1], Q[n])),
    ("the residual is always that of row 0: take the row of the draft that fell", lambda n, d: left(P[0], Q[0])),
]
BONUSES = [
    ("the bonus is drawn from q: it is the target's, the last row of p", lambda n, d: Q[1]),
    ("the bonus is drawn from p's row of the last draft: it is for the place behind it, p[k]", lambda n, d: P[1]),
    ("the bonus is drawn from p - q: nothing was rejected, so the last row of p is due as it is",
     lambda n, d: left(P[2], Q[1])),
    ("the bonus is the likeliest token: draw it", lambda n, d: UNIT[P[2].argmax()]),
]  # fmt: skip


def replacing(lab):
    """Behind the kept drafts: a token drawn from max(0, p - q) over its sum, or, if all are kept, from p's last row."""
    for mistakes, cases in (
        (REPLACEMENTS, [([2, 0], 0), ([3, 1], 0), ([0, 0], 1), ([0, 1], 1)]),
        (BONUSES, [([0, 2], 2), ([1, 3], 2)]),
    ):
        found = []
        for drafted, n in cases:
            tokens = [(chance, token) for chance, (kept, token) in judged(lab, P, Q, drafted) if kept == n]
            if any(token is None for _, token in tokens):
                raise Finding("the drafts are kept as they should be. Now the token behind them, in place of None")
            found.append((n, drafted[n] if n < 2 else None, law(tokens, 4), left(P[n], Q[n]) if n < 2 else P[2]))
        for n, d, yours, due in found:
            if not same(yours, due, 1e-5):
                known = [said for said, rule in mistakes if all(same(f[2], rule(f[0], f[1])) for f in found)]
                where = "the bonus token" if d is None else f"the token in place of draft {n}, which was {d} and fell"
                rows = [numbers("p", P[n]), *([] if d is None else [numbers("q", Q[n])])]
                said = known[0] if known else "the token behind the kept drafts has not the law that is due"
                raise Finding(said, [where, *table([*rows, numbers("due", due), numbers("yours", yours)])])


def nothing_left(lab):
    """Where p and q are equal, up to rounding, nothing is NaN and the token is drawn from p."""
    q = P[:1]
    p = torch.cat([q * (1 - 2**-20), P[2:]])  # p / q is a little less than 1, and a draft may fall by a hair
    for drafted in range(4):
        tokens = [(chance, token) for chance, (n, token) in judged(lab, p, q, [drafted], high=True) if n == 0]
        if tokens and not same(law(tokens, 4), P[0], 1e-3):
            row = numbers("due", P[0]), numbers("yours", law(tokens, 4))
            raise Finding("where p and q are equal up to rounding, the residual is all 0: draw from p then", table(row))
