"""The showdown in words: a line for each row, what its columns mean, and where speculation loses and why."""

HEADER = (
    "domain     mode        gamma   tok/s  speed-up     predicted  kept  tok/round  none  draft/verify/other   same"
)


def line(row, parted):
    """A row as a line of the table. parted: for each greedy text, None where it is that of plain decoding. A row of
    another engine leaves blank what that does not tell."""

    def cell(name, form, width):
        value = row.get(name)
        return f"{'' if value is None or row['mode'] == 'plain' else form.format(value):>{width}}"

    spread = (row["speedup_high"] - row["speedup_low"]) / 2 / max(row["speedup"], 1e-9)
    cells = f"{row['domain']:<11}{row['mode']:<11}{'' if row['gamma'] is None else row['gamma']:>6}"
    cells += f"{row['tokens_per_second']:>8.2f}{row['speedup']:>9.2f}x {f'±{spread:.0%}' if spread else '':<5}"
    cells += cell("predicted_speedup", "{:.2f}x", 8) + cell("acceptance_rate", "{:.0%}", 6)
    cells += cell("tokens_per_round", "{:.2f}", 11) + cell("nothing_accepted", "{:.0%}", 6) + "  "
    share = row.get("share") if row["mode"] != "plain" else None
    cells += " / ".join(f"{part:>4.0%}" for part in share.values()) if share else " " * 18
    cells += f"{parted.count(None):>5} of {len(parted)}" if parted else ""
    return cells.rstrip()


WORTH = 1.1  # a speed-up that would be worth having
LEGEND = """
gamma      the most drafts of a round. speculative: always so many. auto: decided anew before each draft
           lookup: copied from the text so far. hybrid: lookup, and where it finds nothing the draft model
tok/s      tokens a second. Reading the prompt is not part of it. {repeat}
speed-up   tok/s over that of the plain row: same target, prompts and lengths, 16 tokens each in turn
predicted  tok/round over what a round costs: v(k + 1) + k c for k drafts, and the rest, all measured beforehand. In
           passes of the target over one row a draft step costs c = {c:.2f}, and a pass over more rows
           {v}. Drafting by auto, lookup, hybrid counts as it was
kept       the acceptance rate: drafts that the target kept. tok/round also counts the token that it adds itself.
none       rounds of which no draft was kept
draft/...  where the time went: drafting, the target's passes, and all else (judging, roll-back, bookkeeping)
same       texts that are those of plain decoding, token for token (greedy only)
"""


def legend(known, repeat):
    """What the columns mean, with the numbers behind them. known: the Costs."""
    v = known.v
    told = sorted({n for n in (2, 4, 5, 8, len(v)) if n <= len(v)})
    return LEGEND.format(
        repeat=f"Of {repeat} runs the median, ± half the range" if repeat > 1 else "One run",
        c=known.c,
        v=", ".join(f"v({n}) = {v[n - 1]:.2f}" for n in told),
    )


def verdict(rows, known, reach):
    """What to learn from the rows, in words: a list of lines. reach: the share of the machine's bandwidth that a pass
    of the target over one row comes to."""
    lines = ["Acceptance by position: of the drafts judged there, how many were kept"]
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    for domain in domains:
        mine = [row for row in rows if row["domain"] == domain]
        longest = max(mine, key=lambda row: (row["mode"] == "speculative", len(row["judged"])))
        cells = " ".join(f"{k / j:>4.0%}" for k, j in zip(longest["kept"], longest["judged"], strict=True) if j)
        if longest["mode"] == "speculative":
            per_round = longest["tokens_per_round_theory"]
            cells += f"   (were all alike: {per_round:.2f} tok/round, and it is {longest['tokens_per_round']:.2f})"
        lines.append(f"{domain:<11}{cells}")
    lines += [
        "",
        "The fastest first; and behind it the gamma that costs and acceptance name as the best, and its speed-up",
    ]
    for domain in domains:
        mine = sorted((r for r in rows if r["domain"] == domain), key=lambda r: -r["tokens_per_second"])
        foreseen = next(row["predicted_by_gamma"] for row in mine if row["mode"] == "plain")
        gamma = foreseen.index(max(foreseen))
        order = " > ".join(f"{name(row)} {row['speedup']:.2f}x" for row in mine)
        lines.append(f"{domain:<11}{order};  gamma {gamma}: {foreseen[gamma]:.2f}x")
    losses = [row for row in rows if row["mode"] != "plain" and row["speedup"] < 1]
    return [*lines, *([""] * bool(losses)), *(why(row, known, reach) for row in losses)]


def name(row):
    return f"gamma {row['gamma']}" if row["mode"] == "speculative" else row["mode"]


def why(row, known, reach):
    """A sentence on a row that is slower than plain decoding: which of its parts is to blame, and the number for it."""
    one, rounds = known.verify[0], max(row["rounds"], 1)
    seconds = row["tokens"] / max(row["speedup"], 1e-9) * known.round(0) / rounds  # of one, in the plain row's currency
    share = row["share"] or {"draft": 0.0, "verify": 1.0, "other": 0.0}
    draft, verify, other = (share[part] * seconds for part in ("draft", "verify", "other"))
    gains = row["tokens_per_round"] * known.round(0)
    told = f"{row['domain']}, {name(row)}: loses ({row['speedup']:.2f}x). A round brings {row['tokens_per_round']:.2f}"
    told += f" tokens and takes the time of {seconds / known.round(0):.2f}: {draft / one:.2f} for drafts,"
    told += f" {verify / one:.2f} to verify, {other / one:.2f} for the rest."
    free, flat = gains / max(seconds - draft, 1e-9), gains / max(seconds - verify + one, 1e-9)
    reasons = [f"The draft is too dear (were it free: {free:.2f}x)"] * (free > WORTH)
    reasons += [f"Verifying is not flat (were v = 1: {flat:.2f}x)"] * (flat > WORTH)
    low = f"Too few drafts are kept ({row['acceptance_rate']:.0%}; free drafts would give {free:.2f}x)"
    told += f" {'. '.join(reasons) if reasons else low}."
    if reach < 0.35:
        told += f" A pass over one row reads at {100 * reach:.0f} % of this machine's bandwidth: starting operators"
        told += " takes longer than reading weights (launch-bound), and a small draft has nearly as many operators."
    return told
