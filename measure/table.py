"""The showdown in words: a line for each row, what its columns mean, and where speculation loses and why."""

HEADER = "domain    mode        gamma   tok/s   speed-up      predicted  accept  tok/round  none  where time went  same"
LEGEND = """
gamma      the most drafts of a round. speculative: always so many; without --gamma as many as were foreseen to be
           best, but at least 1. auto: decided anew before each draft. lookup: copied from the text so far.
           hybrid: lookup, and where it finds nothing the draft model, with as many as were foreseen to be best
tok/s      tokens a second, reading the prompt not counted. {repeat}
speed-up   tok/s over that of the plain row: same target, prompts and lengths, in turns of {turn} tokens
predicted  tokens a round over what a round costs. How many: one pass of the draft over texts that were decoded before
           tells what any gamma would have had accepted. What it costs: v(k + 1) + k c + the rest, timed in rounds apart
           and given below: c is a draft step, v(n) a pass of the target over n rows, both in such passes over one
           Of auto, lookup and hybrid it takes the drafts, and the time to find them, from the run itself
accept     the acceptance rate: accepted / drafted. tok/round also counts the token that the target adds itself
none       of the rounds that drafted, those of which nothing was accepted
where      drafting / passes of the target / all else (judging, roll-back, bookkeeping), in percent
same       texts that are those of plain decoding, token for token (greedy only)
"""
WORTH = 1.1  # a speed-up that would be worth having
NOISE = 0.97  # a speed-up above this is no loss


def line(row):
    """A row as a line of the table. What it does not tell is blank: another engine's may be short of much."""

    def cell(name, form, width):
        value = row.get(name)
        return f"{'' if value is None or row['mode'] == 'plain' else form.format(value):>{width}}"

    spread = (row["speedup_high"] - row["speedup_low"]) / 2 / max(row["speedup"], 1e-9)
    cells = f"{row['domain']:<10}{row['mode']:<12}{'' if row['gamma'] is None else row['gamma']:>5}"
    if row["tokens"]:
        cells += f"{row['tokens_per_second']:>8.2f}{row['speedup']:>10.2f}x {f'±{spread:.0%}' if spread else '':<5}"
    else:  # all texts ended in their first round
        cells += f"{'-':>8}{'-':>10}{'':<7}"
    cells += cell("predicted_speedup", "{:.2f}x", 8) + cell("acceptance_rate", "{:.0%}", 8)
    cells += cell("tokens_per_round", "{:.2f}", 11) + cell("nothing_accepted", "{:.0%}", 6)
    share = row.get("share") if row["mode"] != "plain" else None
    cells += " " * 5 + "/".join(f"{100 * part:3.0f}" for part in share.values()) if share else " " * 16
    return (
        cells + (f"{row['same']:>5} of {row['texts']}" if "same" in row and row["mode"] != "plain" else "")
    ).rstrip()


def legend(repeats, turn):
    """What the columns mean. repeats: how often the domains were decoded, each number once. turn: tokens."""
    often = f"Of {' or '.join(map(str, repeats))} runs the median, ± half the range" if repeats[-1] > 1 else "One run"
    return LEGEND.format(repeat=often, turn=turn)


def verdict(rows, known):
    """What to learn from the rows, in words: a list of lines. known: the Costs of each domain."""
    lines = ["Costs"]
    for domain, costs in known.items():
        passes = "  ".join(f"v({n}) {costs.v[n - 1]:.2f}" for n in (2, 3, 5, 9, len(costs.v)) if n <= len(costs.v))
        lines.append(f"{domain:<10}c {costs.c:.2f}  {passes}")
    lines += [
        "",
        "Acceptance by position: of the drafts judged there, the share accepted. Behind it tokens a round, and what",
        "they would be if all positions were alike: (1 - a^(gamma + 1)) / (1 - a), Leviathan et al. 2023, eq. 1",
    ]
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    for domain in domains:
        mine = [row for row in rows if row["domain"] == domain]
        longest = max(mine, key=lambda row: (row["mode"] == "speculative", len(row["judged"])))
        cells = " ".join(f"{k / j:>4.0%}" for k, j in zip(longest["kept"], longest["judged"], strict=True) if j)
        alike = longest["tokens_per_round_theory"]
        alike = f"   {longest['tokens_per_round']:.2f}, {alike:.2f}" if longest["mode"] == "speculative" else ""
        lines.append(f"{domain:<10}{name(longest):<9}{cells}{alike}")
    lines += ["", "The fastest first. Behind it the gamma that is predicted to be best, 0 for none, and its speed-up"]
    for domain in domains:
        mine = sorted((r for r in rows if r["domain"] == domain), key=lambda r: -r["tokens_per_second"])
        foreseen = next(row["predicted_by_gamma"] for row in mine if row["mode"] == "plain")
        gamma = foreseen.index(max(foreseen))
        order = " > ".join(f"{name(row)} {row['speedup']:.2f}x" for row in mine)
        lines.append(f"{domain:<10}{order};  gamma {gamma}: {foreseen[gamma]:.2f}x")
    if len(domains) == 1:  # there is room
        lines += ["", "The speed-up on each prompt"]
        lines += [f"{name(row):<12}" + "".join(f"{ratio:>8.2f}x" for ratio in row["by_prompt"]) for row in rows[1:]]
    losses = [row for row in rows if row["mode"] != "plain" and row["rounds"] and row["speedup"] < NOISE]
    reach = {row["domain"]: row["reach"] for row in rows if row["mode"] == "plain"}
    reasons = [why(row, known[row["domain"]], reach[row["domain"]]) for row in losses]
    return [*lines, *([""] * bool(losses)), *reasons]


def name(row):
    return f"gamma {row['gamma']}" if row["mode"] == "speculative" else row["mode"]


def why(row, known, reach):
    """A sentence on a row that is slower than plain decoding: which of its parts is to blame, and the number for it.
    reach: the share of the machine's bandwidth that a pass of the target over one row comes to."""
    tokens, whole = row["tokens_per_round"], row["tokens_per_round"] / row["speedup"]  # in plain rounds, as all here
    draft, verify, other = (row["share"][part] * whole for part in ("draft", "verify", "other"))
    told = (
        f"{row['domain']}, {name(row)}: loses ({row['speedup']:.2f}x). A round brings {tokens:.2f} tokens and takes the"
    )
    told += f" time of {whole:.2f}: {draft:.2f} for drafts, {verify:.2f} to verify, {other:.2f} for the rest."
    free = tokens / (whole - draft)
    flat = tokens / (whole - verify + known.verify[0] / known.round(0))
    reasons = [f"The draft is too dear (were it free: {free:.2f}x)"] * (free > WORTH)
    reasons += [f"Verifying is not flat (were v = 1: {flat:.2f}x)"] * (flat > WORTH)
    low = f"Too few drafts are accepted ({row['acceptance_rate']:.0%}; free ones would give {free:.2f}x)"
    told += f" {'. '.join(reasons) if reasons else low}."
    if reach < 0.35 and known.v[min(7, len(known.v) - 1)] < 2.5:  # neither reading nor arithmetic takes the time
        told += f" A pass over one row reads at {100 * reach:.0f} % of this machine's bandwidth: starting operators"
        told += " takes longer than reading weights (launch-bound), and a small draft has nearly as many operators."
    return told
