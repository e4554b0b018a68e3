"""The pages of labs/: what they tell the reader to type runs, and what they point at is there. And what writes them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from labs import refresh

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "labs").glob("*.md"))


def blocks(page):
    return [refresh.Block(found) for found in refresh.BLOCK.finditer(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_run_as_written(page):
    for block in blocks(page):
        if block.kind == "offline":
            refresh.run(block)  # raises unless it ends as the page says


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_block_is_read(page):
    text = page.read_text(encoding="utf-8")
    assert text.count("```console") == len(blocks(page)), "a ```console block is not closed, or not at the line's start"
    for block in blocks(page):
        assert "0.0.0.0" not in block.command, "what serves listens on 127.0.0.1"
        assert block.kind != "yours" or not block.shown or "documentation" in text
        assert block.kind != "real pair" or "--target coder" in block.command or "--target qwen2.5" in block.command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_the_page_points_at_is_there(page):
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\((?!https?:|mailto:)([^)#\s]+)", prose)
    missing = [link for link in links if not (page.parent / link).exists()]
    # Programs in commands and in prose, from the repository's root or, without a folder, from there or from labs/.
    for name in re.findall(r"(?<![\w/.-])((?:labs|tests|tiny|measure|variants)/[\w/]+\.\w+|\w+\.py)\b", text):
        if not [*ROOT.glob(f"{name}*"), *(ROOT / "labs").glob(name)]:  # a name with two dots is found in part
            missing.append(name)
    for module in re.findall(r"python -m (variants\.\w+|pytest)", text):
        if module != "pytest" and not (ROOT / (module.replace(".", "/") + ".py")).exists():
            missing.append(module)
    assert not missing


# refresh.py


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def called(*args):
    command = [sys.executable, str(ROOT / "labs" / "refresh.py"), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT.parent)
    return done.returncode, done.stdout, done.stderr


def block(command, *output, kind="offline"):
    return [f"<!-- {kind} -->", "```console", f"$ {command}", *output, "```"]


COUNT = """python -c "print(*range(9), sep='\\n')" """.strip()


def test_refresh_writes_the_outputs_and_then_has_nothing_to_do(tmp_path):
    root = """python -c "import os; print(os.getcwd()); print(os.path.abspath('README.md'))" """.strip()
    more = [*block(COUNT, "x", "...", *"abcdefgh"), *block("echo no", "kept", kind="yours"), "the end"]
    first = ["# A", "", *block(COUNT, "x", "y", "...", "z"), "between", *block(root, "old")]
    order = [*block(f"echo first > {tmp_path}/x"), *block(f"cat {tmp_path}/x")]
    page = write(tmp_path / "a.md", *first, *more, *order)
    status, said, _ = called(page)
    assert (status, said) == (0, "a.md: changed\n")
    text = page.read_text(encoding="utf-8")
    assert text.startswith("\n".join(["# A", "", *block(COUNT, "0", "1", "...", "8"), "between", ""]))
    assert "\n".join(block(root, ".", "README.md")) in text  # the root leaves no trace
    assert "\n".join(block(COUNT, *"012345678")) in text  # 1 + 8 lines are all there are
    assert "\n".join(block("echo no", "kept", kind="yours")) in text
    assert f"$ cat {tmp_path}/x\nfirst\n" in text  # the blocks are run from top to bottom
    *_, blank, foot = text.splitlines()
    assert not blank and re.fullmatch(
        r"Outputs by labs/refresh\.py, offline: .+ threads, torch .+, \d{4}-\d\d-\d\d", foot
    )
    text = text[: -len("2026-11-30\n")] + "2020-01-02\n"  # the outputs are still those of that day
    page.write_text(text, encoding="utf-8")
    assert called(page)[:2] == (0, "a.md: unchanged\n") and page.read_text(encoding="utf-8") == text


def test_a_command_that_fails_changes_nothing(tmp_path):
    bad = write(tmp_path / "bad.md", *block("echo new", "old"), *block("echo oops; exit 3", "old"))
    good = write(
        tmp_path / "good.md", *block("echo new", "old"), *block("echo wrong; exit 1", "old", kind="offline, exit 1")
    )
    before = bad.read_text(encoding="utf-8")
    status, said, error = called(bad, good)
    assert (status, said) == (2, "good.md: changed\n") and bad.read_text(encoding="utf-8") == before
    assert "bad.md is left as it was: `echo oops; exit 3` ended with 3: oops" in error and "Traceback" not in error
    assert "\nnew\n" in good.read_text(encoding="utf-8") and "\nwrong\n" in good.read_text(encoding="utf-8")
    assert sorted(os.listdir(tmp_path)) == ["bad.md", "good.md"]


def test_the_real_pair_is_run_and_not_shown(tmp_path):
    pair = [tmp_path / "big", tmp_path / "small"]
    for folder in pair:
        folder.mkdir()
    page = write(tmp_path / "a.md", *block("echo --target coder --bits 4", "old", kind="real pair"),
                 *block("echo --target qwen2.5", "old", kind="real pair"), *block("echo no", "old"))  # fmt: skip
    status, said, error = called("--real", *pair, page)
    assert (status, said) == (0, "a.md: changed\n"), error
    shown = "--target Qwen/Qwen2.5-Coder-1.5B-Instruct --draft Qwen/Qwen2.5-Coder-0.5B-Instruct --bits 4"
    text = page.read_text(encoding="utf-8")
    assert f"$ echo --target coder --bits 4\n{shown}\n" in text and str(tmp_path) not in text
    assert "$ echo --target qwen2.5\nold\n" in text and "$ echo no\nold\n" in text  # another pair, another kind
    page.write_text(text[: -len("2026-11-30\n")] + "2020-01-02\n", encoding="utf-8")
    called(page)
    foot = page.read_text(encoding="utf-8").splitlines()[-1]
    assert re.search(r"offline: .*; real pair: .*, 2020-01-02$", foot)  # each kind has its own machine and date


@pytest.mark.parametrize("lines, says", [
    (["```console", "$ echo a", "```"], "needs <!-- offline -->"),
    (["<!-- online -->", "```console", "$ echo a", "```"], "needs <!-- offline -->"),
    (["<!-- offline -->", "```console", "echo a", "```"], "begin with $ COMMAND"),
    (block("echo a", "...", "b", "..."), "only one line"),
    (block("echo /usr''/bin", "x"), "a path of this machine: /usr/bin"),
])  # fmt: skip
def test_a_page_against_the_rules_is_refused(tmp_path, lines, says):
    page = write(tmp_path / "a.md", *lines)
    before = page.read_text(encoding="utf-8")
    status, _, error = called(page)
    assert status == 2 and says in error and len(error.splitlines()) == 1
    assert page.read_text(encoding="utf-8") == before
