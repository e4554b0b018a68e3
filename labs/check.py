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
    passed = []
    for name, (number, check) in checks.items():
        expected = " ".join(check.__doc__.split())
        try:
            more = check(lab)
        except (Exception, KeyboardInterrupt) as error:
            trace = getattr(error, "trace", ())
            done = {checks[other][0] for other in passed} - {number}
            # Later blanks run with the earlier ones, so an error may be in another blank than the one looked at.
            there = None if isinstance(error, Finding) else blank_of(lab, error, done)
            if there not in (None, number):
                name, (number, check) = next(item for item in checks.items() if item[1][0] == there)
                expected = " ".join(check.__doc__.split())
            print(f"not yet  {name}: {explain(lab, error, number, hints, expected, done)}")
            print("".join(f"\n         {line}".rstrip() for line in trace) + "\n" * bool(trace), end="")
            rest = [other for other in checks if other not in (name, *passed)]
            if rest:
                print(f"         (not looked at until this is right: {', '.join(rest)})")
            return False
        print(f"ok       {name}: {expected}")
        passed.append(name)
        print("".join(f"\n         {line}" for line in more or []) + "\n" * bool(more), end="")
    return True


def explain(lab, error, number, hints, expected, done=()):
    """One line about what a check ran into."""
    line = place(lab, error, done)
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


def last_line(lab, error, done=()):
    """(number of the blank, line), of the last line in the attendee's file that the error came through; or two None.

    done: numbers of blanks that are right, and so are blamed only if there is no other: they were called wrongly.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name != "blank"]
    lines = [frame.lineno for frame in frames if os.path.abspath(frame.filename) == os.path.abspath(lab.__file__)]
    spans = blanks(lab).items()
    own = [(next((n for n, (a, b, _) in spans if a <= line <= b), None), line) for line in lines]
    new = [(number, line) for number, line in own if number not in (None, *done)]
    return (new or own or [(None, None)])[-1]


def place(lab, error, done=()):
    """As labs/lab2.py:47."""
    line = last_line(lab, error, done)[1]
    if line is not None:
        return f"labs/{os.path.basename(lab.__file__)}:{line}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"labs/{os.path.basename(frame.filename)}:{frame.lineno}"


def blanks(lab):
    """{number of a blank: (its first line, its last line, the code between its marks)}"""
    with open(lab.__file__, encoding="utf-8") as f:
        source = f.read()
    found = re.finditer(r"# >>> your code, blank (\d+)\b.*?\n(.*?)# <<<", source, re.DOTALL)
    return {int(m[1]): (1 + source.count("\n", 0, m.start()), 1 + source.count("\n", 0, m.end()), m[2]) for m in found}


def blank_of(lab, error, done=()):
    """The number of the blank that the error came from, or None."""
    return last_line(lab, error, done)[0]


def is_empty(lab, number):
    """Whether there is nothing but comments between the marks of a blank."""
    code = blanks(lab).get(number)
    return code is not None and not re.sub(r"(?m)^\s*#.*$", "", code[2]).strip()


def table(rows):
    """Lines of cells, aligned in columns: [[name, cell, cell, ...]]."""
    rows = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]
