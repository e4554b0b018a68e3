"""check_setup.py: on this machine, and on machines on which something is missing, too old or damaged."""

import os
import subprocess
import sys
from collections import namedtuple
from importlib import metadata
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

import folders
import model
import pairs
import speculative
from labs import check_setup
from measure import machine

ROOT = Path(__file__).parent.parent
NAMES = list(check_setup.FOUR_BITS)


def only(lines, what):
    (line,) = [line for line in lines if line.what == what]
    return line


def version(monkeypatch, **given):
    """Let these packages have another version, or with None be missing."""

    def fake(name, real=metadata.version):
        if name not in given:
            return real(name)
        if given[name] is None:
            raise metadata.PackageNotFoundError(name)
        return given[name]

    monkeypatch.setattr(metadata, "version", fake)


def test_this_machine(tmp_path):
    """With an empty Hub cache, from another folder: it is ready, says what is missing, and has fetched nothing."""
    command = [sys.executable, str(ROOT / "labs" / "check_setup.py")]
    cache = tmp_path / "cache"
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "HF_HUB_CACHE": str(cache)}, timeout=120,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("ok        * a generation (cpu)") and "the same" in line]
    assert [line for line in lines if line.startswith("missing") and line.endswith(f"hf download {NAMES[0]}")]
    assert lines[-1].startswith("Ready") and not cache.exists()


def test_a_missing_package_of_the_library(monkeypatch, capsys):
    version(monkeypatch, tokenizers=None)
    assert check_setup.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=3) for line in lines if "tokenizers" in line] == [
        ["missing", "*", "tokenizers", "pip install -r requirements.txt"]
    ]
    assert sys.executable in lines[-1] and not any("generation" in line for line in lines)


def test_versions(monkeypatch):
    version(monkeypatch, torch="1.13.1+cu117", safetensors="77.0.0")
    lines = check_setup.packages("requirements.txt", True)
    assert len(lines) == 5
    torch, safetensors = only(lines, "torch"), only(lines, "safetensors")
    assert torch.must and torch.status == "too old" and "1.13.1+cu117, needs " in torch.said
    assert "pip install -r requirements.txt (without a GPU: labs/setup.md, step 2)" in torch.said
    assert not safetensors.must and safetensors.status == "too new" and "77.0.0, needs" in safetensors.said
    assert only(lines, "numpy").status == "ok" and only(lines, "numpy").must


def test_what_a_lab_needs_is_no_must(monkeypatch):
    version(monkeypatch, openai=None)
    lines = check_setup.packages("labs/requirements-labs.txt", False)
    assert only(lines, "openai")[::2] == (False, "missing") and "labs/requirements-labs.txt" in lines[1].said
    assert {line.what for line in lines} == {"transformers", "openai", "gguf", "xllamacpp", "matplotlib"}
    written = (ROOT / "requirements-dev.txt").read_text().splitlines()
    of_labs = (ROOT / "labs" / "requirements-labs.txt").read_text().splitlines()
    for name in ("transformers", "gguf", "xllamacpp", "matplotlib"):  # the ranges that the tests run on
        assert [line for line in written if line.startswith(name)] == [
            line for line in of_labs if line.startswith(name)
        ]


@pytest.mark.parametrize("found, ranges, expected", [
    ("2.13.0+cpu", "==2.13.0", None), ("2.12.1", "==2.13.0", "too old"), ("2.13.1", "==2.13.0", "too new"),
    ("2.4", ">=2.4,<3", None), ("2.3.9", ">=2.4,<3", "too old"), ("3.0.0", ">=2.4,<3", "too new"),
    ("0.10.0", ">=0.8,<0.9", "too new"), ("0.8rc1", ">=0.8", None), ("2.10", ">=2.9", None), ("1.0", "", None),
])  # fmt: skip
def test_ranges(found, ranges, expected):
    assert check_setup.outside(found, ranges) == expected


def test_an_old_python(monkeypatch):
    monkeypatch.setattr(check_setup, "PYTHON", (99, 1))
    (line,) = check_setup.python()
    assert line.must and line.status == "too old" and "install 99.1" in line.said


@pytest.mark.parametrize("capability, status, word", [((7, 5), "too old", "need 8.0"), ((8, 9), "ok", "8.9")])
def test_a_gpu(monkeypatch, capability, status, word):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    (line,) = check_setup.gpu()
    assert line.status == status and word in line.said and "Some GPU" in line.said and not line.must


@pytest.mark.parametrize("cuda, word", [(None, "without CUDA"), ("12.6", "driver is too old for CUDA 12.6")])
def test_a_gpu_that_torch_does_not_see(monkeypatch, cuda, word):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(check_setup.shutil, "which", lambda name: name)
    monkeypatch.setattr(check_setup.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0))
    (line,) = check_setup.gpu()
    assert line.status == "missing" and word in line.said


@pytest.mark.parametrize("free, status", [(1e9, "too small"), (9e9, "ok"), (None, "unknown")])
def test_memory(monkeypatch, free, status):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "free_memory", lambda device: free)
    (line,) = check_setup.memory()
    assert line.status == status and "qwen2.5 in 4 bits needs 4.8" in line.said  # as `bench.py memory` has it


@pytest.mark.parametrize("free, status", [(3e9, "too small"), (13e9, "ok")])
def test_disk(monkeypatch, tmp_path, free, status):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "not" / "yet"))
    usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(check_setup.shutil, "disk_usage", lambda place: usage(0, 0, free if place == tmp_path else 0))
    (line,) = check_setup.disk()
    assert line.status == status and f"{free / 1e9:.0f} GB" in line.said and "not" in line.said


def test_models(monkeypatch, tmp_path):
    """One in the Hub cache, one of its files cut short; 4-bit folders and GGUF files likewise."""
    monkeypatch.setattr(check_setup, "BUILD", tmp_path / "build")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    asked, real = [], model.snapshot_download
    listening = lambda *names, **options: asked.append(options["local_files_only"]) or real(*names, **options)  # noqa: E731
    monkeypatch.setattr(model, "snapshot_download", listening)
    (tmp_path / "build" / "gguf").mkdir(parents=True)
    cached = []
    for name in NAMES:
        place = tmp_path / "cache" / f"models--{name.replace('/', '--')}"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text("abc")
        (place / "snapshots").mkdir()
        cached.append(folders.write(place / "snapshots" / "abc"))
    with open(cached[1] + "/model.safetensors", "r+b") as f:
        f.truncate(1000)
    folders.write(tmp_path / "build" / "qwen2.5-3b-4bit")
    for file, start in zip(check_setup.GGUF, (b"GGUF", b"<!do"), strict=True):
        (tmp_path / "build" / "gguf" / file).write_bytes(start + bytes(100))
    lines = check_setup.models()
    assert [line.status for line in lines] == ["ok", "ok", "damaged", "missing", "ok", "damaged"]
    assert lines[0].said == cached[0] and lines[1].said == str(tmp_path / "build" / "qwen2.5-3b-4bit")
    assert "1000 bytes" in lines[2].said and lines[2].said.endswith("hf download Qwen/Qwen2.5-0.5B-Instruct")
    assert lines[3].said == "python quantize.py Qwen/Qwen2.5-0.5B-Instruct --out build/qwen2.5-0.5b-4bit"
    assert asked == [True, True] and not any(line.must for line in lines)


def test_tools(monkeypatch, tmp_path):
    (tmp_path / "llama-server").write_text("#!/bin/sh\n")
    (tmp_path / "llama-server").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    lines = check_setup.tools()
    assert only(lines, "llama-server").status == "ok"
    assert [line.status for line in lines] == ["ok", "missing", "missing", "missing"]


def test_a_generation_that_differs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rounds = {0: [speculative.Round([1, 2], 0, 0)], 4: [speculative.Round([1, 3], 4, 1)]}
    monkeypatch.setattr(speculative, "speculative_decode", lambda *arguments: rounds[arguments[-1]])
    (line,) = check_setup.generation()
    assert line.must and line.status == "broken" and "NOT the same" in line.said and "1 of 4 drafts" in line.said


def test_a_generation_that_does_not_begin(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(pairs.PAIRS, "tiny", (str(tmp_path), str(tmp_path)))
    assert check_setup.main() == 1
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if "generation" in line]
    assert line.startswith("broken    *") and "config.json is missing" in line and "Not ready" in lines[-1]
