"""bench.py: what it counts, what it times, what it foresees, and what it prints, on models of a few kilobytes."""

import importlib
import itertools
import json
import re
from types import SimpleNamespace

import pytest
import torch

import bench
import folders
from measure import costs, showdown, table
from measure.costs import Costs
from measure.showdown import Mode
from speculative import DraftModel, Round, speculative_decode
from toys import Toy, one_hot


@pytest.fixture
def pair(tmp_path):
    target, draft = folders.write(tmp_path / "target"), folders.write(tmp_path / "draft", seed=1)
    return ["--target", target, "--draft", draft, "--device", "cpu"]


def options(**given):
    default = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0}
    return SimpleNamespace(**default | given)


def counting(*eos):
    """A model that counts to 7 and begins anew."""
    model = Toy(lambda seen: one_hot((seen[-1] + 1) % 8, 8))
    model.config = SimpleNamespace(vocab_size=8, eos=list(eos), max_position_embeddings=1000)
    model.device = torch.device("cpu")
    return model


def decode(target, draft, gamma, limit, ids=(3,)):
    mode = Mode("speculative", gamma, lambda ids, sampling: DraftModel(draft, len(ids) + limit, **sampling))
    return showdown.race(target, [mode], list(ids), options(max_new_tokens=limit))[0]


def test_the_table_and_its_json(pair, tmp_path, capsys):
    file = tmp_path / "out.json"
    arguments = ["--domain", "code", "--max-new-tokens", "20", "--repeat", "2", "--json", str(file)]
    bench.main([*pair, *arguments, "--gamma", "3,best,auto,lookup,hybrid"])
    shown, rows = capsys.readouterr().out, json.loads(file.read_text())["rows"]
    assert [row["mode"] for row in rows] == ["plain", "speculative", "speculative", "auto", "lookup", "hybrid"]
    for row in rows:  # a line for each, with what the file has
        (line,) = [line for line in shown.splitlines() if line == table.line(row)]
        assert f"{row['tokens_per_second']:.2f}" in line and f"{row['speedup']:.2f}x" in line
    assert shown.count("6 of 6") == 5 and "Acceptance by position" in shown
    plain, speculative = rows[:2]
    assert plain["speedup"] == plain["tokens_per_round"] == 1.0 and plain["drafted"] == 0
    assert len(plain["predicted_by_gamma"]) == showdown.MOST + 1
    assert plain["predicted_by_gamma"][0] == plain["predicted_speedup"] == pytest.approx(1.0)
    assert all(len(plain["costs"][part]) == showdown.MOST + 1 for part in ("draft", "verify", "other"))
    assert speculative["gamma"] == 3 and all(row["identical"] is True for row in rows)
    assert speculative["acceptance_rate"] == speculative["accepted"] / speculative["drafted"]
    assert sum(speculative["kept"]) == speculative["accepted"] and len(speculative["judged"]) == 3
    assert set(speculative) >= {"tokens_per_second", "cost_ratio", "rounds", "speedup_low", "nothing_accepted"}
    assert all(len(row["by_prompt"]) == 3 for row in rows) and plain["by_prompt"] == [1.0] * 3
    assert f"{'hybrid':<12}" + "".join(f"{ratio:>8.2f}x" for ratio in rows[-1]["by_prompt"]) in shown
    assert all(sum(row["share"].values()) == pytest.approx(1) for row in rows)
    assert not list(tmp_path.glob("*.part"))


def test_sampled_texts_are_not_compared(pair, tmp_path, capsys):
    file = tmp_path / "out.json"
    arguments = ["--domain", "factual", "--max-new-tokens", "16", "--repeat", "1", "--json", str(file)]
    bench.main([*pair, *arguments, "--temperature", "1", "--gamma", "2"])
    assert [row["identical"] for row in json.loads(file.read_text())["rows"]] == [None, None]


def test_the_pair_as_its_own_draft_keeps_everything(tmp_path, capsys):  # B11, through the front door
    folder, file = folders.write(tmp_path / "m"), tmp_path / "out.json"
    arguments = ["--domain", "code", "--max-new-tokens", "20", "--repeat", "1", "--gamma", "4", "--json", str(file)]
    bench.main(["--target", folder, "--draft", folder, "--device", "cpu", *arguments])
    assert json.loads(file.read_text())["rows"][1]["acceptance_rate"] == 1.0


@pytest.mark.parametrize("gamma, c, a, expected", [(4, 0.3, 0.5, 0.88), (4, 0.1, 0.8, 2.40)])
def test_prediction(gamma, c, a, expected):  # B63: texts whose drafts are all kept with the chance a, and v = 1
    known = Costs([k * c for k in range(gamma + 1)], [1.0] * (gamma + 1), [0.0] * (gamma + 1))
    assert costs.predict(known, [[a] * 20000], gamma, 20000) == pytest.approx(expected, abs=0.02)
    assert known.c == pytest.approx(c) and known.v == [1.0] * 5
    slow = Costs(known.draft, known.verify, [1.0] * (gamma + 1))  # bookkeeping as slow as the target
    slower = expected * (1 + gamma * c) * 2 / (2 + gamma * c)
    assert costs.predict(slow, [[a] * 20000], gamma, 20000) == pytest.approx(slower, abs=0.02)


def test_the_rounds_foreseen_are_those_that_come():
    """Greedy: from the plain text and one pass of the draft over it, the rounds of any gamma, one by one."""

    def model(k):  # says 3, which ends a text, behind 36 tokens, and in the first text nobody listens
        result = Toy(lambda seen: one_hot(3 if len(seen) == 36 else (sum(seen) * k + len(seen)) % 5 % 3, 4))
        result.config = SimpleNamespace(vocab_size=4, max_position_embeddings=1000)
        return result

    target, draft = model(1), model(3)
    for eos, length in ((), 60), ((3,), 35):
        text = [id for round in speculative_decode(target, None, [1, 2], 60, 0, eos=eos) for id in round.tokens]
        chances = costs.chances((target, draft), [1, 2], text)
        assert len(text) == len(chances) == length and 0 < sum(chances) < length
        for gamma in range(7):
            come = [*speculative_decode(target, DraftModel(draft, 200), [1, 2], 60, gamma, eos=eos)][1:]
            foreseen = costs.rounds(chances, gamma, 60, costs.random.Random(0))
            assert foreseen == [(round.drafted, len(round.tokens)) for round in come]


def test_chances_end_where_the_draft_cannot_follow():
    target, draft = (Toy(lambda seen: [0.0, 1.0, 0.0, 0.0], context=context) for context in (1000, 20))
    target.config, draft.config = SimpleNamespace(vocab_size=4), SimpleNamespace(vocab_size=3)
    knows = [1.0] * 19 + [0.0] * 21  # what follows 20 tokens it knows
    assert costs.chances((target, draft), [1, 1], [1] * 40) == knows
    assert costs.chances((target, draft), [1, 1], [1, 1, 3, 1, 1]) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert costs.chances((target, draft), [3, 1], [1, 1]) == [0.0, 0.0]


def test_chances_when_sampling():
    """The sum of min(p, q), by hand."""
    p, q = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    pair = [Toy(lambda seen, row=row: torch.tensor(row).log().tolist()) for row in (p, q)]
    for model in pair:
        model.config = SimpleNamespace(vocab_size=3)
    assert costs.chances(pair, [0], [1, 2], temperature=1.0) == pytest.approx([0.6, 0.6])
    assert costs.chances(pair, [0], [1], temperature=1.0, top_k=1) == [0.0]


def row_of(rounds, gamma=4, mode="speculative"):
    """The row that showdown.summary makes of these rounds, of a second together, at 0.1 for a draft step and v = 1."""
    one = SimpleNamespace(seconds=0.5)
    run = SimpleNamespace(rounds=rounds, seconds=1.0, draft=one, verify=one)
    known = Costs([0.1 * k for k in range(gamma + 1)], [1.0] * (gamma + 1), [0.0] * (gamma + 1))
    row = showdown.summary(Mode(mode, gamma, None), [[run]], [[run]], known, [1.0, 1.1, 1.2, 1.3, 1.4])
    return row | {"domain": "code", "same": 1, "texts": 1}


def test_what_is_counted():  # B68: rounds (4, 4), (4, 0), (2, 1)
    row = row_of([Round([1] * 5, 4, 4), Round([1], 4, 0), Round([1] * 2, 2, 1)])
    assert (row["tokens"], row["rounds"], row["drafted"], row["accepted"]) == (8, 3, 10, 5)
    assert row["acceptance_rate"] == 0.5 and row["tokens_per_round"] == pytest.approx(8 / 3)
    assert row["kept"] == [2, 1, 1, 1] and row["judged"] == [3, 2, 1, 1]
    assert row["nothing_accepted"] == pytest.approx(1 / 3)
    a = 5 / 7  # 7 drafts were judged
    assert row["tokens_per_round_theory"] == pytest.approx((1 - a**5) / (1 - a))
    assert row["predicted_speedup"] == 1.4  # what was foreseen of gamma 4
    # Of a mode that drafts as it likes: 3 passes, and its own half second of drafting, where a plain round took 1 / 8.
    row = row_of([Round([1] * 5, 4, 4), Round([1], 4, 0), Round([1] * 2, 2, 1)], mode="auto")
    assert row["predicted_speedup"] == pytest.approx(8 / (3 + 0.5 * 8))


def test_drafts_behind_an_end_of_text_were_not_judged():
    row = row_of([Round([1, 7], 4, 2)])  # two are kept, the second ends the text, and nobody looked at the others
    assert row["kept"] == [1, 1, 0, 0] and row["judged"] == [1, 1, 0, 0]


def test_a_text_that_ends_at_once():
    row = row_of([])
    assert row["tokens_per_second"] == row["speedup"] == 0.0 and row["share"] is None
    assert table.line(row).endswith("1 of 1") and "0.00x" not in table.line(row)
    known = {"code": Costs([0.0] * 5, [1.0] * 5, [0.0] * 5)}
    plain = row | {"mode": "plain", "predicted_by_gamma": [1.0], "reach": 1.0}
    assert not any("loses" in line for line in table.verdict([plain, row], known))


def test_what_is_timed(monkeypatch):  # B65: a clock that moves with the work. Prefill is slow and must not count
    clock = [0.0]

    def slow(model, ids, cache, last, usual=Toy.__call__):
        clock[0] += 100.0 if len(ids) > 5 else 1.0
        return usual(model, ids, cache, last)

    monkeypatch.setattr(Toy, "__call__", slow)
    for module in (showdown, costs):
        monkeypatch.setattr(module, "now", lambda device: clock[0])
    model = counting()
    plain, both = decode(model, model, 0, 11, [3] * 50), decode(model, model, 4, 15, [3] * 50)
    assert (len(plain.rounds), plain.seconds, plain.verify.seconds, plain.draft.seconds) == (10, 10.0, 10.0, 0.0)
    assert (len(both.rounds), both.seconds, both.verify.seconds, both.draft.seconds) == (2, 10.0, 2.0, 8.0)
    known = costs.measure((model, model), [3] * 50, [0, 1, 2, 4], {})
    assert known.draft == [0.0, 1.0, 2.0, 3.0, 4.0]  # that of 3 lies on a line
    assert known.verify == [1.0] * 5 and known.other == [0.0] * 5


def test_costs_leave_out_what_is_slow_for_reasons_of_its_own():
    timing = costs.Timing((counting(),) * 2, [3] * 50, [0, 1, 2, 4], {})
    steps = []
    timing.step = lambda k, step=timing.step: steps.append(k) or step(k)
    for _ in range(100):  # more than fit behind one prompt. All drafts are kept
        timing.turn()
    assert steps == [0, 0, 0, 0, 1, 1, 2, 2, 4] * 100
    timing.seconds = {k: [(0.5 * k, 1.0, 0.0)] * 3 + [(0.0, 99.0, 0.0)] for k in timing.going}
    known = timing.costs()
    assert (known.draft, known.verify) == ([0.0, 0.5, 1.0, 1.5, 2.0], [1.0] * 5)
    timing.seconds = {0: [(0.0, 2.0, 0.0)], 2: [(7.0, 8.0, 9.0)]}
    again = timing.costs(known)  # all takes twice as long by then
    assert (again.draft, again.verify) == ([0.0, 1.0, 7.0, 3.0, 4.0], [2.0, 2.0, 8.0, 2.0, 2.0])


@pytest.mark.parametrize(("seconds", "times"), [(0.0, 1), (1e6, showdown.REPEAT)])
def test_all_is_decoded_as_often_as_there_is_time(pair, seconds, times, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(showdown, "ENOUGH", seconds)
    monkeypatch.setattr(showdown, "plan", lambda *_: None)
    file = tmp_path / "out.json"
    bench.main([*pair, "--domain", "code", "--gamma", "2", "--max-new-tokens", "12", "--json", str(file)])
    document, shown = json.loads(file.read_text()), capsys.readouterr().out
    assert document["pair"]["repeat"] == times and {row["texts"] for row in document["rows"]} == {3 * times}
    assert shown.count("\ncode      speculative") == 1


def test_modes_take_turns_and_write_the_same():
    """And what each writes does not depend on the others."""
    model, order = counting(), []

    def listening(name):
        def drafter(ids, sampling):
            inner = DraftModel(model, 200)
            inner.propose = lambda tokens, gamma, propose=inner.propose: order.append(name) or propose(tokens, gamma)
            return inner

        return Mode(name, 3, drafter)

    runs = showdown.race(model, [listening("a"), listening("b")], [3], options(max_new_tokens=128))
    assert runs[0].ids == runs[1].ids == [(4 + i) % 8 for i in range(128)]
    assert sum(a != b for a, b in itertools.pairwise(order)) >= 6  # and not all of a, then all of b


def test_a_draft_with_a_shorter_context(tmp_path, capsys):
    target = folders.write(tmp_path / "target", max_position_embeddings=512)
    draft = folders.write(tmp_path / "draft", max_position_embeddings=210)
    arguments = ["--domain", "code", "--repeat", "1", "--gamma", "2", "--json", str(tmp_path / "out.json")]
    bench.main(["--target", target, "--draft", draft, "--device", "cpu", *arguments])
    assert capsys.readouterr().out.count("3 of 3") == 1
    row = json.loads((tmp_path / "out.json").read_text())["rows"][1]
    assert 0 < row["drafted"] < 2 * row["rounds"] - 20  # it stops when it cannot follow, and the target goes on


def test_the_targets_end_of_text_counts():  # B37: and the draft's does not
    assert decode(counting(7), counting(5), 2, 20).ids == [4, 5, 6, 7]
    assert len(decode(counting(), counting(5), 2, 20).ids) == 20


def test_the_first_difference():
    model = Toy(lambda seen: [0.0, 1.0, 1.5, 0.0])
    assert showdown.first_difference(model, [0], [2, 2, 2], [2, 2, 2]) is None
    assert showdown.first_difference(model, [0], [2, 2, 2], [2, 1, 2]) == (1, 0.5)
    assert showdown.first_difference(model, [0], [2, 2], [2, 2, 2])[0] == 2


@pytest.mark.parametrize("c, v, kept, word", [(0.9, 1.0, 0.6, "too dear"), (0.1, 3.0, 0.6, "not flat"),
                                              (0.3, 1.0, 0.05, "Too few")])  # fmt: skip
def test_why_it_loses(c, v, kept, word):
    """One number is bad at a time, and the sentence must name that one."""
    known = Costs([0.0, c, 2 * c], [1.0, v, v], [0.1] * 3)
    per_round = 1 + kept + kept * kept
    seconds = (v + 2 * c + 0.1) / 1.1  # in plain rounds, of a pass and a tenth
    row = {"domain": "code", "mode": "speculative", "gamma": 2, "rounds": 100, "tokens": 100 * per_round}
    row |= {"tokens_per_round": per_round, "speedup": per_round / seconds, "acceptance_rate": kept}
    row["share"] = {part: x / 1.1 / seconds for part, x in (("draft", 2 * c), ("verify", v), ("other", 0.1))}
    said = table.why(row, known, 0.8)
    assert [w for w in ("too dear", "not flat", "Too few") if w in said] == [word]
    parts = [float(number) for number in re.findall(r"(\d\.\d\d) (?:for|to verify)", said)]
    assert f"takes the time of {seconds:.2f}" in said and sum(parts) == pytest.approx(seconds, abs=0.02)
    assert "launch" not in said
    assert ("20 %" in table.why(row, known, 0.2)) == ("launch-bound" in table.why(row, known, 0.2)) == (v < 2.5)


def test_watch_decides_gamma_itself(pair, capsys):
    bench.main(["watch", "Hello", *pair, "--max-new-tokens", "24", "--gamma", "auto", "--temperature", "0.5"])
    assert "24 tokens in" in capsys.readouterr().out


def test_files_may_stand_behind_an_option(tmp_path, capsys):
    with pytest.raises(SystemExit):
        bench.main(["compare", "--bits", "4", str(tmp_path / "none.json")])
    assert "none.json" in capsys.readouterr().err


def test_the_scripts_that_pytest_does_not_collect_can_be_imported():
    pytest.importorskip("transformers")
    for name in ("check_real_pair", "check_four_bits"):
        assert importlib.import_module(name).main


@pytest.mark.parametrize("arguments, word", [
    (["watch"], "one prompt"), (["verify", "a", "b"], "verify"), (["compare"], "files"), (["watch", "a", "b"], "one"),
    (["watch", "text", "--gamma", "lookup,4"], "auto"), (["watch", "text", "--gamma", "4,8"], "one --gamma"),
    (["compare", "--json", "x.json", "a.json"], "compare"), (["watch", "text", "--json", "x.json"], "watch"),
    (["--gamma", "0"], "1 to 64"), (["--gamma", "4,often"], "often"), (["watch", "text", "--gamma", "lookup"], "auto"),
    (["--gamma", "70"], "70"), (["memory", "--plot", "x.png"], "memory"),
    (["--max-new-tokens", "11"], "12"), (["--max-new-tokens", "5", "--gamma", "4"], "6"), (["--plot", "x.gif"], "png"),
])  # fmt: skip
def test_refused(arguments, word, capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(arguments)
    said = capsys.readouterr().err
    assert end.value.code == 2 and word in said and said.count("\n") == 1
