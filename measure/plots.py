"""Pictures of what bench.py measured: what a pass costs, what gamma brings, which drafts are kept, which mode wins.

draw(documents, "out.png") takes documents as `bench.py --json` writes them. A panel is there if they have rows for it.
What all documents have in common is the title; what sets one apart is its label, with the number of the document.
"""

import importlib.util
import os
import re
import textwrap

from measure.board import words

# The colours of Okabe and Ito, which colour-blind people can tell apart; a marker and a hatch each, for prints in grey.
STYLES = [("#0072B2", "o", "//"), ("#E69F00", "s", "\\\\"), ("#009E73", "^", ".."), ("#CC79A7", "D", "xx")]
STYLES += [("#D55E00", "v", "--"), ("#56B4E9", "P", "oo"), ("#000000", "X", "++")]
LINE = {"linewidth": 3, "markersize": 10}
ONE = {"color": "black", "linestyle": "--", "linewidth": 2.5, "zorder": 1.5}  # over the bars, under lines and labels
SMALL, LARGE = 16, 19  # points: to be read from the last row of a room


def check(file):
    """Raise ValueError if `file` cannot be drawn, which is better known before anything is measured."""
    if not file.endswith((".png", ".svg")):
        raise ValueError(f"--plot {file}: must end in .png or .svg")
    if os.path.isdir(file) or not os.access(os.path.dirname(os.path.abspath(file)), os.W_OK):
        raise ValueError(f"--plot {file}: not a file that can be written, in a folder that is there")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")


def draw(documents, file):
    """Draw `figure(documents)` into file, a .png or .svg. Raises ValueError or OSError, and then leaves no file."""
    check(file)
    try:
        figure(documents).savefig(f"{file}.part", format=file[-3:])
        os.replace(f"{file}.part", file)
    finally:
        if os.path.exists(f"{file}.part"):
            os.remove(f"{file}.part")


def figure(documents):
    """A matplotlib Figure with a subfigure for each panel. Raises ValueError if there is nothing to draw."""
    from matplotlib.figure import Figure

    title, labels = words(documents)
    named = [(d["rows"], label) for d, label in zip(documents, labels, strict=True) if d["rows"]]
    verify = [(rows, label) for rows, label in named if "ratio" in rows[0]]
    showdown = [(rows, label) for rows, label in named if "mode" in rows[0]]
    jobs = [(costs, verify)] if verify else []
    for show, find in (speedups, by_gamma), (acceptance, by_position):
        jobs += [(show, (find(rows), label)) for rows, label in showdown if any(map(any, find(rows).values()))]
    if not jobs and not showdown:
        raise ValueError("--plot: nothing to draw, as there are no rows of the showdown or of verify")
    across = 2 if len(jobs) in (2, 4) else min(3, max(1, len(jobs)))
    table = [jobs[i : i + across] for i in range(0, len(jobs), across)]
    table += [[(bars, showdown)]] if showdown else []  # a row of its own: it is the widest
    width = max(6.6 * across, 14 if showdown else 11)
    result = Figure(figsize=(width, 6.2 * len(table) + 0.8), layout="constrained")
    result.get_layout_engine().set(w_pad=0.15, h_pad=0.1)
    result.suptitle(fold(result, 0.7, title), fontsize=LARGE, weight="bold")
    grid = result.add_gridspec(len(table), 6)
    for i, row in enumerate(table):
        step = 6 // len(row)
        for j, (show, data) in enumerate(row):
            panel = result.add_subfigure(grid[i, j * step : (j + 1) * step])
            show(panel, data)
            longest = max(map(len, panel.axes[0].get_legend_handles_labels()[1]))
            columns = max(1, letters(panel, 0.55) // (longest + 6))
            panel.legend(loc="outside lower center", ncols=columns, fontsize=SMALL, frameon=False)
    return result


def letters(panel, wide):
    """How many letters, each `wide` times the large size, go side by side."""
    return int(panel.bbox.width / panel.figure.dpi * 72 / LARGE / wide)


def fold(panel, wide, *texts):
    """The texts as lines that fit, broken behind commas."""
    kept = (re.sub("(?<!,) ", "\u00a0", text) for text in texts)
    return "\n".join(textwrap.fill(text, letters(panel, wide), break_on_hyphens=False) for text in kept if text)


def axes(panel, title, x, y, *labels):
    result = panel.subplots()
    panel.suptitle(fold(panel, 0.6, title, *labels), fontsize=LARGE)
    result.set_xlabel(x, fontsize=SMALL)
    result.set_ylabel(y, fontsize=SMALL)
    result.tick_params(labelsize=SMALL)
    result.xaxis.get_major_locator().set_params(integer=True)
    result.grid(axis="y", alpha=0.3)
    result.set_axisbelow(True)
    result.spines[["top", "right"]].set_visible(False)
    return result


def spread(rows, value, low, high):
    """The lowest and the highest of each row, which are its value where they are not known."""
    return [[row[value] if row.get(name) is None else row[name] for row in rows] for name in (low, high)]


def costs(panel, documents):
    """v(n) of each document, its quartiles as a band, and the two extremes: free, and n times the cost."""
    shown = axes(panel, "What a pass over n rows costs", "n: rows of one pass", "v(n): times a pass over 1 row")
    most, top = max(row["n"] for rows, _ in documents for row in rows), 1.5
    for (rows, label), (colour, marker, _) in zip(documents, STYLES * 9, strict=False):
        n, (low, high) = [row["n"] for row in rows], spread(rows, "ratio", "low", "high")
        shown.fill_between(n, low, high, color=colour, alpha=0.25, linewidth=0)
        label = f"{label or 'measured'}, 1 row {rows[0]['milliseconds']:.3g} ms"
        shown.plot(n, [row["ratio"] for row in rows], color=colour, marker=marker, label=label, **LINE)
        top = max(top, *high)
    shown.plot([1, most], [1, 1], label="free", **ONE)
    shown.plot([1, most], [1, most], color="0.5", linestyle=":", linewidth=2.5, label="proportional: n")
    shown.set_xticks([1, *range(4, most + 1, 4)])
    shown.set_ylim(0, top * 1.1)


def by_gamma(rows):
    """{domain: (predicted speed-ups by gamma, rows measured with the draft model)}, each of which may be empty."""
    found = {row["domain"]: ([], []) for row in rows}
    for row in rows:
        if row["mode"] == "plain":
            found[row["domain"]][0].extend(row.get("predicted_by_gamma") or [])
        elif row["mode"] == "speculative" and row.get("speedup") is not None:
            found[row["domain"]][1].append(row)
    return found


def speedups(panel, data):
    shown = axes(panel, "Speed-up by gamma", "gamma: drafts a round", "times plain decoding", data[1])
    for (domain, (curve, rows)), (colour, marker, _) in zip(data[0].items(), STYLES, strict=False):
        gammas = [row["gamma"] for row in rows]
        shown.plot(range(len(curve)), curve, color=colour, linewidth=3)
        shown.vlines(gammas, *spread(rows, "speedup", "speedup_low", "speedup_high"), color=colour, linewidth=2.5)
        shown.plot(gammas, [row["speedup"] for row in rows], marker, color=colour, markersize=12, mec="white")
        shown.plot([], [], color=colour, marker=marker, label=domain, **LINE)
    shown.axhline(1, label="plain", **ONE)
    shown.plot([], [], "-", color="0.4", linewidth=3, label="predicted")
    shown.plot([], [], "o", color="0.4", markersize=12, label="measured")
    shown.set_ylim(0)


def by_position(rows):
    """{domain: [(position, share kept of the drafts judged there)]}, if 10 or more were, of the row with the most."""
    # Of fixed gamma if there is one: an adaptive one drafts on only where it expects to be right.
    found = {row["domain"]: (False, 0, []) for row in rows}
    for row in rows:
        if row["mode"] in ("speculative", "auto") and row.get("judged"):
            drafts = enumerate(zip(row["judged"], row["kept"], strict=True), 1)
            shares = [(i, kept / judged) for i, (judged, kept) in drafts if judged >= 10]
            found[row["domain"]] = max(found[row["domain"]], (row["mode"] == "speculative", len(shares), shares))
    return {domain: shares for domain, (_, _, shares) in found.items()}


def acceptance(panel, data):
    shown = axes(panel, "Drafts kept, of those judged", "position in the round", "share kept", data[1])
    for (domain, shares), (colour, marker, _) in zip(data[0].items(), STYLES, strict=False):
        shown.plot(*zip(*shares, strict=True), color=colour, marker=marker, label=domain, **LINE)
    shown.yaxis.set_major_formatter("{x:.0%}")
    shown.set_ylim(0, 1.05)


def bars(panel, documents):
    """The showdown: of one document the speed-ups, else the speeds, as each has a plain row of its own."""
    all_rows = [row for rows, _ in documents for row in rows]
    own = all(row.get("speedup") is not None and not row.get("engine") for row in all_rows)
    ratio = own and len(documents) == 1  # another engine's speed-up is over its own plain row
    value, title, digits = ("speedup", "Speed-up", 2) if ratio else ("tokens_per_second", "Speed", 1)
    unit = "times plain decoding" if ratio else "tokens a second"
    shown = axes(panel, f"{title} of each mode", "", unit, *(label for _, label in documents if ":" in label))
    domains = list(dict.fromkeys(row["domain"] for row in all_rows))
    others = dict.fromkeys(row["mode"] for row in all_rows if row["mode"] != "plain")
    modes = {"plain": ("0.55", "", "")} | dict(zip(others, STYLES * 9, strict=False))
    series = list(dict.fromkeys((at, row["mode"]) for at, (rows, _) in enumerate(documents) for row in rows))
    step = len(series) + 1  # bars from one domain to the next
    longest = len(f"{max(row[value] for row in all_rows):.{digits}f}")
    turn = 90 if letters(panel, 0.5) < (longest + 0.5) * step * len(domains) else 0  # wider than a bar
    for i, (at, mode) in enumerate(series):
        mine = sorted((row for row in documents[at][0] if row["mode"] == mode), key=lambda row: row[value])
        best = {row["domain"]: row for row in mine}  # of several gammas the fastest
        gammas = sorted({row["gamma"] for row in mine if row.get("gamma")})
        name = f"{mode}, best of gamma {', '.join(map(str, gammas))}" if len(gammas) > 1 else mode
        colour, _, hatch = modes[mode]
        if len(documents) > 1:
            name, hatch = f"{documents[at][1].split(':')[0]} {name}", STYLES[at % 7][2]
        x, heights = [i + domains.index(d) * step for d in best], [row[value] for row in best.values()]
        shown.bar(x, heights, 0.9, label=name, color=colour, hatch=hatch, edgecolor="white")
        low, high = spread(best.values(), value, "speedup_low", "speedup_high") if ratio else (heights, heights)
        shown.vlines(x, low, high, color="black", linewidth=2)
        for *place, height in zip(x, high, heights, strict=True):
            look = {"ha": "center", "fontsize": 14, "rotation": turn, "bbox": {"color": "white", "pad": 0.5}}
            shown.annotate(f"{height:.{digits}f}", place, (0, 5), textcoords="offset points", **look)
    if ratio:
        shown.axhline(1, **ONE)
        speeds = {r["domain"]: f"\nplain {r['tokens_per_second']:.1f} tok/s" for r in all_rows if r["mode"] == "plain"}
        domains = [domain + speeds.get(domain, "") for domain in domains]
    shown.set_xticks([(len(series) - 1) / 2 + i * step for i in range(len(domains))], domains)
    shown.margins(x=0.01, y=0.12)
