"""The numbers of the talks: against closed forms, by hand, and on a machine whose speed is known."""

import pytest

from labs import arithmetic


@pytest.mark.parametrize("gamma", [0, 1, 4, 8])
def test_tokens_a_round(gamma):
    for a in (0.3, 0.9):
        assert arithmetic.tokens_per_round(a, gamma) == pytest.approx((1 - a ** (gamma + 1)) / (1 - a))
    assert arithmetic.tokens_per_round(1.0, gamma) == gamma + 1


def test_break_even():
    assert arithmetic.break_even(1, 0.3) == pytest.approx(0.3, abs=1e-5)  # 1 + a against 1 + c
    assert arithmetic.break_even(1, 0.3, 1.2) == pytest.approx(0.5, abs=1e-5)
    edge = arithmetic.break_even(4, 0.37, 1.4)
    assert arithmetic.speedup(edge, 4, 0.37, 1.4) == pytest.approx(1, abs=1e-4)
    assert arithmetic.break_even(4, 1.0, 1.1) is None


def test_bytes(capsys):
    arithmetic.main(["bytes"])
    lines = capsys.readouterr().out.splitlines()
    c = {line[:26].strip(): float(line[26:]) for line in lines[-3:]}
    assert c == {"both in 16 bits": 0.16, "target in 4, draft in 16": 0.51, "both in 4": 0.16}
    # 3,085,938,688 parameters but a norm, and 512 tokens of 36 layers x 2 heads x 128, keys and values
    expected = 2 * (3_085_938_688 - 2048) + 512 * 2 * 36 * 2 * 128 * 2
    assert f"16 bits, GPU  target {expected / 1e6:>7,.0f}" in lines[3]


def test_rounds(capsys):
    arithmetic.main(["rounds"])
    shown = capsys.readouterr().out
    assert "0.5     1.50      1.75      1.94      2.00" in shown and "never" not in shown


def test_roofline(monkeypatch, capsys):
    """100 GFLOP/s and 25 GB/s: 4 operations a byte. In 32 bits a row does half a one: 8 rows."""
    monkeypatch.setattr(arithmetic.torch.cuda, "is_available", lambda: False)
    times = iter(i * 2 * 2048**3 / 100e9 for i in range(12))
    monkeypatch.setattr(arithmetic, "now", lambda device: next(times))
    monkeypatch.setattr(arithmetic, "read_bandwidth", lambda device: 25.0)
    arithmetic.main(["roofline"])
    lines = capsys.readouterr().out.splitlines()
    assert "25.0 GB/s" in lines[0] and "100 GFLOP/s in 32 bits" in lines[0] and "so 4.0 operations" in lines[1]
    assert [line.rsplit("from ", 1)[1] for line in lines[3:]] == ["n = 8 on"]
