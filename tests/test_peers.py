"""Other engines in bench.py's table: what is printed and written of them, and what is refused."""

import json
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

import bench
from measure import peers
from toys import chain

Written = namedtuple("Written", "ids text tokens seconds drafted accepted")  # as labs/engines.py has it


def test_the_rows_of_another_engine(capsys):
    """Two writers that claim 10 and 5 seconds for what ours writes, and one of them writes something else once."""
    target, asked = chain(), {"code": [[3], [3]]}
    target.config, target.device = SimpleNamespace(eos=[]), torch.device("cpu")
    args = SimpleNamespace(max_new_tokens=21, repeat=1, temperature=0.0, top_k=0, top_p=1.0, seed=0)
    right, asked_of = [(4 + i) % 8 for i in range(21)], []

    def slow(ids, limit, eos):
        return Written(right[:limit], None, limit - 1, 10.0, 0, 0)

    def quick(ids, limit, eos):
        asked_of.append(limit)
        wrong = len(asked_of) == 3  # the first is to warm up
        return Written(None, "other" if wrong else str(right), limit - 1, 5.0, 16, 12)

    text = SimpleNamespace(decode=str)
    writers = {"server 1": slow, "server 2": quick}
    (ours, plain, other), more, _ = peers.peers(target, text, "server", writers, asked, args)
    assert asked_of == [16, 21, 21] and more == {"repeat": 1}
    assert (ours["engine"], ours["mode"], ours["tokens"], ours["speedup"]) == ("ours", "plain", 40, 1.0)
    assert (plain["tokens_per_second"], plain["speedup"], plain["identical"]) == (2.0, 1.0, True)
    assert (other["tokens_per_second"], other["speedup"], other["identical"]) == (4.0, 2.0, False)
    assert (other["drafted"], other["accepted"], other["acceptance_rate"], other["rounds"]) == (32, 24, 0.75, 16)
    assert other["tokens_per_round"] == 2.5
    shown = capsys.readouterr().out
    assert "2 of 2" in shown and "1 of 2" in shown and "75%" in shown


def test_transformers_through_the_front_door(tmp_path, capsys):
    pytest.importorskip("transformers")
    file = tmp_path / "hf.json"
    options = ["--device", "cpu", "--domain", "code", "--max-new-tokens", "12", "--json", str(file)]
    bench.main(["--target", "tiny", "--engine", "transformers", *options])
    written = json.loads(file.read_text())
    assert [row["mode"] for row in written["rows"]] == ["plain", "hf plain", "hf assisted", "hf lookup"]
    assert all(row["identical"] for row in written["rows"][1:]) and written["pair"]["engine"] == "transformers"
    assert "hf assisted" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, word", [
    (["--engine", "server"], "--url"), (["--url", "http://127.0.0.1:1"], "--engine server"),
    (["--engine", "transformers", "--gamma", "4"], "without --gamma"),
    (["verify", "--engine", "transformers"], "for the showdown"),
    (["--engine", "server", "--url", "http://127.0.0.1:1"], "is the server running there?"),
    (["--engine", "transformers", "--target", "tiny", "--bits", "4"], "--bits 32"),
])  # fmt: skip
def test_refused(arguments, word, capsys):
    pytest.importorskip("transformers")
    with pytest.raises(SystemExit) as end:
        bench.main([*arguments, "--device", "cpu"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and word in said
