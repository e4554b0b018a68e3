"""What `bench.py memory` says, against arithmetic by hand and against what is allocated."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import folders
from measure import memory
from model import Config, Linear, Qwen2
from quantize import Quantized

ROOT = Path(__file__).parent.parent
NAMES = ("Qwen2.5-3B-Instruct", "Qwen2.5-0.5B-Instruct")
FOLDERS = [str(ROOT / "tests" / "configs" / name) for name in NAMES]


def bench(*arguments):
    command = [sys.executable, str(ROOT / "bench.py"), "memory", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_both_models_of_the_workshop_fit_in_6_gb(tmp_path):
    """The two config.json are all that these folders hold."""
    file = tmp_path / "rows.json"
    done = bench("--target", FOLDERS[0], "--draft", FOLDERS[1], "--json", str(file))
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert any(line.startswith("4 bits, GPU: fits, 2.") for line in lines)
    assert any(line.startswith("16 bits, GPU: ") and line.endswith(" GB short") for line in lines)
    rows = json.loads(file.read_text())["rows"]
    parts, together = {row["part"]: row["4 bits, GPU"] for row in rows[:-1]}, rows[-1]["4 bits, GPU"]
    assert sum(parts.values()) == together < 4e9
    assert parts["caches, 4,096 tokens"] == 4096 * 2 * 2 * (36 * 2 * 128 + 24 * 2 * 64)
    far = bench("--target", FOLDERS[0], "--draft", FOLDERS[1], "--context", "32768", "--gamma", "60").stdout
    assert "caches, 32,768 tokens" in far and "logits, 61 rows" in far


@pytest.mark.parametrize(("folder", "parameters"), zip(FOLDERS, (3_085_938_688, 494_032_768), strict=True))
def test_parameters(folder, parameters):
    """As the Hub gives them, the last norm aside."""
    c = Config.read(folder)
    for bits in (16, 32):
        assert sum(memory.model(c, bits, "cpu")) == (parameters - c.hidden_size) * bits // 8


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("bits", "head_bits"), [(4, 4), (4, 8), (16, 4), (32, 4)])
def test_what_is_planned_is_what_is_allocated(tmp_path, bits, head_bits, tied):
    weights = folders.tensors(vocab_size=640)
    weights |= {} if tied else {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}
    folder = folders.write(tmp_path / "m", weights, vocab_size=640, tie_word_embeddings=tied)
    model, c = Qwen2.load(folder, bits, "cpu", head_bits=head_bits), Config.read(folder)
    layers, head = memory.model(c, bits, "cpu", head_bits)
    embedding = model.embed.weight
    if bits == 4:
        assert isinstance(embedding, Quantized) and embedding.bits == head_bits
        assert head - embedding.data.nbytes == memory.matrix(640, 64, 4, "cpu") == 640 * 64 + 640 * 12
        assert memory.matrix(640, 64, 4, "cuda") == 640 * 64 // 2 + 640 * 2 * 4
        stored = dataclasses.replace(c, quantization_config={"head_bits": head_bits})
        assert memory.model(stored, 4, "cpu") == (layers, head)  # what the folder says is what counts
        on_gpu, codes = memory.model(c, 4, "cuda", head_bits)[1], embedding.data.nbytes
        assert on_gpu == (640 * (64 // 2 + 2 * 4) + codes if head_bits == 4 else 640 * 64 * 2 + codes * (not tied))
    else:
        distinct = {part.data_ptr(): part.nbytes for part in (embedding, model.head.weight)}
        assert sum(distinct.values()) == head
        parts = [part for layer in model.layers for part in vars(layer).values()]
        inside = [value for part in parts for value in (vars(part).values() if isinstance(part, Linear) else [part])]
        assert sum(value.nbytes for value in inside if isinstance(value, torch.Tensor)) == layers
    cache = model.new_cache(100)
    planned = memory.plan([c, c], bits, "cpu", 100, 4)["caches, 100 tokens"]
    assert planned == 2 * (cache.keys.nbytes + cache.values.nbytes)


def test_measured_beside_planned(tmp_path):
    """That it is within a tenth is for a model that is large beside Python: see check_four_bits.py."""
    folder = folders.write(tmp_path / "m")
    done = bench("--target", folder, "--draft", folder, "--measure", "--bits", "4", "--context", "64")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("measured, 4 bits:") == 2 and "planned" in done.stdout


def test_nothing_fits(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory, "free_memory", lambda device: 1_000_000)
    arguments = type("Arguments", (), {"context": 4096, "head_bits": 4, "measure": False, "bits": None})
    memory.report(*FOLDERS, 4, arguments, "cpu")
    assert "Take a shorter --context" in capsys.readouterr().out
    monkeypatch.setattr(memory, "free_memory", lambda device: None)
    for device in ("cpu", "mps"):
        memory.report(*FOLDERS, 4, arguments, device)
    assert "free here" not in capsys.readouterr().out


def test_a_context_without_room(tmp_path):
    done = bench("--target", FOLDERS[0], "--draft", FOLDERS[1], "--measure", "--context", "8", "--gamma", "7")
    assert done.returncode == 2 and "--context 8" in done.stderr and len(done.stderr.splitlines()) == 1
