"""The tables of `bench.py compare`: what several runs wrote with --json, side by side."""

import json
import re

REAL = int | float
KINDS = {  # what is read of a document and of its rows
    "machine": {"device": str, "name": str, "threads": int},
    "pair": {"command": str, "target": str | None, "draft": str | None, "temperature": REAL | None},
    "showdown": {"domain": str, "mode": str, "gamma": int | None, "tokens_per_second": REAL, "speedup": REAL | None},
    "verify": {"n": int, "milliseconds": REAL, "ratio": REAL},
}
SAME = {"max_new_tokens": "lengths", "prompts": "prompts", "target": "weights", "dtype": "weights"}
SAME |= {"temperature": "sampling", "top_k": "sampling", "top_p": "sampling"}


LEGEND = """
tok/s, and the speed-up over plain decoding by the same engine on that machine; * is the fastest of a domain
v(n): a pass of the target over n rows, in passes over one; ms: milliseconds of that one
"""


def read(file):
    """The document in a file of --json. Raises OSError, or ValueError if it is none of the showdown or of verify."""

    def has(part, kinds):
        return isinstance(part, dict) and all(isinstance(part.get(key), kind) for key, kind in kinds.items())

    with open(file, encoding="utf-8") as f:
        try:
            document = json.load(f)
        except ValueError:  # no JSON, or no text at all
            document = None
    fine = has(document, {"rows": list}) and all(has(document.get(part), KINDS[part]) for part in ("machine", "pair"))
    kinds = KINDS.get(document["pair"]["command"]) if fine and document["rows"] else None
    if not (kinds and all(has(row, kinds) for row in document["rows"])):
        raise ValueError(f"{file}: cut off, or not what bench.py or bench.py verify writes with --json")
    return document


def compare(files):
    """Print the runs in these files: a table of the showdown, one of verify. Returns the documents, for a plot."""
    documents = [read(file) for file in files]
    for i, (file, document) in enumerate(zip(files, documents, strict=True), 1):
        engine, target, draft, dtype, machine, *how = facts(document)
        print(f"{i}  {file}: {', '.join(filter(None, (engine, dtype, *how)))}")
        print("   " + ", ".join(filter(None, (target, draft, machine))))
    for command, table in ("showdown", speeds), ("verify", passes):
        runs = [(f"{i} {facts(d)[0]}", d) for i, d in enumerate(documents, 1) if d["pair"]["command"] == command]
        lines = table(runs) if runs else []
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for at, (name, *cells) in enumerate(lines):
            line = "  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]).rstrip()
            print(line if at else "\n" + line)
    print(LEGEND, *differences(documents), sep="\n")
    return documents


def speeds(runs):
    """The showdown: a line for each file, mode and gamma, a column for each domain."""
    rows = [(name, row) for name, document in runs for row in document["rows"]]
    rows = [(f"{name.split()[0]} {row['engine']}" if "engine" in row else name, row) for name, row in rows]
    domains = dict.fromkeys(row["domain"] for _, row in rows)
    most = {domain: max(row["tokens_per_second"] for _, row in rows if row["domain"] == domain) for domain in domains}
    lines = {}
    for name, row in rows:
        numbered = row["mode"] == "speculative" and row.get("way") != "best"  # that is another one for each domain
        name += f" {row['mode']}" + (f" {row['gamma']}" if numbered else " best" * (row.get("way") == "best"))
        speed, gain = row["tokens_per_second"], "" if row.get("speedup") is None else f"{row['speedup']:.2f}x"
        cell = f"{speed:.2f}{'*' if speed == most[row['domain']] else ' '}{gain:>7}"
        lines.setdefault(name, {})[row["domain"]] = cell
    body = [[name, *(cells.get(domain, "") for domain in domains)] for name, cells in lines.items()]
    return [["tok/s, times its plain", *domains], *body]


def passes(runs):
    """verify: a line for each file, with how long a pass over 1 row takes, and the ratios to it, v(n)."""
    sizes, body = (1, 2, 4, 8, 16, 32), []
    for name, document in runs:
        rows = {row["n"]: row for row in document["rows"]}
        cells = [f"{rows[n]['ratio']:.2f}" if n in rows else "" for n in sizes]
        body.append([f"{name} {facts(document)[3]}", f"{rows[1]['milliseconds']:.2f}" if 1 in rows else "", *cells])
    return [["cost of a pass", "ms", *(f"v({n})" for n in sizes)], *body]


def differences(documents):
    """A line for each thing that is not the same in all files that tell it, and for each text that is not as plain."""
    lines = []
    for key, what in SAME.items():
        said = {}  # value -> numbers of the files
        for i, pair in enumerate((document["pair"] for document in documents), 1):
            value = short(pair["target"]) if key == "target" else pair.get(key)
            if value is not None and (what == "weights" or pair["command"] == "showdown"):
                said.setdefault(f"{value:g}" if isinstance(value, REAL) else str(value), []).append(str(i))
        if len(said) > 1:
            lines += [f"not the same {what}: {key} " + ", ".join(f"{v} ({' '.join(i)})" for v, i in said.items())]
    for i, document in enumerate(documents, 1):
        apart = [f"{row['mode']} on {row['domain']}" for row in document["rows"] if row.get("identical") is False]
        lines += [f"not the text of plain decoding: {', '.join(dict.fromkeys(apart))} ({i})"] if apart else []
    return lines


def short(model):
    """The last part of a folder or Hub id, or two where the last says nothing, as in tiny/target."""
    parts = re.split(r"[/\\]", (model or "").rstrip("/\\"))
    return "/".join(parts[-2:] if parts[-1] in ("target", "draft") else parts[-1:])


def facts(document):
    """What to know of a run, in a few words each: engine, target, draft, dtype, machine, sampling, length."""
    pair, machine = document["pair"], document["machine"]
    name = " ".join(re.sub(r"\((R|TM)\)|\bCPU\b|@.*|\d+-Core.*|Processor", " ", machine["name"]).split())
    name += f", {machine['threads']} threads" if machine["device"] == "cpu" else ""
    how = f"temperature {pair['temperature']:g}" if pair.get("temperature") else "greedy"
    how = (how, f"up to {pair.get('max_new_tokens')} tokens") if pair.get("command") == "showdown" else ("", "")
    draft = f"draft {short(pair['draft'])}" if pair.get("draft") else ""
    return pair.get("engine", "ours"), short(pair.get("target")), draft, pair.get("dtype") or "", name, *how


def words(documents):
    """What all documents have in common, as one text, and for each of them what sets it apart, if anything does."""
    told = [facts(document) for document in documents]
    known = [list(dict.fromkeys(fact for fact in column if fact)) for column in zip(*told, strict=True)]
    title = [column[0] for column in known if len(column) == 1 and column != ["ours"]]
    apart = [", ".join(f for f, k in zip(one, known, strict=True) if f and len(k) > 1) for one in told]
    kinds = [document["pair"].get("command") for document in documents]
    files = [f"file {i}" if kinds.count(kind) > 1 else "" for i, kind in enumerate(kinds, 1)]
    return ", ".join(title), [f"{i}: {text}" if text else files[i - 1] for i, text in enumerate(apart, 1)]
