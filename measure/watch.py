"""Watch speculative decoding: the text as it comes, each token in the colour of who wrote it.

On a terminal the last row shows the numbers so far, and the text scrolls above it. Elsewhere there is only the text,
and the summary behind it. No colour if NO_COLOR is set (no-color.org), no escapes at all if TERM is dumb.
"""

import os
import signal
import sys
import time
from collections import Counter
from unicodedata import category, east_asian_width

import torch

from speculative import DraftModel, speculative_decode
from text import Stream

# The correction is underlined, too: not everybody tells green from yellow.
COLOURS = {"drafted and kept": "32", "correction of a draft": "4;33", "the target's own": "36"}
CONTROL = dict.fromkeys((*range(32), *range(127, 160)), "\ufffd") | {9: "\t", 10: "\n", 13: None}


class Screen:
    """Where the text goes, and the status line. That is drawn between two pieces of text: the cursor must come back."""

    def __init__(self):
        self.tty, self.size, self.column = sys.stdout.isatty(), None, 0
        self.escapes = self.tty and os.environ.get("TERM") != "dumb"
        self.coloured = self.escapes and not os.environ.get("NO_COLOR")
        if self.escapes and os.name == "nt":
            os.system("")  # after this an older Windows console understands escapes

    def paint(self, piece, style):
        return f"\033[{style}m{piece}\033[0m" if self.coloured and piece else piece

    def write(self, piece, kind):
        piece = piece.translate(CONTROL) if self.tty else piece  # a terminal would obey an escape in the text
        for char in piece if self.size else "":
            cells = 0 if category(char) in ("Mn", "Me", "Cf") else 2 if east_asian_width(char) in "WF" else 1
            end = self.column + (8 - self.column % 8 if char == "\t" else cells)
            self.column = 0 if char == "\n" else end if end <= self.size.columns else cells
        print(self.paint(piece, COLOURS[kind]), end="", flush=True)

    def status(self, line):
        """Draw the line into the last row, if there are more than 3. The window may have another size each time."""
        # Behind a full row the cursor waits to wrap. Some terminals forget that when they restore it: not now, then.
        if not self.escapes or (self.size and 0 < self.size.columns == self.column):
            return
        if (size := os.get_terminal_size(sys.stdout.fileno())) != self.size:
            self.size = size  # clear what is below the text, and leave the last row before it leaves what scrolls
            region = f"\033D\033[A\0337\033[1;{size.lines - 1}r\0338" if size.lines > 3 else ""
            print(f"\0337\033[r\0338\033[J{region}", end="")
        if size.lines > 3:
            print(f"\0337\033[{size.lines}H\033[2K{self.paint(line[: size.columns - 1], 7)}\0338", end="", flush=True)

    def finish(self, fast, plain):
        """End the text's last line, give the whole screen back, and print the summary."""
        print("\033[0m" * self.coloured + ("\0337\033[r\0338\n\033[J" if self.size else "\n"))  # Ctrl-C may cut one off
        counts = (self.paint(f"{kind}: {fast[kind]}", style) for kind, style in COLOURS.items())
        print(f"{fast['tokens']} tokens in {fast['rounds']} rounds\n{', '.join(counts)}\nspeculative: {rates(fast)}")
        print(f"plain decoding, afterwards: {rates(plain)}")
        if fast["timed"] and plain["timed"]:
            ratio = fast["timed"] / fast["seconds"] * plain["seconds"] / plain["timed"]
            print(f"ratio: {ratio:.2f}, from this one text. python bench.py measures it with care")
        print("No speed counts the first round, which reads the prompt, nor printing.", flush=True)


def follow(rounds, seen):
    """Count each Round in the Counter `seen`, and pass it on as [(id, kind)]. Printing meanwhile is not timed."""
    (kept, correction, own), start = COLOURS, time.perf_counter()
    for round in rounds:  # each ends with a host synchronisation, so the clock is right on a GPU, too
        if seen["rounds"]:  # the first one reads the prompt
            seen.update(seconds=time.perf_counter() - start, timed=len(round.tokens))
        last = correction if round.accepted < round.drafted else own
        kinds = [kept if i < round.accepted else last for i in range(len(round.tokens))]
        seen.update(kinds, rounds=1, tokens=len(kinds), drafted=round.drafted, accepted=round.accepted)
        yield zip(round.tokens, kinds, strict=True)
        start = time.perf_counter()


def rates(seen):
    kept, per_round = seen["accepted"] / (seen["drafted"] or 1), seen["tokens"] / (seen["rounds"] or 1)
    drafts = f"{kept:.0%} of {seen['drafted']} drafts kept, {per_round:.2f} tokens a round, " if seen["drafted"] else ""
    speed = f"{seen['timed'] / seen['seconds']:.2f} tokens/s ({seen['timed']} timed)" if seen["timed"] else "not timed"
    return drafts + speed


def watch(pair, text, prompt, gamma, args, drafter=None):
    """Decode the prompt, the text appearing as it comes; then plainly again, up to 17 tokens of it, to compare.

    pair: target, draft. text: the target's Text. args: temperature, top_k, top_p, seed, max_new_tokens. drafter: one
    for this prompt and so many tokens. Default: the draft model. gamma "auto" asks it for up to 64 tokens a round.
    Ctrl-C prints the summary so far and raises KeyboardInterrupt. ValueError for a prompt that is empty or too long.
    """
    ids, limit, (target, draft) = text.prompt(prompt), args.max_new_tokens, pair
    if len(ids) >= (context := target.config.max_position_embeddings):
        raise ValueError(f"the prompt has {len(ids)} tokens and the context only {context}: shorten it")
    sampling = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    sampling["generator"] = torch.Generator(target.device).manual_seed(args.seed)
    vocab = min(target.config.vocab_size, draft.config.vocab_size)
    drafter = drafter or DraftModel(draft, len(ids) + limit, vocab=vocab, **sampling)
    most, how = 64 if gamma == "auto" else gamma, sampling | {"eos": target.config.eos}
    screen, stream, fast, plain = Screen(), Stream(text), Counter(), Counter()
    try:
        if screen.coloured:
            print(", ".join(map(screen.paint, COLOURS, COLOURS.values())), end="\n\n")
        screen.status(f"reading the prompt, {len(ids)} tokens")
        for tokens in follow(speculative_decode(target, drafter, ids, limit, most, **how), fast):
            for id, kind in tokens:
                screen.write(stream.feed(id), kind)
            screen.status(rates(fast))
        screen.write(stream.finish(), kind)
        for _ in follow(speculative_decode(target, None, ids, min(limit, 17), 0, **how), plain):
            screen.status(f"plainly, to compare: {rates(plain)}")
    finally:
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not stop the tidying up
        screen.finish(fast, plain)
        signal.signal(signal.SIGINT, interrupt)
