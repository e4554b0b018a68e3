"""The kernels of quantize.py against the reference, and a row of one against the same row in other company."""

import math
import struct

import pytest
import torch

import quantize
from quantize import Int4Pack, Int8, Quantized, Reference, kernel, mix
from toys import exact_only, random, relative

CPU = torch.device("cpu")
pytestmark = exact_only


def test_kernels_agree_with_the_reference():
    matrix, bias, x = quantize.quantize(random(64, 512)), random(64, seed=1), random(5, 512, seed=2)
    right = x @ matrix[:].t() + bias
    torch.testing.assert_close(Reference(matrix, bias)(x), right)
    assert relative(Int8(matrix, bias)(x), right) < 0.02
    assert relative(Int4Pack(matrix, bias)(x), right) < 0.01
    assert (Int8(matrix, bias)(torch.zeros(2, 512)) == bias).all()
    assert Int8(matrix)(torch.full((1, 512), torch.nan)).isnan().all()  # and so the round will notice


@pytest.mark.parametrize("vnni", [False, torch.cpu.get_capabilities().get("avx512_vnni")])
def test_int8_is_exact_where_the_weights_and_x_are_integers(monkeypatch, vnni):
    """Also at the largest sums there are, where 16 bits would not do: mixed, each channel is as large as the first."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_vnni": vnni})
    row = [7 << 4 | 15, *[7 << 4 | 7] * 15] * 32 + [0] * 32 + [112] * 32 + [*struct.pack("f", 4)]
    matrix = Quantized(torch.tensor([row] * 16, dtype=torch.uint8), 1024)
    assert matrix[:][0].tolist() == [32, *[0] * 31] * 32
    x = torch.zeros(3, 1024)
    x[:, ::32] = 127.0
    x[1] *= -1
    x[2, ::64] *= -1
    wanted = torch.tensor([127.0 * 1024, -127 * 1024, 0])
    torch.testing.assert_close(Int8(matrix)(x)[:, 0], wanted, rtol=1e-6, atol=0)


def test_mixing_saves_the_columns_beside_the_largest(monkeypatch):
    matrix, x = quantize.quantize(random(64, 512)), random(4, 512, seed=1)
    small, x[:, 7] = x.clone(), 200
    small[:, 7] = 0
    right = Reference(matrix)(small)

    def off():
        product = Int8(matrix)
        return relative(product(x) - product(x - small), right)

    assert off() < 0.12
    monkeypatch.setattr(quantize, "HADAMARD", torch.eye(32) * 32**0.5)
    assert off() > 0.3


@pytest.mark.parametrize("columns", [32, 96, 40, 18, 7])
def test_mixing(columns):
    x, y = random(6, columns), random(5, columns, seed=1)
    x[0] = 0
    x[1, 3] = 1e5
    mixed = mix(x)
    torch.testing.assert_close(mixed @ mix(y).t() / math.gcd(columns, 32), x @ y.t(), rtol=1e-3, atol=1e-3)
    # The sums are exact, so in float64 and for any order of the columns they are the same.
    n, largest = math.gcd(columns, 32), x.abs().amax(1, True)
    rounded = x + 64 * largest - 64 * largest
    exact = (rounded.double().view(-1, n) @ quantize.HADAMARD[:n, :n].double()).view(6, columns)
    assert torch.equal(mixed.double(), exact)


@pytest.mark.parametrize("kind", [Int8, Int4Pack])
def test_a_row_does_not_depend_on_the_others(kind):
    product, x = kind(quantize.quantize(random(96, 512))), random(16, 512, seed=1)
    whole = product(x)
    for rows in (1, 2, 3, 8):
        assert torch.equal(torch.cat([product(some) for some in x.split(rows)]), whole)


def test_a_kernel_that_does_not_work_is_passed_over(monkeypatch):
    class Gone(Int8):
        def __init__(self, matrix, bias=None):
            raise RuntimeError("no such\noperator")

    class Wrong(Reference):
        def __call__(self, x):
            return 1.1 * super().__call__(x)

    assert kernel(CPU, torch.float32) in (Int8, Int4Pack, Reference)
    monkeypatch.setattr(quantize, "Int8", Gone)
    monkeypatch.setattr(quantize, "Int4Pack", Wrong)
    with pytest.warns(UserWarning) as said:
        assert kernel.__wrapped__(CPU, torch.float32) is Reference
    assert "Gone fails: no such operator" in str(said[0].message) and "Wrong is off by 10%" in str(said[1].message)
    assert kernel.__wrapped__(torch.device("meta"), torch.float32) is Reference
