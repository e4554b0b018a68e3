"""What setup.md and Lab 5 have people fetch, and what they type then: as written, from a Hub on 127.0.0.1 that has the
small pair under the names of the large ones."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hub import environment, serve
from labs import refresh
from pairs import PAIRS

ROOT = Path(__file__).parent.parent
TYPED = ("hf download ", "python quantize.py ", "python labs/lab1.py ")


def commands(*pages):
    """The blocks that nobody runs but the reader, in the reader's order."""
    texts = [(ROOT / "labs" / page).read_text(encoding="utf-8") for page in pages]
    blocks = [refresh.Block(found) for text in texts for found in refresh.BLOCK.finditer(text)]
    return [block.command for block in blocks if block.kind == "yours" and block.command.startswith(TYPED)]


def solved(lab1):
    """Put the solutions into Lab 1's blanks."""
    verify = (ROOT / "measure" / "verify.py").read_text(encoding="utf-8")
    body = re.search(r"^def measure.*\n +\"\"\".*\n((?:    .*\n)+)", verify, re.MULTILINE)[1]
    median = "    return [statistics.median(times) / statistics.median(seconds[0]) for times in seconds]\n"
    source = lab1.read_text(encoding="utf-8")
    for code in (body.replace("tqdm(", "verify.tqdm("), median):
        source, count = re.subn(r"    # >>> your code\n[^<]*# <<<\n", lambda _, code=code: code, source, count=1)
        assert count
    lab1.write_text(source, encoding="utf-8")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A Hub with each repository that the pages name. Yields (url, paths asked for)."""
    folder = tmp_path_factory.mktemp("hub")
    subprocess.run([sys.executable, ROOT / "tiny" / "to_gguf.py", folder], check=True, capture_output=True)
    repositories = {}
    for target, draft in (PAIRS["qwen2.5"], PAIRS["coder"]):
        for name, which in ((target, 0), (draft, 1)):
            repositories[name], ggufs = Path(PAIRS["tiny"][which]), folder / name.split("/")[1]
            ggufs.mkdir()
            file = ggufs / f"{ggufs.name.lower()}-q4_k_m.gguf"
            os.link(folder / ("target.gguf", "draft.gguf")[which], file)
            repositories[f"{name}-GGUF"] = ggufs
    with serve(repositories) as served:
        yield served


def test_what_the_pages_fetch_can_be_fetched_and_used(hub, tmp_path):
    url, asked = hub
    home = tmp_path / "speculative"
    home.mkdir()
    for part in (*ROOT.glob("*.py"), *ROOT.glob("*.txt"), ROOT / "prompts.json"):
        shutil.copy(part, home)
    for part in ("labs", "measure", "variants", "tests/configs"):
        shutil.copytree(ROOT / part, home / part)
    (home / "tiny").symlink_to(ROOT / "tiny")
    (home / "build").mkdir()
    shutil.copy(ROOT / "build" / ".gitignore", home / "build")  # so that a clone has this folder
    solved(home / "labs" / "lab1.py")
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    env = environment(tmp_path / "cache", HF_ENDPOINT=url, PATH=path)

    typed = commands("setup.md", "lab1.md", "lab5.md")
    assert len(typed) == 9
    for command in typed:
        done = subprocess.run(command, shell=True, cwd=home, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{command}: {done.stdout} {done.stderr}"
        if command.startswith("python labs/lab1.py"):
            assert "measure() and verify_cost() are right." in done.stdout and "Verifying 8 tokens" in done.stdout
    fetched = {path for path in asked if "/resolve/" in path}
    assert len([path for path in fetched if path.endswith("model.safetensors")]) == 2  # the GPU's 16 bits
    assert len([path for path in fetched if path.endswith(".gguf")]) == 4

    check = [sys.executable, "labs/check_setup.py"]
    lines = subprocess.run(check, cwd=home, env=env, capture_output=True, text=True, timeout=120).stdout.splitlines()
    models = [line for line in lines if "qwen2.5-" in line.lower()]
    assert len(models) == 6 and all(line.startswith("ok ") for line in models), "\n".join(lines)
