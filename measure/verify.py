"""Lab 1: what does verifying n tokens cost against generating one? `python bench.py verify`

One pass over the weights serves one token or several. As long as reading them is what takes the time, more tokens in
the pass cost next to nothing: that is all the room that speculative decoding has.
"""

import statistics

import torch
from huggingface_hub.utils import tqdm

from measure import memory
from measure.machine import now, read_bandwidth

MOST = 32  # rows
CONTEXT = 128  # tokens that lie before them
FLAT = 1.25  # up to this many passes over one row, a pass is called flat
STEEP = 2.5  # from this v(8) on it is not reading that costs
WIDTH = 40  # characters of the longest bar


def measure(model, repeat, context):
    """Seconds of passes over 1 .. 32 rows behind so many tokens, each in turn: [32][repeat]."""
    cache, seconds = model.new_cache(context + MOST), [[] for _ in range(MOST)]
    model(torch.zeros(context, dtype=torch.long), cache, last=0)
    for turn in tqdm(range(repeat + 1), "timing passes", disable=None, leave=False):
        for n in range(1, MOST + 1):
            start = now(model.device)
            model(torch.zeros(n, dtype=torch.long), cache, last=n)
            if turn:  # the first of each shape is slow
                seconds[n - 1].append(now(model.device) - start)
            cache.rollback(context)
    return seconds


def report(model, args):
    """Print the table, and what follows from it. Returns its rows, and what --json adds to "pair" and "machine"."""
    context = min(CONTEXT, model.config.max_position_embeddings - MOST)
    if context < 1:
        raise ValueError(f"the context of {model.config.max_position_embeddings} tokens is too short for {MOST} rows")
    seconds, rows = measure(model, args.repeat or 9, context), []
    for n, times in enumerate(seconds, 1):
        # Over the pass over one row of the same turn: the machine changes its speed, but not so soon.
        ratios = sorted(time / one for time, one in zip(times, seconds[0], strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        times = {"milliseconds": 1e3 * statistics.median(times), "ratio": statistics.median(ratios)}
        rows.append({"n": n, **times, "low": low, "high": high})
    v = [row["ratio"] for row in rows]
    print(f"{'n':>3}{'ms':>9}{'v(n)':>7}  half of all")
    for row in rows:
        bar = "█" * max(1, round(WIDTH * row["ratio"] / max(v)))
        spread = f"{row['low']:.2f} - {row['high']:.2f}"
        print(f"{row['n']:>3}{row['milliseconds']:>9.2f}{row['ratio']:>7.2f}  {spread}   {bar}")
    flat = next((n - 1 for n, ratio in enumerate(v, 1) if ratio > FLAT), MOST)
    bytes, most = memory.read(model, context), read_bandwidth(model.device)
    here = bytes / rows[0]["milliseconds"] / 1e6
    print(f"""
n      tokens in one pass of the target, behind {context} others
ms     milliseconds, the median of {len(seconds[0])}
v(n)   over the pass of one token in the same turn, the median; and the middle half of these

A token reads {bytes / 1e6:,.0f} MB of weights and cache in {rows[0]["milliseconds"]:.1f} ms: {here:.1f} GB/s.
Nothing but reading memory reaches {most:.1f} GB/s here.""")
    print(sentence(v, flat, here / most))
    return rows, {"bytes": bytes, "context": context, "repeat": len(seconds[0])}, {"bandwidth": most}


def sentence(v, flat, share):
    """What follows, in words. share: of the bandwidth of this machine that one token reaches."""
    told = f"Verifying 4 tokens costs {v[3]:.2f} times as much as generating one, 8 cost {v[7]:.2f}"
    if v[7] > STEEP:
        why = "each row is arithmetic of its own, and that takes more time than reading the weights once for all"
    elif share > 1.2:
        why = "the weights lie in a cache nearer than memory, and what a row adds is arithmetic"
    elif share > 0.35:
        why = "much of the time goes into reading the weights, and they are read once for all of them"
    else:
        why = "but not for reading: operators take longer to start than the weights to arrive (launch-bound)"
    return f"{told}: {why}.\nIt is flat, below {FLAT}, up to {flat}{'' if flat < MOST else ' and maybe beyond'}."
