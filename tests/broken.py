"""Classic wrong rules, each as the lines of speculative.py that it gets wrong, and the checks that find them.

    module = broken("slice off by one")         speculative.py with these lines changed
    findings(module)                            {name of the check: what it found, or None}
"""

import types
from pathlib import Path

import speculative
from dice import distance, distribution, law
from toys import Random, Scripted, Toy, chain, history, oracle

RULES = {  # name -> what is wrong with it, the check that finds it, and the lines: right, wrong
    "softmax residual": (
        "The residual max(0, p - q) goes through a softmax instead of being divided by its sum.",
        "distribution",
        [("return n, draw(residual / residual.sum(), generator)", "return n, draw(residual.softmax(-1), generator)")],
    ),
    "resample from p": (
        "In place of a rejected draft the target draws from p, where only what q had too little of is due.",
        "distribution",
        [("residual = (p[n] - q[n]).clamp(min=0)", "residual = p[n]")],
    ),
    "q without top-k": (
        "Drafts are drawn with top-k, but p is compared to a q without it.",
        "distribution",
        [("q.append(warp(logits, *self.sampling))", "q.append(warp(logits, self.sampling[0], 0, 1.0))"),
         ("draw(q[-1], self.generator)", "draw(warp(logits, *self.sampling), self.generator)")],
    ),
    "tiny temperature": (
        "Greedy decoding is sampling at temperature 0.00001, so that ties are drawn by lot.",
        "ties",
        [("kept, last = greedy(logits, drafted)",
          "kept, last = rejection(warp(logits, 1e-5, 0, 1.0), None, drafted, torch.Generator().manual_seed(1))")],
    ),
    "improbable token dropped": (
        "A draft is dropped because its own probability is low, even where q is as low: rare tokens become rarer.",
        "distribution",
        [("keep = keep.nan_to_num(0).clamp(max=1)",
          "keep = keep.nan_to_num(0).clamp(max=1) * (p[row, drafted] > 0.25)")],
    ),
    "no bonus": (
        "After k accepted drafts the round ends without the token that the last row gives for nothing.",
        "bonus",
        [("new = ids[:n] + [token]",
          "new = ids[:n] + [token] * (n < len(ids) or not ids); last = torch.tensor(new[-1:])")],
    ),
    "slice off by one": (
        "The verify slice begins one row late: draft i is judged by the row behind itself.",
        "greedy text",
        [("verify = slice(0, len(drafted) + 1)", "verify = [*range(1, len(drafted) + 1), len(drafted)]")],
    ),
    "no rollback": (
        "The rows of rejected drafts stay in the target's cache.",
        "greedy text",
        [("cache.rollback(len(tokens) - 1)", "pass")],
    ),
    "draft cache one short": (
        "After full acceptance the draft is not fed its own last draft. The text stays right, and is slower.",
        "own draft",
        [("fed, drafted, q = torch.tensor(tokens[self.cache.length :]), [], []",
          "fed, drafted, q = torch.tensor(tokens[-1 if self.cache.length else 0 :]), [], []")],
    ),
}  # fmt: skip


def broken(name):
    """A copy of the module `speculative` with the lines of a rule changed."""
    source, copy = Path(speculative.__file__).read_text(encoding="utf-8"), types.ModuleType("broken")
    for right, wrong in RULES[name][2]:
        assert source.count(right) == 1, f"speculative.py has not once, as broken.py believes: {right}"
        source = source.replace(right, wrong)
    exec(compile(source, f"speculative.py with {name}", "exec"), vars(copy))
    return copy


def texts(module, target, drafter, prompt, count, gamma):
    """The first tokens of a text, and the rounds. The cache has room for many more: a broken rule may fill it."""
    rounds, tokens = [], []
    for round in module.speculative_decode(target, drafter, prompt, 6 * count, gamma):
        rounds.append(round)
        tokens += round.tokens
        if len(tokens) >= count:
            break
    return tokens[:count], rounds


def greedy_text(module, monkeypatch):
    """The greedy text is that of a loop without a cache or drafts: wrong, scripted, random and right drafts."""
    drafters = {
        "always wrong drafts": lambda: Scripted([4, 4, 4]),
        "drafts that are right in part": lambda: Scripted([3, 4, 1], [5, 3], [6, 5, 3]),
        "random drafts": lambda: Random(7),
        "the target as its draft": lambda: module.DraftModel(history(), 99),
    }
    for what, drafter in drafters.items():
        for model, prompt in ((history, [1, 2]), (chain, [3])):
            right, found = oracle(model(), prompt, 12), texts(module, model(), drafter(), prompt, 12, 3)[0]
            if found != right:
                return f"with {what} the text is {found} and should be {right}"


def ties(module, monkeypatch):
    """Where logits are equal, greedy takes the lowest id every time."""
    found = texts(module, Toy(lambda seen: [0, 1, 3, 3, 2, 3]), Scripted([2, 2, 2]), [0], 12, 3)[0]
    return f"ids 2, 3 and 5 tie, and the text is {found}" if found != [2] * 12 else None


def bonus(module, monkeypatch):
    """k accepted drafts make k + 1 tokens."""
    _, rounds = texts(module, chain(), Scripted([4, 5, 6]), [3], 4, 3)
    first = rounds[0]
    return f"{first.accepted} drafts kept made {len(first.tokens)} tokens" if len(first.tokens) != 4 else None


def own_draft(module, monkeypatch):
    """The target as its own draft has every draft kept, in every round."""
    _, rounds = texts(module, history(), module.DraftModel(history(), 99), [1, 2], 24, 3)
    drafted, kept = (sum(getattr(round, name) for round in rounds) for name in ("drafted", "accepted"))
    return f"{kept} of {drafted} drafts were kept" if kept < drafted else None


def exact(module, monkeypatch):
    """The probability of each text is the target's, computed by walking through every outcome of every choice."""
    rows = [[1.0, 0.3, -0.5, -1.5], [-0.2, 0.9, 0.4, 0.0]], [[0.1, 0.6, 0.9, -1.0], [0.8, -0.9, 0.3, 0.5]]
    target, draft = (Toy(lambda seen, rows=rows: rows[sum(seen) % 2]) for rows in rows)
    warping = {"temperature": 1.0, "top_k": 3}

    def run():
        drafter = module.DraftModel(draft, 99, **warping)
        rounds = module.speculative_decode(target, drafter, [1, 2], 2, 1, generator=True, **warping)
        return tuple(id for round in rounds for id in round.tokens)

    off = distance(distribution(run, monkeypatch, module), law(target, [1, 2], 2, **warping))
    return f"the texts of two tokens are off by a total variation of {off:.3f}" if off > 1e-6 else None


CHECKS = {"greedy text": greedy_text, "ties": ties, "bonus": bonus, "own draft": own_draft, "distribution": exact}


def findings(module, monkeypatch, checks=CHECKS):
    """What each check finds, or None. An error that a rule runs into is a finding, too."""
    found = {}
    for name, check in checks.items():
        try:
            found[name] = check(module, monkeypatch)
        except Exception as error:  # whatever a wrong rule may lead to
            found[name] = f"{type(error).__name__}: {error}"
    return found
