"""The checker of Lab 3, as in test_labs.py, and its histogram."""

import sys

import pytest
import torch

import speculative
from broken import broken
from test_labs import ROOT, filled, finding, mutant

sys.path.insert(0, str(ROOT / "labs"))
import check3
import check3_histogram
from check2_models import Tokens


class Rows:
    """A model of Lab 3, a function of the text, as a model of speculative.py."""

    new_cache = Tokens

    def __init__(self, function):
        self.function = function

    def __call__(self, ids, cache, last):
        cache.tokens += ids.tolist()
        return self.function(cache.tokens)[None]


RIGHT3 = {  # what the library does, in the places of the blanks. Its dice are those of the lab: see below
    1: "return module.warp(logits[None], temperature, top_k, 1.0)[0]",
    2: "drafter = module.DraftModel(Rows(draft), 99, temperature, top_k)\n"
    "drafted, q = drafter.propose(list(text), gamma)\n"
    "return drafted.tolist(), q",
    3: "n, token = module.rejection(p, q, torch.tensor(drafted), None)\nreturn n.item(), token.item()",
    4: "p = torch.stack([warp(target(text + drafted[:i]), temperature, top_k) for i in range(gamma + 1)])\n"
    "n, token = judge(p, q, drafted)\n"
    "return [*drafted[:n], token]",
}
KEEP, DRAW = "keep = p[row, drafted] / q[row, drafted]", "return n, draw(residual / residual.sum(), generator)"
FALLBACK = "residual = torch.where(residual.sum() > 0, residual, p[n])"
LEFT = "residual = (p[n] - q[n]).clamp(min=0)"
BONUS = "n == len(drafted)"  # said where a mistake is one of the replacement alone, or of the bonus alone
COIN = "n = draw(torch.stack([1 - keep, keep], -1), generator).cumprod(0).sum(0, keepdim=True)"
CLAMP = "keep = keep.nan_to_num(0).clamp(max=1)"
WRONG3 = {  # what is wrong: how many checks pass, the lines of speculative.py that it changes, words of the diagnosis
    "no temperature": (0, [("(logits / temperature).softmax(-1)", "logits.softmax(-1)")], "not divided by the temp"),
    "temperature times": (0, [("(logits / temperature)", "(logits * temperature)")], "multiplied by the temperature"),
    "no top-k": (0, [("if 0 < top_k < vocab", "if False")], "no top-k"),
    "top-k one more": (0, [("logits.topk(top_k)", "logits.topk(min(top_k + 1, vocab))")], "one token too many"),
    "top-k behind, not normalised": (
        0,
        [("        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], float(\"-inf\"))",
          "        keep = logits >= logits.topk(top_k).values[:, -1:]\n"
          "        return (logits / temperature).softmax(-1) * keep")],
        "what top-k leaves is not divided by its sum",
    ),
    "q without top-k and temperature": (
        1,
        [("q.append(warp(logits, *self.sampling))", "q.append(logits.softmax(-1))"),
         ("draw(q[-1], self.generator)", "draw(warp(logits, *self.sampling), self.generator)")],
        "q is not what the draft was drawn from: q without temperature and top-k",
    ),
    "q without top-k": (
        1,
        [("q.append(warp(logits, *self.sampling))", "q.append(warp(logits, self.sampling[0], 0, 1.0))"),
         ("draw(q[-1], self.generator)", "draw(warp(logits, *self.sampling), self.generator)")],
        "q is not what the draft was drawn from: q without top-k",
    ),
    "greedy drafts": (1, [("fed = draw(q[-1], self.generator) if q else", "fed =")], "draft is the likeliest token"),
    "drafts drawn without temperature": (
        1,
        [("fed = draw(q[-1], self.generator)", "fed = draw(warp(logits, 1.0, self.sampling[1], 1.0), self.generator)")],
        "the draft is drawn without the temperature",
    ),
    "upside down": (2, [(KEEP, "keep = q[row, drafted] / p[row, drafted]")], "the ratio is upside down"),
    "wrong way round": (2, [("[1 - keep, keep]", "[keep, 1 - keep]")], "the comparison is the wrong way round"),
    "kept with p": (2, [(KEEP, "keep = p[row, drafted]")], "kept with chance p"),
    "threshold": (2, [(KEEP, "keep = (p[row, drafted] >= q[row, drafted]).float()")], "kept where p is at least q"),
    "all kept": (2, [(KEEP, "keep = torch.ones(len(drafted))")], "every draft is kept"),
    "none kept": (2, [(KEEP, "keep = torch.zeros(len(drafted))")], "no draft is kept"),
    "greedy rule": (2, [(KEEP, "keep = (p[row].argmax(-1) == drafted).float()")], "that is the greedy rule"),
    "p's next row": (2, [(KEEP, "keep = p[row + 1, drafted] / q[row, drafted]")], "judged by row i + 1 of p"),
    "q's next row": (2, [(KEEP, "keep = p[row, drafted] / q[row + 1, drafted]")], "the draft's next row"),
    "row 0 for all": (2, [(KEEP, "keep = p[0, drafted] / q[0, drafted]")], "each draft is judged by row 0"),
    "difference": (2, [(KEEP, "keep = (p[row, drafted] - q[row, drafted]).clamp(min=0)")], "take the ratio"),
    "goes on behind a rejected draft": (2, [(COIN, COIN.replace(".cumprod(0)", ""))], "stop at the first that falls"),
    "improbable dropped": (2, [(CLAMP, CLAMP + " * (p[row, drafted] > 0.12)")], "its own probability is low"),
    "softmax residual": (3, [(DRAW, "return n, draw(residual.softmax(-1), generator)")], "softmax over the residual"),
    "resample from p": (3, [(LEFT, "residual = p[n]")], "resample from p"),
    "not renormalised": (3, [(DRAW, "return n, draw(residual, generator)")], "not renormalised"),
    "from q": (3, [(LEFT, f"residual = p[n] if {BONUS} else q[n]")], "the replacement is drawn from q"),
    "q - p": (3, [(LEFT, f"residual = p[n] if {BONUS} else (q[n] - p[n]).clamp(min=0)")], "max(0, q - p)"),
    "|p - q|": (3, [(LEFT, "residual = (p[n] - q[n]).abs()")], "the residual is |p - q|"),
    "no clamp": (2, [(LEFT, "residual = p[n] - q[n]"), (FALLBACK, "pass")], "clamp p - q at 0"),
    "likeliest": (3, [(DRAW, "return n, residual.argmax(-1)")], "likeliest token of the residual is taken"),
    "p without the draft": (
        3,
        [(LEFT, f"residual = p[n] if {BONUS} else p[n] * (torch.arange(p.shape[1]) != drafted[n])")],
        "p without the rejected draft",
    ),
    "replacement from the next row": (3, [(LEFT, f"residual = p[n] if {BONUS} else p[n + 1]")], "next row of p"),
    "residual with the next q": (3, [(LEFT, "residual = (p[n] - q[(n + 1).clamp(max=len(drafted) - 1)]).clamp(min=0)")],
                                   "the residual uses the draft's next row"),
    "bonus from q": (3, [(LEFT, LEFT + f"\n    residual = q[n - 1] if {BONUS} else residual")], "is drawn from q"),
    "bonus from the last draft's row": (
        3, [(LEFT, LEFT + f"\n    residual = p[n - 1] if {BONUS} else residual")], "p's row of the last draft"
    ),
    "bonus from p - q": (
        3, [(LEFT, "residual = (p[n] - q[n.clamp(max=len(q) - 2)]).clamp(min=0)")], "the bonus is drawn from p - q"
    ),
    "NaN where p is q": (4, [(FALLBACK, "pass")], "given NaN"),
    "a small number against NaN": (
        4,
        [(FALLBACK, "pass"),
         ("residual / residual.sum()", "residual / (residual.sum() + 1e-9)")],
        "the residual is all 0: draw from p then",
    ),
}  # fmt: skip
ROUNDS3 = {  # the same for blank 4, of which the library has no lines of its own: what is changed in that above
    "p without temperature": ("temperature, top_k", "1.0, top_k", "p is not divided by the temperature"),
    "p without top-k": ("temperature, top_k", "temperature, 0", "p is without top-k"),
    "p without both": ("temperature, top_k", "1.0, 0", "p is neither"),
    "rows one late": ("drafted[:i]", "drafted[: i + 1]", "the rows of p begin one late"),
    "one place": ("text + drafted[:i]", "text", "the rows of p are all for one place"),
    "p of the draft": ("target(", "draft(", "p is what the draft says"),
    "no bonus row": ("gamma + 1", "gamma", "p must be a tensor [gamma + 1, vocab]"),
    "all drafts emitted": ("drafted[:n]", "drafted", "judge kept 0 of the drafts"),
    "no token": (", token]", "]", "judge kept 0 of the drafts"),
}


PLAIN3 = RIGHT3 | {  # as somebody writes them who has not seen the library
    2: "drafted, q = [], []\nfor _ in range(gamma):\n"
    "    q.append(warp(draft(text + drafted), temperature, top_k))\n    drafted.append(draw(q[-1]))\n"
    "return drafted, torch.stack(q)",
    3: "for i, d in enumerate(drafted):\n    chance = uniform()\n    if chance >= p[i, d] / q[i, d]:\n"
    "        left = (p[i] - q[i]).clamp(min=0)\n"
    "        return i, draw(left / left.sum() if left.sum() > 1e-6 else p[i])\nreturn len(drafted), draw(p[-1])",
}
SLIPS3 = {  # what is changed in these: the blank, the code, words of the diagnosis
    "ids that are tensors": (2, "draw(q[-1])", "torch.tensor(draw(q[-1]))", "2 propose: propose must return a list"),
    "text changed": (2, "return", "text += drafted\nreturn", "2 propose: propose changes `text`"),
    "warp called wrongly": (2, "temperature, top_k", "top_k, temperature", "2 propose: labs/lab3.py:"),
    "logits drawn from": (2, "draw(q[-1])", "draw(draft(text))", "warp logits first"),
    "one number for all": (3, "enumerate(drafted):\n    chance = uniform()",
                           "enumerate(drafted):\n    chance = chance if i else uniform()", "one number from uniform()"),
    "the fallen one counted": (3, "return i,", "return i + 1,", "n counts the draft that fell, too"),
    "likeliest bonus": (3, "draw(p[-1])", "p[-1].argmax().item()", "the bonus is the likeliest token"),
    "p changed": (3, "(p[i] - q[i])", "p[i].sub_(q[i])", "judge changes p, q or drafted"),
    "a sum of columns": (3, "left / left.sum()", "left / left.sum(1)", "but got 1). Due"),
    "a token not drawn": (3, "draw(p[-1])", "p[-1]", "judge must return (n, id), two ints"),
    "a round of tensors": (4, "return [*drafted[:n], token]", "return torch.tensor([token])", "each an int"),
    "judge called wrongly": (4, "judge(p, q, drafted)", "judge(drafted, p, q)", "judge takes p, q and the drafts, in"),
}  # fmt: skip


def lab3(tmp_path, module=speculative, blanks=RIGHT3):
    """Lab 3 with the library in its blanks, whose dice are the lab's."""
    module = mutant() if module is speculative else module  # a copy: its dice are replaced
    lab = filled(tmp_path, "lab3", blanks, module)
    lab.Rows = Rows
    module.draw = lambda probs, generator: torch.tensor([lab.draw(row) for row in probs])
    return lab


def test_lab3_passes_the_right_code(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(check3_histogram, "COUNT", 600)
    monkeypatch.setattr(check3_histogram, "TOP_K", 3)  # fewer texts to compute
    assert check3.main(lab3(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert shown.count("ok  ") == len(check3.CHECKS) and "chi-square" in shown and "test_lossless.py" in shown


@pytest.mark.parametrize("name", WRONG3)
def test_lab3_names_the_mistake(name, tmp_path, capsys):
    passed, lines, words = WRONG3[name]
    done, said = finding(check3, lab3(tmp_path, mutant(*lines)), capsys)
    assert words in said and done == passed


@pytest.mark.parametrize("name", SLIPS3)
def test_lab3_names_the_slip(name, tmp_path, capsys):
    blank, right, wrong, words = SLIPS3[name]
    assert PLAIN3[blank].count(right) == 1
    blanks = PLAIN3 | {blank: PLAIN3[blank].replace(right, wrong)}
    assert words in finding(check3, lab3(tmp_path, blanks=blanks), capsys)[1]


def test_lab3_passes_plain_code_up_to_the_histogram(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(check3.CHECKS, "the histogram", (0, check3.exact))
    assert check3.main(lab3(tmp_path, blanks=PLAIN3)) == 0


@pytest.mark.parametrize("name", ROUNDS3)
def test_lab3_names_the_mistake_in_a_round(name, tmp_path, capsys):
    right, wrong, words = ROUNDS3[name]
    assert right in RIGHT3[4]
    blanks = RIGHT3 | {4: RIGHT3[4].replace(right, wrong)}
    done, said = finding(check3, lab3(tmp_path, blanks=blanks), capsys)
    assert words in said and done == 5


def test_lab3_finds_the_rules_of_test_lossless(tmp_path, capsys):
    for name, words in {
        "softmax residual": "softmax over the residual",
        "resample from p": "resample from p",
        "q without top-k": "q is not what the draft was drawn from: q without top-k",
        "improbable token dropped": "its own probability is low",
    }.items():
        assert words in finding(check3, lab3(tmp_path, broken(name)), capsys)[1]


def test_lab3_sees_no_other_dice(tmp_path, capsys):
    blanks = RIGHT3 | {3: "return int(torch.rand(1) < 0.5), 0"}
    assert "must come from uniform() and draw()" in finding(check3, lab3(tmp_path, blanks=blanks), capsys)[1]


def test_lab3_names_a_row_too_far(tmp_path, capsys):
    blanks = RIGHT3 | {3: "kept = uniform() < p[len(q) - 1, drafted[-1]] / q[len(q), drafted[-1]]"}
    assert "not from the draft's next row" in finding(check3, lab3(tmp_path, blanks=blanks), capsys)[1]


def test_lab3_one_blank_after_the_other(tmp_path, capsys):
    for blanks, passed in enumerate((0, 1, 2, 5)):
        some = {i: RIGHT3[i] for i in range(1, blanks + 1)}
        done, said = finding(check3, lab3(tmp_path, blanks=some), capsys)
        assert done == passed and f"blank {blanks + 1} is still empty" in said
    half = RIGHT3 | {3: RIGHT3[3].replace("token.item()", "None")}
    assert "Now the token behind them" in finding(check3, lab3(tmp_path, blanks=half), capsys)[1]


def test_the_histogram_is_refused_if_it_is_another(tmp_path, monkeypatch):
    """The rule is right when the checks look, and resamples from p when the histogram is drawn."""
    monkeypatch.setattr(check3_histogram, "COUNT", 1500)
    monkeypatch.setattr(check3_histogram, "TOP_K", 3)
    with pytest.raises(check3.Finding, match="the histogram is not the target's"):
        check3_histogram.compare(lab3(tmp_path, broken("resample from p")))


def test_pearson():
    """By hand: (60 - 50)^2 / 50 + (40 - 50)^2 / 50 = 4 with 1 degree of freedom, whose chance is 0.0455."""
    chi2, freedom, chance = check3_histogram.chi_square({"a": 60, "b": 40}, {"a": 50.0, "b": 50.0})
    assert (chi2, freedom) == (4.0, 1) and chance == pytest.approx(0.0455, abs=1e-4)
    assert check3_histogram.chi_square({"c": 1}, {"a": 50.0, "b": 50.0})[2] == 0.0  # a text that cannot be
    assert check3_histogram.variation({"a": 60, "b": 40}, {"a": 50.0, "b": 50.0}) == pytest.approx(0.1)
