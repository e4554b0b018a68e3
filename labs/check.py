"""What the checkers of Lab 2 and 3 share: do the checks in order, and say of the first that fails what is wrong."""

import os
import re
import traceback


class Finding(Exception):
    """What is wrong, in one line. trace: more lines, that show it."""

    def __init__(self, text, trace=()):
        super().__init__(text)
        self.trace = trace


class Stuck(Exception):
    """Raised by the checkers' models, called more often than any right code would."""


def run(lab, checks, hints):
    """checks: {name: (number of the blank, function(lab))}. hints: {number: how to begin}. Returns whether all passed.

    A check raises Finding, or returns lines to show. What else it raises is an error in the attendee's code, and one
    line about it is shown.
    """
    for i, (name, (number, check)) in enumerate(checks.items()):
        expected = " ".join(check.__doc__.split())
        try:
            more = check(lab)
        except (Exception, KeyboardInterrupt) as error:
            trace = getattr(error, "trace", ())
            print(f"not yet  {name}: {explain(lab, error, number, hints, expected)}")
            print("".join(f"\n         {line}".rstrip() for line in trace) + "\n" * bool(trace), end="")
            rest = list(checks)[i + 1 :]
            if rest:
                print(f"         (not looked at until this is right: {', '.join(rest)})")
            return False
        print(f"ok       {name}: {expected}")
        print("".join(f"\n         {line}" for line in more or []) + "\n" * bool(more), end="")
    return True


def explain(lab, error, number, hints, expected):
    """One line about what a check ran into."""
    line = place(lab, error)
    if isinstance(error, Finding):
        empty = number in hints and is_empty(lab, number)
        return f"blank {number} is still empty. {hints[number]} Without it: {error}" if empty else str(error)
    if isinstance(error, NotImplementedError) and error.args and error.args[0] in hints:
        number = error.args[0]
        return f"blank {number} is still empty ({line}). {hints[number]}"
    if isinstance(error, KeyboardInterrupt):
        return f"you stopped it in {line}. If it hung there: a loop that does not end? Due: {expected}"
    if isinstance(error, Stuck):
        return f"{line}: {error}"
    said = " ".join(str(error).split())[:200]
    return f"{line}: {type(error).__name__}: {said}. Due: {expected}"


def place(lab, error):
    """As labs/lab2.py:47: the last line in the attendee's file that the error came through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name != "blank"]
    own = [frame for frame in frames if os.path.abspath(frame.filename) == os.path.abspath(lab.__file__)]
    frame = (own or frames)[-1]
    return f"labs/{os.path.basename(frame.filename)}:{frame.lineno}"


def is_empty(lab, number):
    """Whether there is nothing but comments between the marks of a blank."""
    with open(lab.__file__, encoding="utf-8") as f:
        code = re.search(rf"# >>> your code, blank {number}\b.*?\n(.*?)# <<<", f.read(), re.DOTALL)
    return code is not None and not re.sub(r"(?m)^\s*#.*$", "", code[1]).strip()


def table(rows):
    """Lines of cells, aligned in columns: [[name, cell, cell, ...]]."""
    rows = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]
