"""bench.py verify: its table and what it says of it, and how fast memory can be read."""

import json
from types import SimpleNamespace

import pytest
import torch

import bench
import folders
from measure import machine, verify
from toys import Toy


def test_verify(capsys, monkeypatch):
    """The table, on a clock that takes 1 ms a pass and a tenth more for each row."""
    clock = [0.0]

    class Slow(Toy):
        def __call__(self, ids, cache, last):
            clock[0] += 0.001 * (1 + 0.1 * (len(ids) - 1))
            return super().__call__(ids, cache, last)

    monkeypatch.setattr(verify, "now", lambda device: clock[0])
    monkeypatch.setattr(verify, "read_bandwidth", lambda device: 10.0)
    monkeypatch.setattr(verify.memory, "read", lambda *_: 8e6)
    model = Slow(lambda seen: [0.0])
    model.config, model.device = SimpleNamespace(max_position_embeddings=1000), torch.device("cpu")
    rows, names, about = verify.report(model, SimpleNamespace(repeat=3))
    assert [row["n"] for row in rows] == [*range(1, 33)]
    assert [row["ratio"] for row in rows] == pytest.approx([1 + 0.1 * n for n in range(32)])
    assert [row["milliseconds"] for row in rows[:2]] == pytest.approx([1.0, 1.1])
    assert (names, about) == ({"bytes": 8e6, "context": 128, "repeat": 3}, {"bandwidth": 10.0})
    shown = capsys.readouterr().out
    assert "8 MB" in shown and "8.0 GB/s" in shown and "up to 3" in shown and "1.30 times" in shown and "1.70" in shown


def test_verify_needs_no_draft(tmp_path, capsys):
    file = tmp_path / "verify.json"
    bench.main(
        [
            "verify",
            "--target",
            folders.write(tmp_path / "target"),
            "--device",
            "cpu",
            "--repeat",
            "1",
            "--json",
            str(file),
        ]
    )
    written = json.loads(file.read_text())
    assert len(written["rows"]) == 32 and written["machine"]["bandwidth"] > 0
    assert written["pair"]["command"] == "verify" and "GB/s" in capsys.readouterr().out


def test_a_vector_is_read_as_fast_as_it_can_be(monkeypatch):
    times = iter(i * 0.5 for i in range(100))
    monkeypatch.setattr(machine, "now", lambda device: next(times))
    assert machine.read_bandwidth("cpu", repeat=2) == pytest.approx(10 * 2**28 / 0.5 / 1e9)


@pytest.mark.parametrize("v8, share, word", [
    (1.2, 0.8, "once for all of them"), (1.2, 3.0, "nearer than memory"), (1.2, 0.1, "launch-bound"),
    (6.0, 0.8, "arithmetic of its own"), (6.0, 0.1, "arithmetic of its own"),
])  # fmt: skip
def test_what_follows(v8, share, word):
    said = verify.sentence([1 + (v8 - 1) * n / 7 for n in range(32)], 3, share)
    reasons = ("once for all of them", "nearer than memory", "launch-bound", "arithmetic of its own")
    assert [reason for reason in reasons if reason in said] == [word]
