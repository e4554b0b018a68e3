"""Other engines in the showdown's table: the same prompts, text after text in turn with our plain decoding."""

import statistics

from huggingface_hub.utils import tqdm

from measure import showdown, table

WHO = {
    "transformers": "plain is ours, and hf what transformers does: alone, with the draft model, and with prompt lookup",
    "server": "plain is ours, and server what answers at --url, in this order",
}
LEGEND = """
mode       {who}
tok/s      tokens a second behind the first round, so without reading the prompt. The median of {repeat}
speed-up   over the first row of the same engine, text after text in turn
accept     accepted / drafted, where the engine tells; tok/round also counts the token that it adds itself
same       texts that are those of our plain decoding, token for token, or for a server letter for letter. Weights that
           are rounded otherwise, as those of a GGUF file can be, may write another text
"""


def peers(target, text, engine, writers, asked, args):
    """Measure {mode: write}, as labs/engines.py has them, on the prompts {domain: [ids]}. Prints the table. Returns
    its rows, and what --json adds to "pair" and "machine"."""
    eos, repeat, rows = target.config.eos, args.repeat or 1, []
    ours = showdown.Mode("plain", 0, None)
    for write in writers.values():  # the first time is slower than all others
        write(next(iter(asked.values()))[0], min(16, args.max_new_tokens), eos)
    print(table.HEADER)
    steps = (1 + len(writers)) * repeat * sum(map(len, asked.values()))
    with tqdm(total=steps, desc="decoding", unit="text", disable=None, leave=False) as bar:
        for domain, prompts in asked.items():
            written = {mode: [[] for _ in range(repeat)] for mode in ("ours", *writers)}  # [repeat][prompt]
            for repetition in range(repeat):
                for ids in prompts:
                    (run,) = showdown.race(target, [ours], ids, args)
                    written["ours"][repetition].append(run)
                    for mode, write in writers.items():
                        written[mode][repetition].append(write(ids, args.max_new_tokens, eos))
                        bar.update()
                    bar.update()
            plain, base = written.pop("ours"), written[next(iter(writers))]
            tokens = sum(len(round.tokens) for run in plain[0] for round in run.rounds)
            speeds = [showdown.speed([runs]) for runs in plain]
            rows.append(row(domain, "ours", "plain", tokens, speeds, speeds, None, None))
            bar.write(table.line(rows[-1]))
            for mode, runs in written.items():
                drafts = [[getattr(one, name) for one in runs[0]] for name in ("drafted", "accepted")]
                drafted, accepted = (None if None in some else sum(some) for some in drafts)
                tokens, speeds, usual = (sum(one.tokens for one in runs[0]), *map(rates, (runs, base)))
                mode = f"hf {mode}" if engine == "transformers" else mode
                rows.append(row(domain, engine, mode, tokens, speeds, usual, drafted, accepted))
                same = 0
                for run, one in zip(plain[0], runs[0], strict=True):
                    same += one.ids == run.ids if one.ids else one.text == text.decode(run.ids)
                rows[-1] |= {"same": same, "texts": len(prompts), "identical": same == len(prompts)}
                bar.write(table.line(rows[-1]))
    print(LEGEND.format(repeat="one run" if repeat == 1 else f"{repeat} runs", who=WHO[engine]))
    return rows, {"repeat": repeat}, {}


def rates(runs):
    """Tokens a second of each repetition."""
    return [sum(one.tokens for one in some) / max(sum(one.seconds for one in some), 1e-9) for some in runs]


def row(domain, engine, mode, tokens, speeds, usual, drafted, accepted):
    """As the showdown's, with None for what another engine does not tell."""
    ratios = sorted(a / b if b else 0.0 for a, b in zip(speeds, usual, strict=True))
    rounds = tokens if engine == "ours" else None if accepted is None else tokens - accepted
    return {
        "domain": domain,
        "engine": engine,
        "mode": mode,
        "gamma": 0 if mode == "plain" else None,
        "tokens": tokens,
        "rounds": rounds,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "tokens_per_round": tokens / rounds if rounds else None,
        "tokens_per_second": statistics.median(speeds),
        "speedup": statistics.median(ratios),
        "speedup_low": ratios[0],
        "speedup_high": ratios[-1],
        "predicted_speedup": None,
        "cost_ratio": None,
        "identical": None,
    }
