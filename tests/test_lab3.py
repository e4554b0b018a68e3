"""Lab 3: each broken rule is found, and the histogram raises no false alarm and misses nothing."""

import json
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest
import torch

import broken
import lab3
import long_run
import speculative
from dice import law
from model import Qwen2
from toys import Toy, exact_only

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", broken.RULES)
def test_a_broken_rule_is_found_by_the_check_that_is_meant_for_it(name, monkeypatch):
    found = broken.findings(broken.broken(name), monkeypatch)[broken.RULES[name][1]]
    assert found and "Error" not in found  # the rule runs, and is wrong


def test_the_right_rules_pass(monkeypatch):
    assert not any(broken.findings(speculative, monkeypatch).values())
    assert {check for _, check, _ in broken.RULES.values()} == broken.CHECKS.keys()  # each is needed by a rule


ROWS = [[1.0, 0.5, 0.2, -0.3, -0.8, -1.5, 0.4, -0.6], [0.1, 0.9, -0.4, 0.7, -0.2, 0.3, -1.0, -2.0]]
LAW = law(Toy(lambda seen: ROWS[seen[-1] % 2]), [1], 3)  # three tokens that depend on each other
BINS = list(range(6))


def simulated(weights, runs, seed=0):
    """Counters as `sample` gives them, each of 20,000 texts."""
    g = torch.Generator().manual_seed(seed)
    p, texts = torch.tensor(list(weights.values()), dtype=torch.double), list(weights)
    for _ in range(runs):
        drawn = torch.multinomial(p, 20000, replacement=True, generator=g).bincount(minlength=len(texts)).tolist()
        yield Counter(dict(zip(texts, drawn, strict=True)))


def test_the_chance_is_one():
    """p-values are evenly spread if nothing is wrong, so that one below 1e-6 comes once in a million runs."""
    chances = torch.tensor([lab3.chi_square(found, LAW, BINS)[2] for found in simulated(LAW, 400)])
    for p in (0.05, 0.2, 0.5, 0.8):
        assert abs((chances < p).double().mean() - p) < 4 * (p * (1 - p) / 400) ** 0.5
    assert chances.min() > lab3.LIMIT


@pytest.mark.parametrize("more, less", [(0, 1), (5, 0), (3, 6)])
def test_a_total_variation_of_a_fiftieth_is_seen(more, less):
    """2 % of the tokens are `more` where they should be `less`: all of 100 runs are refused."""
    biased, place = Counter(), 0
    share = sum(p * text.count(less) for text, p in LAW.items()) / 3
    for text, p in LAW.items():
        change = p * 0.02 / share
        biased[text] += p
        for place in range(3):
            if text[place] == less:
                biased[text] -= change
                biased[(*text[:place], more, *text[place + 1 :])] += change
    was, now = (lab3.histogram(weights, [*range(7)]) / 3 for weights in (LAW, biased))
    assert abs((was - now).abs().sum() / 2 - 0.02) < 1e-9
    assert all(lab3.chi_square(found, LAW, BINS)[2] < lab3.LIMIT for found in simulated(biased, 100))


def run(*options):
    command = [sys.executable, str(ROOT / "test_lossless.py"), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_the_script():
    done = run("--count", "800")
    assert done.returncode == 0 and "The speculative histogram is the target's." in done.stdout, done.stderr
    done = run("--count", "800", "--broken", "softmax residual")
    assert done.returncode == 1 and "is NOT the target's" in done.stdout
    assert "+ return n, draw(residual.softmax(-1), generator)" in done.stdout
    done = run("--broken", "nothing")
    assert done.returncode == 2 and "invalid choice" in done.stderr and "Traceback" not in done.stderr


@exact_only
def test_the_long_run_goes_on_where_it_stopped(tmp_path):
    file = tmp_path / "long"
    done = run("--long", str(file), "--tokens", "300")
    assert done.returncode == 0 and "3 texts, 384 tokens.\n0 texts differ" in done.stdout, done.stderr
    lines = file.read_text().splitlines()
    lines[0] = json.dumps(json.loads(lines[0]) | {"same": False, "same bits": False})
    file.write_text("\n".join(lines) + '\n{"what": ["cut off')
    done = run("--long", str(file), "--tokens", "500")  # one more, and what was noted is believed
    assert done.returncode == 1 and "4 texts, 512 tokens.\n1 texts differ" in done.stdout, done.stderr
    assert len(file.read_text().splitlines()) == 4
    file.write_text("[1]\n")
    done = run("--long", str(file))
    assert done.returncode == 2 and "is not the file of a long run" in done.stderr and file.read_text() == "[1]\n"


@exact_only
def test_the_long_run_sees_a_single_bit(tmp_path, monkeypatch):
    forward = Qwen2.__call__

    def call(self, ids, cache, last):
        logits = forward(self, ids, cache, last)
        if last == 2:  # a pass that verifies one draft
            logits[0, 7] = torch.nextafter(logits[0, 7], torch.tensor(torch.inf))
        return logits

    monkeypatch.setattr(Qwen2, "__call__", call)
    assert not long_run.main(Namespace(long=str(tmp_path / "long"), tokens=100, target="tiny", draft=None))
    (line,) = map(json.loads, (tmp_path / "long").read_text().splitlines())
    assert line["same"] and not line["same bits"]
