"""The files that people copy work alone, and keep to what a reader was promised."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["kv_cache", "speculative", "model", "quantize", "text"])
def test_a_file_imports_alone(tmp_path, name):
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    command = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {name}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_files_are_short():
    files = [*ROOT.glob("*.py"), *ROOT.glob("*/*.py")]
    long = {path.name: count for path in files if (count := len(path.read_text().splitlines())) > 300}
    assert not long
