"""Four bits, and eight for a head: codes, models and folders. The matrices are small, the arithmetic is all of it."""

import json
import os
import struct
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import folders
import quantize
from model import Qwen2
from quantize import Int8, Quantized, Weights
from speculative import DraftModel
from toys import decode, random, relative

ROOT = Path(__file__).parent.parent


def one_row(codes, zero=128):
    """With steps of 1 and the zero at 8, a code stands for itself less 8."""
    data = [*codes, 0, zero, *struct.pack("f", 1.0)]
    return Quantized(torch.tensor([data], dtype=torch.uint8), 2 * len(codes), 2 * len(codes))


def round_to_nearest(weight, group):
    x = weight.reshape(len(weight), -1, group)
    low, high = x.amin(-1, True), x.amax(-1, True)
    step = (high - low) / 15
    return (((x - low) / step).round() * step + low).reshape_as(weight)


# Codes


def test_the_low_half_comes_first():  # B43
    assert one_row([240, 135])[:].tolist() == [[-8, 7, -1, 0]]
    every = one_row(list(range(256)))[:][0].tolist()
    assert every == [half - 8 for byte in range(256) for half in (byte % 16, byte // 16)]


def test_eight_bits_are_a_byte_each():
    data = torch.tensor([[240, 135, 0, 255, 16, 128, *struct.pack("f", 1.0)]], dtype=torch.uint8)
    assert Quantized(data, 4, 4, 8)[:].tolist() == [[56, 3.5, -64, 63.5]]  # a scale of 16 is an octave down


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_stored_is_what_was_chosen(bits):
    """A weight that the format can hold is held."""
    codes = torch.randint(2**bits, (64, 3, 32), generator=torch.Generator().manual_seed(0))
    codes[:, :, 0], codes[:, :, 1] = 0, 2**bits - 1
    zero = torch.randint(2**bits, (64, 3, 1), generator=torch.Generator().manual_seed(1))
    weight = ((codes - zero) * 2.0 ** -torch.arange(3).view(3, 1)).view(64, 96)
    matrix = quantize.quantize(weight, bits=bits)
    torch.testing.assert_close(matrix[:], weight, atol=1e-5, rtol=1e-5)
    assert torch.equal(matrix[torch.tensor([5, 5, 0])], matrix[:][[5, 5, 0]])


@pytest.mark.parametrize("group", [32, 64, 128])
def test_bytes(group):
    for out, columns in [(896, 896), (128, 1536), (64, 4864)]:
        matrix = quantize.quantize(random(out, columns), group)
        size = matrix.data.nbytes
        assert size == out * columns // 2 + 2 * out * columns // group + 4 * out
        assert size * 8 / (out * columns) < 4.6
        assert matrix[:].shape == (out, columns)


def test_close_to_the_best_there_is():
    """Against all of the 65,536 pairs of a scale and a zero, for groups of several kinds."""
    g = torch.Generator().manual_seed(3)
    steps, zeros = torch.exp2(torch.arange(256) / -16).view(-1, 1, 1), torch.arange(256).view(1, -1, 1) / 16
    for x in (random(16, 32), torch.rand(16, 32, generator=g), random(16, 32).sign() * random(16, 32) ** 4 - 0.3):
        matrix, best = quantize.quantize(x), 0
        for row in range(16):
            scales = steps * matrix.row[row] * 1.2
            codes = (x[row] / scales + zeros).round().clamp(0, 15)
            best += ((codes - zeros) * scales - x[row]).square().sum(-1).min()
        assert (matrix[:] - x).square().sum() < 1.1 * best


def test_less_error_than_rounding_to_nearest():
    weight = random(64, 512)
    ours = relative(quantize.quantize(weight)[:], weight)
    assert ours < 0.82 * relative(round_to_nearest(weight, 64), weight)
    assert ours < 0.94 * relative(round_to_nearest(weight, 32), weight)  # whose scale and offset are not rounded
    assert relative(quantize.quantize(weight, 64)[:], weight) > 1.1 * ours
    eight = quantize.quantize(weight, bits=8)
    assert relative(eight[:], weight) < ours / 14 and eight.data.nbytes == 64 * (512 + 2 * 16 + 4)


@pytest.mark.parametrize("bits, most", [(4, 1.0), (8, 0.06)])  # most: of the error of 4 bits
def test_groups_of_all_kinds(bits, most):  # B42
    weight = random(8, 128)
    weight[0] = 0
    weight[1, 32:64] = 0
    weight[2] = weight[2].sign() * 1e-7
    weight[3], weight[4, :32] = 5.0, -3.0
    weight[5, 7] = 1e4
    weight[6] = 1e-40 * weight[6].sign()
    weight[7] *= 1e-3
    values = quantize.quantize(weight, bits=bits)[:]
    assert values.isfinite().all()
    assert (values[0] == 0).all() and (values[1, 32:64] == 0).all()
    for rows in (slice(2, 3), slice(3, 4), slice(7, 8)):
        assert relative(values[rows], weight[rows]) < 0.09 * most
    torch.testing.assert_close(values[4, :32], weight[4, :32], rtol=0.03 * most, atol=0)
    assert abs(values[5, 7] / 1e4 - 1) < 0.05 * most and values[6].abs().max() < 1e-38
    assert relative(values[5, 32:], weight[5, 32:]) < 0.25 * most  # groups beside that of an outlier keep their shape


def test_columns_that_are_no_multiple_of_the_group():  # B41
    weight, x = random(48, 100), random(3, 100)
    matrix = quantize.quantize(weight, 64)
    assert matrix.data.shape == (48, 64 + 2 * 2 + 4) and matrix[:].shape == (48, 100)
    assert relative(matrix[:], weight) < 0.13
    assert relative(Int8(matrix)(x), x @ matrix[:].t()) < 0.02
    for how in ((33, 4), (32, 5)):
        with pytest.raises(ValueError, match=f"groups of {how[0]}, {how[1]} bits.*32, 64 or 128, 4 or 8 bits"):
            quantize.quantize(weight, *how)


# Models and folders


def bfloat16(folder, **config):
    weights = {name: weight.bfloat16() for name, weight in folders.tensors(**config).items()}
    return folders.write(folder, weights, **config)


def logits(path, rows=24, **options):
    model = Qwen2.load(str(path), device="cpu", **options)
    return model(torch.arange(rows) % 250, model.new_cache(rows), rows)


def save(source, out, *more):
    command = [sys.executable, str(ROOT / "quantize.py"), str(source), "--out", str(out), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_in_4_bits(tmp_path, bits):
    """Its logits are those of a model whose weights are what the codes stand for, up to the rounding of activations."""
    source = bfloat16(tmp_path / "m")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    plain = {n: quantize.quantize(w)[:] if w.dim() == 2 else w.float() for n, w in weights.items()}
    name, how = "model.embed_tokens.weight", {"bits": 4, "head_bits": bits}
    plain[name] = quantize.quantize(weights[name], bits=bits)[:]
    right = logits(folders.write(tmp_path / "plain", plain), bits=32)
    ours, unlike = logits(source, **how), logits(source, bits=32)
    assert relative(ours, right) < 0.05 < relative(ours, unlike)
    model = Qwen2.load(source, device="cpu", **how)
    assert model.head is model.embed  # B44: one matrix serves both
    assert torch.equal(model.embed.weight[torch.tensor([3])], plain[name][3:4])
    both = weights | {"lm_head.weight": weights[name].clone()}
    untied = folders.write(tmp_path / "u", both, tie_word_embeddings=False)
    assert torch.equal(logits(untied, **how), ours)


def test_a_kernel_for_4_bits_alone(tmp_path, monkeypatch):
    """What it cannot take is kept as the model's numbers: a head in 8 bits, and 96 columns."""
    source = bfloat16(tmp_path / "m", hidden_size=128)
    monkeypatch.setattr(quantize, "kernel", lambda *_: quantize.Reference)
    right = logits(source, bits=4, head_bits=8)
    monkeypatch.setattr(quantize, "kernel", lambda *_: quantize.Int4Pack)
    with pytest.warns(UserWarning, match="no kernel for .* in . bits: it is kept in torch.float32") as said:
        model = Qwen2.load(source, 4, "cpu", head_bits=8)
    assert {str(warning.message).split(": it is")[0].split(".")[-1] for warning in said} == {
        "embed_tokens: no kernel for 320 x 128 in 8 bits", "down_proj: no kernel for 128 x 96 in 4 bits"}  # fmt: skip
    assert relative(model(torch.arange(24), model.new_cache(24), 24), right) < 0.01
    assert model.head.weight.shape == (320, 128) and isinstance(model.layers[0].qkv, quantize.Int4Pack)


@pytest.mark.parametrize("gamma", [1, 3, 7])
def test_speculation_changes_no_token(tmp_path, gamma):
    target = Qwen2.load(bfloat16(tmp_path / "m"), bits=4, device="cpu")
    draft = Qwen2.load(bfloat16(tmp_path / "d", num_hidden_layers=1), bits=4, device="cpu")
    for prompt in ([1, 2, 3], [200], list(range(100, 140))):
        plain, _ = decode(target, None, prompt, 60, 0)
        assert decode(target, DraftModel(draft, 128), prompt, 60, gamma)[0] == plain


@pytest.mark.parametrize(("bits", "config"), [(4, {}), (8, {}), (4, {"hidden_size": 48}), (8, {"hidden_size": 48})])
def test_a_saved_folder_is_the_same_model(tmp_path, bits, config):
    source, out = bfloat16(tmp_path / "m", **config), tmp_path / "out"
    done = save(source, out, *["--head-bits", "8"] * (bits == 8))
    assert done.returncode == 0, done.stderr
    assert "layer 0" in done.stdout and "down" in done.stdout and "MB" in done.stdout
    assert torch.equal(logits(out), logits(source, bits=4, head_bits=bits))
    assert f"model.embed_tokens.{bits}bit" in load_file(out / "model.safetensors")
    assert {*os.listdir(out)} == {*os.listdir(source)} and {*os.listdir(tmp_path)} == {"m", "out"}
    again = save(source, out)
    assert again.returncode == 2 and "exists" in again.stderr and "Traceback" not in again.stderr
    twice = save(out, tmp_path / "twice")
    assert twice.returncode == 2 and "4-bit weights already" in twice.stderr
    for folder, how in ((out, {"bits": 16}), (source, {"bits": 16, "head_bits": 8}), (source, {"head_bits": 8})):
        with pytest.raises(ValueError, match="must be 4"):
            logits(folder, **how)
    with pytest.raises(ValueError, match=f"with head_bits {bits}, not {12 - bits}") if bits == 4 else nullcontext():
        logits(out, head_bits=12 - bits)  # 4, the default, is no wish


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def test_the_number_of_threads_changes_no_bit(tmp_path, threads):
    source, found = bfloat16(tmp_path / "m"), []
    for number in (1, 2, 3, 9):
        torch.set_num_threads(number)
        model = Qwen2.load(source, bits=4, device="cpu")
        torch.set_num_threads(threads)
        found.append(model(torch.arange(24), model.new_cache(24), 24))
    assert all(torch.equal(other, found[0]) for other in found)


def test_two_parts_at_a_time_each_on_one_thread(threads):
    def job():
        both.wait(20)
        return torch.get_num_threads(), threading.current_thread()

    def fail():
        raise ValueError("third")

    both, after = threading.Barrier(2), []
    torch.set_num_threads(2)
    (one, first), (two, second) = Weights.map(None, [job, job])
    assert one == two == 1 and first is not second
    with pytest.raises(ValueError, match="third"):
        list(Weights.map(None, [lambda: 1, lambda: 2, fail, lambda: 4]))
    new = threading.Thread(target=lambda: after.append(torch.get_num_threads()))
    new.start()
    new.join()
    assert after == [2] and torch.get_num_threads() == 2


def test_another_group(tmp_path):
    source, out = bfloat16(tmp_path / "m"), tmp_path / "out"
    assert save(source, out, "--group", "64").returncode == 0
    stored = load_file(out / "model.safetensors")
    assert stored["model.layers.1.mlp.down_proj.4bit"].shape == (64, 64 + 2 * 2 + 4)  # 96 columns, filled up to 128
    assert relative(logits(out), logits(source, bits=4)) > 0.01


def test_interrupted(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(quantize, "save_file", fail)
    with pytest.raises(KeyboardInterrupt):
        quantize.save(bfloat16(tmp_path / "m"), str(tmp_path / "out"))
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: torch.cat([data[:, :-4], torch.full_like(data[:, -4:], 255)], 1), "damaged"),  # row is NaN
        (lambda data: data.half(), "damaged"),
        (lambda data: data[:, 1:], "shape"),
        (lambda data: data[1:], "shape"),
        (lambda data: data[:, :0], "shape"),
        (lambda data: data[0, 0], "shape"),
        (lambda data: None, "missing"),
    ],
)
def test_a_damaged_folder(tmp_path, change, message):
    quantize.save(bfloat16(tmp_path / "m"), str(tmp_path / "out"))
    file, name = tmp_path / "out" / "model.safetensors", "model.layers.1.mlp.down_proj.4bit"
    stored = load_file(file)
    stored[name] = change(stored[name])
    save_file({n: t.contiguous() for n, t in stored.items() if t is not None}, file)
    with pytest.raises(ValueError, match=rf"model.layers.1.mlp.down_proj.*{message}|{message}.*down_proj"):
        logits(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    for foreign in ({"group_size": 0}, {"head_bits": 5}, {"head_bits": "8"}):
        wrong = config | {"quantization_config": config["quantization_config"] | foreign}
        (tmp_path / "out" / "config.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=f"{next(iter(foreign))} .* or "):
            logits(tmp_path / "out")


def test_a_folder_of_another_program(tmp_path):
    folder = bfloat16(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ValueError, match="quantization_config"):
        logits(folder, bits=4)
