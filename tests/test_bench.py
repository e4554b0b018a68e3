"""bench.py: what it counts, what it times, and what it prints, on models of a few hundred kilobytes."""

import json
from types import SimpleNamespace

import pytest
import torch

import bench
import folders
from speculative import Round
from toys import Toy, one_hot


@pytest.fixture
def pair(tmp_path):
    target, draft = folders.write(tmp_path / "target"), folders.write(tmp_path / "draft", seed=1)
    return ["--target", target, "--draft", draft, "--device", "cpu"]


def options(**given):
    default = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0}
    return SimpleNamespace(**default | given)


def test_the_table_and_its_json(pair, tmp_path, capsys):
    file = tmp_path / "out.json"
    arguments = ["--domain", "code", "--max-new-tokens", "20", "--gamma", "3", "--repeat", "2", "--json", str(file)]
    bench.main([*pair, *arguments])
    shown = capsys.readouterr().out
    plain, speculative = json.loads(file.read_text())["rows"]
    for word in ("code", "plain", "speculative", "same text", "3 of 3", "tok/s"):
        assert word in shown
    assert plain["speedup"] == 1.0 and plain["tokens_per_round"] == 1.0 and plain["drafted"] == 0
    assert plain["identical"] is True
    assert speculative["gamma"] == 3 and speculative["identical"] is True
    assert speculative["acceptance_rate"] == speculative["accepted"] / speculative["drafted"]
    assert set(speculative) >= {"tokens_per_second", "predicted_speedup", "cost_ratio", "tokens_per_round", "rounds"}
    assert not list(tmp_path.glob("*.part"))


def test_sampled_texts_are_not_compared(pair, tmp_path, capsys):
    file = tmp_path / "out.json"
    arguments = ["--domain", "factual", "--max-new-tokens", "8", "--repeat", "1", "--json", str(file)]
    bench.main([*pair, *arguments, "--temperature", "1"])
    assert [row["identical"] for row in json.loads(file.read_text())["rows"]] == [None, None]


def test_watch(pair, capsys):
    bench.main(["watch", "Hello", *pair, "--max-new-tokens", "12"])
    shown = capsys.readouterr().out
    assert "\033[" not in shown  # not a terminal, so no colour
    assert "tokens a round" in shown and "plain decoding" in shown


def test_the_pair_as_its_own_draft_keeps_everything(tmp_path, capsys):  # B11, through the front door
    folder, file = folders.write(tmp_path / "m"), tmp_path / "out.json"
    arguments = ["--domain", "code", "--max-new-tokens", "20", "--repeat", "1", "--json", str(file)]
    bench.main(["--target", folder, "--draft", folder, "--device", "cpu", *arguments])
    assert json.loads(file.read_text())["rows"][1]["acceptance_rate"] == 1.0


@pytest.mark.parametrize("gamma, c, a, expected", [(4, 0.3, 0.5, 0.88), (4, 0.1, 0.8, 2.40)])
def test_prediction(gamma, c, a, expected):  # B63
    rounds, per_round = 10000, (1 - a ** (gamma + 1)) / (1 - a)
    run = bench.Run([], 1.0, round(rounds * per_round), rounds, rounds * gamma, 0, 0)
    row = bench.summary("code", "speculative", gamma, [[run]], [[run]], c, 1.0)
    assert row["predicted_speedup"] == pytest.approx(expected, abs=0.005)


def test_what_is_counted(monkeypatch):  # B68: rounds (4, 4), (4, 0), (2, 1) behind a first one that is not counted
    rounds = [Round([1], 4, 0), Round([1] * 5, 4, 4), Round([1], 4, 0), Round([1] * 2, 2, 1)]
    monkeypatch.setattr(bench, "speculative_decode", lambda *_, **__: iter(rounds))
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=8, eos=[]), device=torch.device("cpu"))
    run = bench.decode((model, model), [1], 4, options(), 99)
    assert (run.tokens, run.rounds, run.drafted, run.accepted, run.rejected) == (8, 3, 10, 5, 2) and len(run.ids) == 9
    row = bench.summary("code", "speculative", 4, [[run]], [[run]], 0.1, 1.0)
    assert row["acceptance_rate"] == 0.5 and row["tokens_per_round"] == pytest.approx(8 / 3)
    a = 5 / 7  # 7 drafts were judged
    assert row["tokens_per_round_theory"] == pytest.approx((1 - a**5) / (1 - a))


def test_what_is_timed(monkeypatch):  # B65: a clock that moves with the work. Prefill is slow and must not count
    clock = [0.0]

    class Slow(Toy):
        config, device = SimpleNamespace(vocab_size=8, eos=[]), torch.device("cpu")

        def __call__(self, ids, cache, last):
            clock[0] += 100.0 if len(ids) > 5 else 1.0
            return super().__call__(ids, cache, last)

    monkeypatch.setattr(bench, "now", lambda device: clock[0])
    model = Slow(lambda seen: one_hot((seen[-1] + 1) % 8, 8))
    plain = bench.decode((model, model), [3] * 50, 0, options(), 11)
    assert (plain.tokens, plain.seconds) == (10, 10.0)
    both = bench.decode((model, model), [3] * 50, 4, options(), 15)
    assert (both.tokens, both.rounds, both.seconds) == (10, 2, 10.0)  # two rounds of 4 draft steps and 1 pass


def test_a_draft_with_a_shorter_context(tmp_path, capsys):
    target = folders.write(tmp_path / "target", max_position_embeddings=512)
    draft = folders.write(tmp_path / "draft", max_position_embeddings=64)
    bench.main(["--target", target, "--draft", draft, "--device", "cpu", "--domain", "code", "--repeat", "1"])
    assert "3 of 3" in capsys.readouterr().out


def test_the_targets_end_of_text_counts():  # B37: and the draft's does not
    def model(*eos):
        result = Toy(lambda seen: one_hot((seen[-1] + 1) % 8, 8))
        result.config, result.device = SimpleNamespace(vocab_size=8, eos=list(eos)), torch.device("cpu")
        return result

    assert bench.decode((model(7), model(5)), [3], 2, options(), 20).ids == [4, 5, 6, 7]
    assert len(bench.decode((model(), model(5)), [3], 2, options(), 20).ids) == 20


def test_the_first_difference():
    model = Toy(lambda seen: [0.0, 1.0, 1.5, 0.0])
    assert bench.first_difference(model, [0], [2, 2, 2], [2, 2, 2]) is None
    assert bench.first_difference(model, [0], [2, 2, 2], [2, 1, 2]) == (1, 0.5)
    assert bench.first_difference(model, [0], [2, 2], [2, 2, 2])[0] == 2
