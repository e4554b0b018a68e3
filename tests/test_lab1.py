"""Lab 1's checker: the solution passes, the skeleton gets a line that helps, and each mistake its own diagnosis."""

import statistics
import types
from pathlib import Path

import pytest

import folders
from labs import lab1
from measure import verify

CALL = "model(torch.zeros(n, dtype=torch.long), cache, last=n)"
CONTEXT = "    model(torch.zeros(context, dtype=torch.long), cache, last=0)\n"
TURNS = 'for turn in tqdm(range(repeat + 1), "timing passes", disable=None, leave=False):'
EACH = "for n in range(1, MOST + 1):"
WRONG = {  # what the diagnosis must say -> the lines of measure/verify.py: right, wrong
    "No warm-up": [("range(repeat + 1)", "range(repeat)"), ("if turn:", "if True:")],
    "not rolled back": [("cache.rollback(context)", "pass")],
    "not rolled back: a pass": [("cache.rollback(context)", "pass"), ("new_cache(context + MOST)", "new_cache(10**5)")],
    "behind 0 tokens, not behind 128": [("cache.rollback(context)", "cache.rollback(0)")],
    "context is missing": [(CONTEXT, ""), ("cache.rollback(context)", "cache.rollback(0)")],
    "is in the time": [(CONTEXT, ""), (CALL, CONTEXT.strip() + "; " + CALL), ("rollback(context)", "rollback(0)")],
    "generating, not verifying": [(CALL, "[model(torch.zeros(1, dtype=torch.long), cache, last=1) for _ in range(n)]")],
    "A single one can be anything": [("if turn:", "if turn == 1:")],
    "still at work": [("now(model.device)", "time.perf_counter()"), ("import statistics", "import time, statistics")],
    "in a row": [(TURNS, "for n in range(1, MOST + 1):"),
                 (f"        {EACH}\n            start", "        for turn in range(repeat + 1):\n            start")],
    "rows of logits": [("last=n)", "last=1)")],
    "No pass lies between": [(CALL, f"end = now(model.device); {CALL}"), ("append(now(model.device)", "append(end")],
    "Several passes": [("            start = now(model.device)\n", ""),
                       (f"        {EACH}", f"        start = now(model.device)\n        {EACH}")],
    "milliseconds": [("now(model.device) - start)", "1000 * (now(model.device) - start))")],
    "not the difference": [("now(model.device) - start)", "(now(model.device) - start) / n + 1)")],
    "31 lists": [("    return seconds\n", "    return seconds[1:]\n")],
    "returns NoneType": [("    return seconds\n", "    pass\n")],
    "is for 2": [("    return seconds\n", "    return seconds[1:] + seconds[:1]\n")],
    "measure() stops in line 25: ValueError": [("new_cache(context + MOST)", "new_cache(context - 1)")],
}  # fmt: skip


def changed(*lines):
    """The function `measure` of measure/verify.py, with lines of it changed."""
    source, module = Path(verify.__file__).read_text(encoding="utf-8"), types.ModuleType("changed")
    for right, wrong in lines:
        assert right in source, f"verify.py has not, as this test believes: {right}"
        source = source.replace(right, wrong)
    exec(compile(source, "changed verify.py", "exec"), vars(module))
    return module.measure


def v(seconds):
    return [statistics.median(times) / statistics.median(seconds[0]) for times in seconds]


def test_the_solution_passes():
    assert lab1.check_measure(verify.measure) == []
    assert lab1.check_measure(changed()) == []
    assert lab1.check_cost(v) == []


@pytest.mark.parametrize("said", WRONG)
def test_a_mistake_gets_its_own_diagnosis(said):
    found = lab1.check_measure(changed(*WRONG[said]))
    assert len(found) == 1 and said in found[0], found


def test_two_mistakes_are_two_lines():
    found = lab1.check_measure(changed(*WRONG["still at work"], *WRONG["No warm-up"]))
    assert len(found) == 2 and "still at work" in found[0] and "No warm-up" in found[1]


def test_a_clock_that_waits_by_hand_is_right():
    by_hand = "(torch.accelerator.synchronize(), time.perf_counter())[1]"
    lines = ("now(model.device)", by_hand), ("import statistics", "import time, statistics")
    assert lab1.check_measure(changed(*lines)) == []


@pytest.mark.parametrize("said, function", [
    ("upside down", lambda seconds: [1 / ratio for ratio in v(seconds)]),
    ("v(1) must be 1", lambda seconds: [statistics.median(times) for times in seconds]),
    ("do not divide by n", lambda seconds: [ratio / n for n, ratio in enumerate(v(seconds), 1)]),
    ("a mean", lambda seconds: [sum(times) / sum(seconds[0]) for times in seconds]),
    ("first measurement alone", lambda seconds: [times[0] / seconds[0][0] for times in seconds]),
    ("last measurement alone", lambda seconds: [times[-1] / seconds[0][-1] for times in seconds]),
    ("should return 32 numbers", lambda seconds: v(seconds)[:8]),
    ("should return 32 numbers", lambda seconds: None),
    ("should return 32 numbers", lambda seconds: [max(times) / max(seconds[0]) for times in seconds]),
    ("stops: ZeroDivisionError", lambda seconds: 1 / 0),
])  # fmt: skip
def test_a_wrong_ratio(said, function):
    (line,) = lab1.check_cost(function)
    assert said in line


def test_the_ratio_of_each_turn_is_right_too():
    turns = lambda times, one: statistics.median(a / b for a, b in zip(times, one, strict=True))  # noqa: E731
    assert lab1.check_cost(lambda seconds: [turns(times, seconds[0]) for times in seconds]) == []


def test_the_skeleton(capsys):
    assert lab1.main([]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert "still empty" in first and "step 1" in first and "still empty" in second


def test_the_whole_program(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lab1, "measure", verify.measure)
    monkeypatch.setattr(lab1, "verify_cost", v)
    assert lab1.main(["--target", folders.write(tmp_path / "m"), "--device", "cpu"]) is None
    shown = capsys.readouterr().out
    assert "are right" in shown and "Verifying 8 tokens costs" in shown and len(shown.splitlines()) == 11
    assert lab1.main(["--target", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert "no such folder" in said and said.count("\n") == 1
