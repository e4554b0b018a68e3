"""The numbers of the talks, worked out from config.json files and from this machine: labs/talks.md explains them.

python labs/arithmetic.py bytes         what a token reads, and what a draft step costs by that
python labs/arithmetic.py rounds        tokens a round, and from which acceptance rate on it pays
python labs/arithmetic.py roofline      how many rows a pass can have before arithmetic takes longer than reading
"""

import argparse
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the library

from measure import memory  # noqa: E402
from measure.machine import now, read_bandwidth  # noqa: E402
from model import Config  # noqa: E402

CONTEXT = 512  # tokens behind which the bytes are counted


def tokens_per_round(a, gamma):
    """Leviathan et al. 2023, equation 1: each draft is kept with the chance a, and one token comes on top."""
    return sum(a**i for i in range(gamma + 1))


def speedup(a, gamma, c, v=1.0):
    """Theorem 3.8, with a pass over gamma + 1 rows costing v passes over one, and a draft step c of them."""
    return tokens_per_round(a, gamma) / (v + gamma * c)


def break_even(gamma, c, v=1.0):
    """The acceptance rate from which on it pays, or None if even 1 is too little. By halving, to 1e-6."""
    low, high = 0.0, 1.0
    if speedup(high, gamma, c, v) < 1:
        return None
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if speedup(middle, gamma, c, v) >= 1 else (middle, high)
    return high


def show_bytes():
    target, draft = (Config.read(str(ROOT / "tests" / "configs" / f"Qwen2.5-{n}-Instruct")) for n in ("3B", "0.5B"))
    print(f"MB that a token behind {CONTEXT} others reads: layers, head and cache\n")
    read = {}
    for way, (bits, device) in memory.WAYS.items():
        read[way] = [memory.reads(c, bits, device, CONTEXT) for c in (target, draft)]
        print(f"{way:<14}target {read[way][0] / 1e6:>7,.0f}   draft {read[way][1] / 1e6:>6,.0f}")
    (t4, d4), (t16, d16) = read["4 bits, GPU"], read["16 bits, GPU"]
    print("\nc by bytes, on a GPU: a draft step over a target step")
    for said, c in [("both in 16 bits", d16 / t16), ("target in 4, draft in 16", d16 / t4), ("both in 4", d4 / t4)]:
        print(f"{said:<26}{c:>5.2f}")


def show_rounds():
    gammas, rates = (1, 2, 4, 8), (0.3, 0.5, 0.7, 0.8, 0.9)
    print("tokens a round\na       " + "".join(f"gamma {gamma:<4}" for gamma in gammas))
    for a in rates:
        print(f"{a:<8}" + "".join(f"{tokens_per_round(a, gamma):<10.2f}" for gamma in gammas))
    print("\nspeed-up at gamma 4; c is a draft step, v a pass over 5 rows\na       ", end="")
    ways = ((0.16, 1.1), (0.16, 1.4), (0.37, 1.4), (0.51, 1.1))
    print("".join(f"c {c:.2f} v {v:<6}" for c, v in ways))
    for a in rates:
        print(f"{a:<8}" + "".join(f"{speedup(a, 4, c, v):<15.2f}" for c, v in ways))
    edges = [break_even(4, c, v) for c, v in ways]
    print("even at " + "".join(f"{'never' if edge is None else f'a = {edge:.2f}':<15}" for edge in edges))


def show_roofline():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bits = 16 if device.type == "cuda" else 32
    a = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16 if bits == 16 else torch.float32)
    seconds = []
    for _ in range(6):
        start = now(device)
        a @ a
        seconds.append(now(device) - start)
    peak, bandwidth = 2 * len(a) ** 3 / min(seconds) / 1e9, read_bandwidth(device)
    print(f"{device}: {bandwidth:.1f} GB/s from memory, {peak:,.0f} GFLOP/s in {bits} bits")
    print(f"so {peak / bandwidth:.1f} operations can be done while a byte arrives. Each row does 2 with each weight:\n")
    for kept in {16: (16, 4), 32: (32,)}[bits]:  # on a CPU, 4 bits are multiplied as bytes, with another peak
        print(f"weights in {kept:>2} bits: {16 / kept:.2g} operations a byte and row; arithmetic takes longer from n = "
              f"{peak / bandwidth * kept / 16:.0f} on")  # fmt: skip


SHOW = {"bytes": show_bytes, "rounds": show_rounds, "roofline": show_roofline}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=SHOW)
    SHOW[parser.parse_args(argv).what]()


if __name__ == "__main__":
    main()
