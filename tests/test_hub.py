"""Downloading, with the real Hub client, from a small server on 127.0.0.1 that speaks its protocol."""

import subprocess
import sys
from pathlib import Path

import pytest

import folders
from hub import environment, serve

LOAD = """
from model import Qwen2
model = Qwen2.load("org/tiny", device="cpu")
print(model([1, 2, 3], model.new_cache(3), 1).sum().item())
"""
DEFAULT = """
import pairs, model
pairs.PAIRS["qwen2.5"] = ("org/tiny", "org/tiny")
for _ in range(2):
    print(pairs.default("cpu", None)[0])
    model.find("org/tiny")
"""


@pytest.fixture
def hub(tmp_path):
    """A Hub with one repository, org/tiny, that also has files nobody here needs. Yields (url, paths asked for)."""
    repository = tmp_path / "repository"
    folders.write(repository, shards=2)
    (repository / "README.md").write_text("# tiny")
    (repository / "pytorch_model.bin").write_bytes(b"pickled code")
    with serve({"org/tiny": repository}) as served:
        yield served


def python(code, home, **env):
    root, env = Path(__file__).parent.parent, environment(home, **env)
    return subprocess.run([sys.executable, *code], capture_output=True, text=True, env=env, cwd=root, timeout=120)


def test_download_then_offline(hub, tmp_path):
    url, asked = hub
    first = python(["-c", LOAD], tmp_path / "home", HF_ENDPOINT=url)
    assert first.returncode == 0, first.stderr
    fetched = {path.split("/")[-1] for path in asked if "/resolve/" in path}
    assert {"config.json", "tokenizer.json", "model-00002-of-00002.safetensors"} <= fetched
    assert not fetched & {"README.md", "pytorch_model.bin"}  # only json and safetensors
    asked.clear()
    offline = python(["-c", LOAD], tmp_path / "home", HF_ENDPOINT=url, HF_HUB_OFFLINE="1")  # B54
    assert offline.stdout == first.stdout and asked == [], offline.stderr


def test_what_was_downloaded_is_the_default(hub, tmp_path):
    done = python(["-c", DEFAULT], tmp_path / "home", HF_ENDPOINT=hub[0])
    assert done.stdout.split() == ["tiny", "qwen2.5"], done.stderr


def test_memory_takes_config_files_alone(hub, tmp_path):
    url, asked = hub
    command = ["bench.py", "memory", "--target", "org/tiny", "--draft", "org/tiny"]
    done = python(command, tmp_path / "home", HF_ENDPOINT=url)
    assert done.returncode == 0 and "target, layers" in done.stdout, done.stderr
    assert {path.split("/")[-1] for path in asked if "/resolve/" in path} <= {"config.json", "generation_config.json"}
    loaded = python(["-c", LOAD], tmp_path / "home", HF_ENDPOINT=url)  # what is there does not pass for a whole model
    assert loaded.returncode == 0, loaded.stderr


def test_what_cannot_be_had_is_one_line(hub, tmp_path):
    url, _ = hub
    command = ["bench.py", "--target", "org/tiny", "--draft", "org/tiny"]
    offline = python(command, tmp_path / "home", HF_ENDPOINT=url, HF_HUB_OFFLINE="1")
    assert offline.returncode == 2 and len(offline.stderr.splitlines()) == 1
    assert "HF_HUB_OFFLINE" in offline.stderr and str(tmp_path / "home") in offline.stderr
    unknown = python(["bench.py", "--target", "org/other", "--draft", "org/tiny"], tmp_path / "home", HF_ENDPOINT=url)
    assert unknown.returncode == 2 and len(unknown.stderr.splitlines()) == 1 and "org/other" in unknown.stderr
    nobody = python(command, tmp_path / "home", HF_ENDPOINT="http://127.0.0.1:9")
    assert nobody.returncode == 2 and len(nobody.stderr.splitlines()) == 1 and "org/tiny" in nobody.stderr
