"""The checkers of Lab 2 and 3: they pass the library's own code, and name the mistake in code that has one."""

import importlib.util
import itertools
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import speculative
from broken import broken

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "labs"))
import check2  # noqa: E402


def filled(tmp_path, name, blanks, module=speculative):
    """labs/NAME.py with its blanks filled, as a module. The code in them may say `module`."""
    source = (ROOT / "labs" / f"{name}.py").read_text(encoding="utf-8")
    for number, code in blanks.items():
        found = re.search(rf"( *)# >>> your code, blank {number}\b.*\n((?:.*\n)*?) *# <<<\n", source)
        lines = "".join(found[1] + line + "\n" for line in code.splitlines())
        source = source[: found.start(2)] + lines + source[found.end(2) :]
    file = tmp_path / f"{name}.py"
    file.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    lab = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lab)
    lab.module = module
    return lab


def mutant(*lines):
    """speculative.py with lines changed: [(right, wrong)]"""
    source, module = Path(speculative.__file__).read_text(encoding="utf-8"), types.ModuleType("mutant")
    for right, wrong in lines:
        assert source.count(right) == 1, right
        source = source.replace(right, wrong)
    exec(compile(source, "mutant", "exec"), vars(module))
    return module


def finding(checker, lab, capsys):
    """The number of checks passed, and the line about the one that did not. No traceback, and one finding."""
    assert checker.main(lab) == 1
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if line.startswith("not yet")]
    assert len(lines) == 1 and "Traceback" not in shown
    return shown.count("ok  "), lines[0]


@pytest.mark.parametrize("lab", ["lab2", "lab3"])
def test_the_untouched_skeleton_says_where_to_begin(lab):
    done = subprocess.run([sys.executable, f"labs/{lab}.py"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"blank 1 is still empty (labs/{lab}.py:" in done.stdout, done.stderr
    assert "Begin here" in done.stdout and not done.stderr


# ---- Lab 2

RIGHT2 = {  # what the library does, in the places of the blanks
    1: "self.inner = getattr(self, 'inner', None) or module.DraftModel(self.model, self.cache.max_length)\n"
    "return torch.as_tensor(self.inner.propose(tokens, gamma)[0]).tolist()",
    2: "room = min(gamma, limit - len(tokens) - 1)",
    3: "rows = target(torch.tensor(tokens[-1:] + drafted), cache, last=len(drafted) + 1)",
    4: "kept, token = module.greedy(rows, torch.tensor(drafted, dtype=torch.long))\n"
    "kept = kept.item()\nnew = drafted[:kept] + token.tolist()",
    5: "end = next((i for i, id in enumerate(new) if id in eos), None)\n"
    "if end is not None:\n    ended, new = True, new[: end + 1]\nkept = min(kept, len(new))",
    6: "cache.rollback(len(tokens) - 1)",
}
COMPARE = "choice, kept = rows.argmax(-1).tolist(), 0\n"
LOOP = COMPARE + (
    "while kept < len(drafted) and drafted[kept] == choice[kept]:\n    kept += 1\nnew = drafted[:kept] + [choice[kept]]"
)
GUESS = (  # of blank 1: what is fed first, and how it goes on
    "fed, drafted = {fed}, []\n"
    "for _ in range(gamma):\n"
    "    logits = self.model(torch.tensor(fed), self.cache, last={last})\n"
    "    drafted.append(logits[{row}].argmax().item())\n"
    "    fed = {next}\n"
    "return drafted"
)
BACK = "self.cache.rollback(min(self.cache.length, len(tokens) - 1))\n"
LACKS = "tokens[self.cache.length :]"


def guess(fed=LACKS, last="1", row="-1", next="drafted[-1:]", back=BACK):
    return back + GUESS.format(fed=fed, last=last, row=row, next=next)


WRONG2 = {  # what is wrong: the blank, the code, words of the diagnosis
    "no rollback in the draft": (1, guess(back=""), "rows of rejected drafts are still in the draft's cache"),
    "draft rolled back one row too few": (
        1,
        guess(back=BACK.replace(" - 1)", ")")),
        "roll it back to len(tokens) - 1 at most",
    ),
    "draft fed the newest alone, no rollback": (
        1,
        guess("tokens[-1:] if self.cache.length else tokens", back=""),
        "rows of rejected drafts are still in the draft's cache",
    ),
    "draft cache one short": (
        1,
        guess("tokens[-1 if self.cache.length else 0 :]"),
        "the draft's cache is one token short after a full acceptance",
    ),
    "draft never reads the prompt": (1, guess("tokens[-1:]"), "the draft has only [2] of the text in sight"),
    "draft not fed its guesses": (1, guess(next="tokens[-1:]"), "not fed its own guesses"),
    "draft's first row": (1, guess(last="len(fed)", row="0"), "not from the last of the 2 rows"),
    "draft reads all again": (1, guess(back="self.cache.rollback(0)\n"), "reads all of the text again"),
    "draft one guess short": (1, guess().replace("range(gamma)", "range(gamma - 1)"), "asked for 3 drafts"),
    "room too large": (2, "room = min(gamma, limit - len(tokens))", "more than max_new_tokens"),
    "room without limit": (2, "room = gamma", "more than max_new_tokens"),
    "room too small": (2, "room = min(gamma, limit - len(tokens) - 1) - 1", "fewer drafts than there is room for"),
    "room of the first round": (2, "room = min(gamma, max_new_tokens - 1)", "more than max_new_tokens"),
    "drafts fed alone": (
        3,
        "rows = target(torch.tensor(drafted), cache, last=len(drafted))",
        "the first draft goes unchecked",
    ),
    "once per token": (
        3,
        "rows = torch.cat([target(torch.tensor([id]), cache, last=1) for id in tokens[-1:] + drafted])",
        "called 4 times in a round",
    ),
    "no bonus row": (3, RIGHT2[3].replace("last=len(drafted) + 1", "last=max(len(drafted), 1)"), "the bonus token"),
    "all the text fed": (3, RIGHT2[3].replace("tokens[-1:]", "tokens"), "the text is fed again"),
    "slice one row late": (4, "rows = rows[1:]\n" + LOOP, "your slice begins one row late: row i judges"),
    "slice one row early": (4, "rows = rows[:-1]\n" + LOOP, "slice ends one row early"),
    "never keeps": (4, "kept, new = 0, [rows[0].argmax().item()]", "right text, but 0 % accepted"),
    "judged by the next row": (4, LOOP.replace("== choice[kept]", "== choice[kept + 1]"), "but 0 % accepted"),
    "no bonus": (4, RIGHT2[4] + "\nnew = new if kept < len(drafted) or not drafted else drafted", "no bonus token"),
    "bonus compared": (4, LOOP.replace("kept < len(drafted) and ", ""), "compares the bonus row with a draft"),
    "bonus counted": (4, RIGHT2[4] + "\nkept += kept == len(drafted)", "counts the bonus as a draft"),
    "target's token counted": (4, RIGHT2[4] + "\nkept = len(new)", "you yield 3 as that"),
    "matches, not a prefix": (
        4,
        COMPARE + "kept = sum(a == b for a, b in zip(drafted, choice))\nnew = drafted[:kept] + [choice[kept]]",
        "count only up to the first that differs",
    ),
    "first draft unchecked": (4, LOOP.replace(", 0\n", ", min(1, len(drafted))\n"), "first draft is kept unchecked"),
    "all drafts kept": (4, COMPARE + "kept, new = len(drafted), drafted + choice[-1:]", "all drafts are kept"),
    "all choices": (4, RIGHT2[4] + "\nnew = rows.argmax(-1).tolist()", "all of the target's choices are emitted"),
    "correction from the row before": (
        4,
        RIGHT2[4] + "\nnew[-1] = rows[kept - 1].argmax().item()",
        "is from the row before: n drafts kept, so it is row n",
    ),
    "correction from the last row": (4, RIGHT2[4] + "\nnew[-1] = rows[-1].argmax().item()", "you always take the"),
    "rejected draft emitted": (4, RIGHT2[4] + "\nnew = [*drafted, new[-1]][: kept + 1]", "the rejected draft itself"),
    "no correction": (4, RIGHT2[4] + "\nnew = new if kept == len(drafted) else drafted[:kept]", "no token from the"),
    "never a token of the target": (4, LOOP.replace(" + [choice[kept]]", ""), "from the target: behind n kept"),
    "no EOS": (5, "", "blank 5 is still empty"),
    "EOS looked for in the last token": (5, "ended = new[-1] in eos", "accepted tokens after EOS"),
    "EOS cut off": (5, RIGHT2[5].replace("end + 1", "end"), "the EOS is missing"),
    "EOS does not end": (5, RIGHT2[5].replace("ended, new = True, ", "new = "), "the loop goes on after it"),
    "drafts behind EOS kept": (5, RIGHT2[5].replace("kept = min(kept, len(new))", ""), "do not count as kept"),
    "EOS not counted": (5, RIGHT2[5] + "\nkept = len(new) - 1 if ended else kept", "the EOS is itself a draft"),
    "the target's EOS counted": (5, RIGHT2[5] + "\nkept = len(new) if ended else kept", "EOS is the target's own"),
    "eos is a collection": (5, "ended = eos in new", "ask of each new token if it is in eos"),
    "an error in blank 5": (5, "end = new.index(eos[0])", "5 stop: labs/lab2.py:"),
    "no rollback": (6, "pass", "the rejected drafts' rows are still in the target's cache"),
    "rollback forgotten": (6, "", "blank 6 is still empty"),
    "rollback one too few": (6, "cache.rollback(len(tokens) - 2)", "1 too few rows in the target's cache"),
    "rollback one too many": (6, "cache.rollback(min(len(tokens), cache.length))", "a row too many in the target"),
    "rollback to all of the text": (6, "cache.rollback(len(tokens))", "6 roll back: labs/lab2.py:"),
    "a typo in blank 6": (6, "cache.rollback(len(tokns) - 1)", "6 roll back: labs/lab2.py:"),
    "kept drafts rolled back": (6, "cache.rollback(cache.length - len(drafted))", "the kept drafts are gone, too"),
    "cache thrown away": (6, "cache.rollback(0)", "whole cache is thrown away"),
    "an error of Python": (4, "kept = drafted.index(99)", "labs/lab2.py:"),
    "a loop": (3, "while 1:\n    target(torch.tensor([3]), cache, last=1)\n    cache.rollback(0)", "called 300 times"),
}  # fmt: skip


def test_lab2_passes_the_right_code(tmp_path, capsys):
    assert check2.main(filled(tmp_path, "lab2", RIGHT2)) == 0
    shown = capsys.readouterr().out
    assert shown.count("ok  ") == len(check2.CHECKS) and "tokens per round" in shown and "speculative.py" in shown


@pytest.mark.parametrize("name", WRONG2)
def test_lab2_names_the_mistake(name, tmp_path, capsys):
    blank, code, words = WRONG2[name]
    passed, said = finding(check2, filled(tmp_path, "lab2", RIGHT2 | {blank: code}), capsys)
    # Code that stops is found as soon as it runs, and that is when blank 4 is looked at.
    stops = said.startswith(f"not yet  {blank} ") and "Error" in said
    assert words in said and (passed == blank - 1 or stops or name == "room of the first round")


def test_lab2_feeding_the_last_guess_is_right_and_costs_a_pass(tmp_path, capsys):
    more = "self.model(torch.tensor(drafted[-1:]), self.cache, last=0)\nreturn drafted"
    for code, remark in ((guess(), False), (guess().replace("return drafted", more), True)):
        assert check2.main(filled(tmp_path, "lab2", RIGHT2 | {1: code})) == 0
        assert ("you also feed the last guess" in capsys.readouterr().out) == remark


def test_lab2_the_page_knows_how_many_mistakes_there_are():
    assert f" {len(WRONG2)} mistakes" in (ROOT / "labs" / "lab2.md").read_text(encoding="utf-8")


def library(module, tmp_path):
    """Lab 2 with speculative.py itself in it, loop and all."""
    lab = filled(tmp_path, "lab2", RIGHT2, module)

    def decode(target, draft, prompt, count, gamma=4, eos=()):
        drafter = types.SimpleNamespace(propose=lambda tokens, k: (draft.propose(tokens, k), None))
        for round in module.speculative_decode(target, drafter, prompt, count, gamma, eos=eos):
            yield round.tokens, round.drafted, round.accepted

    lab.speculative = decode
    return lab


def test_lab2_passes_the_library_and_finds_its_mutants(tmp_path, capsys):
    assert check2.main(library(speculative, tmp_path)) == 0
    capsys.readouterr()
    for name, words in {
        "no bonus": "no bonus token",
        "slice off by one": "your slice begins one row late",
        "no rollback": "the rejected drafts' rows are still in the target's cache",
        "draft cache one short": "the draft's cache is one token short",
    }.items():
        assert words in finding(check2, library(broken(name), tmp_path), capsys)[1]


def test_lab2_no_two_mistakes_look_alike():
    looks = [[check2.emitted(rule, case) for case in check2.CASES] for _, rule in check2.MISTAKES]
    right = [check2.emitted(lambda d, c, n: d[:n] + [c[n]], case) for case in check2.CASES]
    assert all(a != b for a, b in itertools.combinations([*looks, right], 2))


def test_lab2_looks_at_what_only_whole_texts_show(tmp_path, capsys):
    """Code that is right in all rounds so far, and then is not: on the small pair, and on tiny/ alone."""
    lab = filled(tmp_path, "lab2", RIGHT2)
    speculative, propose = lab.speculative, lab.Draft.propose

    def late(target, draft, prompt, *args):
        text = 0
        for new, drafted, kept in speculative(target, draft, prompt, *args):
            text += len(new)
            yield [*new[:-1], new[-1] + (text > 40)], drafted, kept

    lab.speculative = late
    passed, said = finding(check2, lab, capsys)
    assert passed == 7 and "the text is not that of plain decoding behind" in said
    lab.speculative = speculative
    lab.Draft.propose = lambda self, tokens, gamma: [id ^ (len(tokens) > 17) for id in propose(self, tokens, gamma)]
    passed, said = finding(check2, lab, capsys)
    assert passed == 6 and "right text, but" in said and "of drafts that are the target's own" in said


def test_lab2_one_blank_after_the_other(tmp_path, capsys):
    for blanks in range(6):
        passed, said = finding(check2, filled(tmp_path, "lab2", {i: RIGHT2[i] for i in range(1, blanks + 1)}), capsys)
        assert passed == blanks and f"blank {blanks + 1} is still empty" in said
