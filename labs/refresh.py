"""Run the commands that the pages show, and write what they print into the pages.

    python labs/refresh.py                            README.md and labs/*.md, the blocks marked offline
    python labs/refresh.py --real TARGET DRAFT        instead the blocks marked real pair, on the pair in these folders

A block is a comment, <!-- offline -->, <!-- real pair --> or <!-- yours -->, and below it ```console, `$ COMMAND` and
its output. yours is never run. A command that is meant to fail says so: <!-- offline, exit 1 -->.
Where the output on the page has a line `...` with 5 lines before and 2 behind it, the new one is cut to its first 5 and
its last 2, or stays whole if it has no more than 7. Without such a line it is written whole.
Of a page with a command that ends otherwise than it should, nothing is changed.
"""

import argparse
import datetime
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from measure.machine import describe  # noqa: E402
from pairs import PAIRS  # noqa: E402

KINDS = ("offline", "real pair", "yours")
BLOCK = re.compile(r"^(?:<!-- ([a-z ]+?)(?:, exit (\d+))? -->\n)?```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FOOT = re.compile(r"\n*^Outputs by labs/refresh\.py, (.*)\n*\Z", re.MULTILINE)


class Block:
    """A ```console block of a page: its kind, command, and shown, the lines below. ValueError if against the rules."""

    def __init__(self, found):
        self.kind, self.exit, self.span = found[1], int(found[2] or 0), found.span(3)
        lines = found[3].splitlines()
        size = next((i for i, line in enumerate(lines, 1) if not line.endswith("\\")), len(lines))
        self.head, self.shown = lines[:size], lines[size:]  # a long command goes on behind a backslash
        self.command = "\n".join(self.head).removeprefix("$ ")
        where = f"the block `{''.join(self.head[:1])}`"
        if self.kind not in KINDS or not found[3].startswith("$ "):
            raise ValueError(f"{where} needs <!-- {' -->, <!-- '.join(KINDS)} --> above, and to begin with $ COMMAND")
        if self.shown.count("...") > 1:
            raise ValueError(f"{where} leaves out two parts of its output: only one line may be `...`")

    def write(self, output):
        """The block's inside with this output, shortened as the one on the page is."""
        if "..." in self.shown:
            first = self.shown.index("...")
            rest = len(output) - len(self.shown) + first + 1
            output = output[:first] + ["..."] + output[rest:] if first < rest else output
        return "\n".join(self.head + output) + "\n"


def run(block, real=None, name="coder"):
    """What a command prints, as lines. Raises ValueError if it does not end as it should, or tells of this machine."""
    command = block.command
    if real:
        pair = "--target {} --draft {}".format(*map(shlex.quote, real))
        command = re.sub(rf"--target {re.escape(name)}(?!\S)", lambda _: pair, command)
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]  # so that `python` is this one
    on = dict.fromkeys(("HF_HUB_OFFLINE", "PYTHONUNBUFFERED", "HF_HUB_DISABLE_PROGRESS_BARS"), "1")
    env = os.environ | on | {"PATH": path}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, shell=True, cwd=ROOT, env=env, text=True, errors="replace", **streams)
    output = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    for folder, hub in zip(real or (), PAIRS[name], strict=bool(real)):
        output = output.replace(folder, hub)
    output = output.replace(f"{ROOT}/", "").replace(str(ROOT), ".")
    lines = [line.rstrip() for line in output.strip("\n").splitlines()]
    if done.returncode != block.exit:
        raise ValueError(f"`{block.command}` ended with {done.returncode}: {' '.join(lines[-3:])[-300:]}")
    for path in re.findall(r"(?<![\w./:])/[\w.+-]+/[\w./+-]+", output):
        if os.path.exists(path) and path not in block.command:
            raise ValueError(f"`{block.command}` prints a path of this machine: {path}")
    return lines


def refresh(page, real=None, name="coder"):
    """The page, a string, with the outputs of its offline blocks, or of those of the real pair, renewed. ValueError."""
    new, blocks, kind = page, [*map(Block, BLOCK.finditer(page))], "real pair" if real else "offline"
    due = [block for block in blocks if block.kind == kind and (not real or f"--target {name}" in block.command)]
    inside = [block.write(run(block, real, name)) for block in due]  # in the reader's order
    for block, lines in zip(reversed(due), reversed(inside), strict=True):  # the places above stay where they are
        new = new[: block.span[0]] + lines + new[block.span[1] :]
    if new == page:
        return page
    machine = describe(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    made = dict(part.split(": ", 1) for part in said[1].split("; ")) if (said := FOOT.search(new)) else {}
    made[kind] = "{name}, {threads} threads, torch {torch}, ".format(**machine) + str(datetime.date.today())
    told = "; ".join(f"{kind}: {made[kind]}" for kind in KINDS if kind in made)
    return FOOT.sub("", new).rstrip("\n") + f"\n\nOutputs by labs/refresh.py, {told}\n"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="*", type=Path, help="default: README.md and labs/*.md")
    parser.add_argument("--real", nargs=2, metavar=("TARGET", "DRAFT"), help="folders, as the Hub has them")
    parser.add_argument("--name", default="coder", choices=[n for n in PAIRS if n != "tiny"], help="which pair that is")
    args = parser.parse_args(argv)
    failed = False
    for path in args.page or [ROOT / "README.md", *sorted((ROOT / "labs").glob("*.md"))]:
        try:
            page, part = path.read_text(encoding="utf-8"), path.with_name(path.name + ".part")
            if (new := refresh(page, args.real, args.name)) != page:
                part.write_text(new, encoding="utf-8")
                os.replace(part, path)
            print(f"{path.name}: {'unchanged' if new == page else 'changed'}", flush=True)
        except (OSError, ValueError) as error:
            print(f"refresh.py: {path.name} is left as it was: {error}", file=sys.stderr)
            failed = True
    sys.exit(2 * failed)


if __name__ == "__main__":
    main()
