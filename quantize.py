"""Weights in 4 bits, by hand: how they are found, how they are stored, and how they are multiplied with.

    python quantize.py MODEL --out DIR      from a folder or Hub id to one of 0.28 times the size

A token reads every weight once, so on most machines decoding is as fast as the weights are small. Each row of a matrix
is cut into groups of 32, and a group has a scale and a zero of its own (a byte each):

    weight = row * 2^(-scale / 16) * (code - zero / 16)      code 0 .. 15, scale and zero 0 .. 255, row a float32

That is 4.5 bits a weight, and 32 more a row. The scale counts down from the row's largest in sixteenths of an octave,
so that an outlier costs its own group and no other (until `Int8` rounds a whole row once more). No data is looked at.
With --head-bits 8 the head and the embedding, often the same matrix, have codes 0 .. 255 and the zero as it is.
"""

import argparse
import functools
import json
import math
import os
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from huggingface_hub.utils import tqdm
from safetensors import SafetensorError
from safetensors.torch import save_file

GROUP = 32  # the largest that is below round-to-nearest by a quarter; 16 would cost 5.0 bits
TINY = torch.finfo(torch.float32).tiny
STEP = torch.exp2(torch.arange(256) / -16)  # looked up, as exp2 has other last bits where it fills no vector register
# H [32, 32] of +-1, with H = H^T and H H^T = 32. Its upper left corners are those of 16, 8, 4, 2 and 1.
HADAMARD = functools.reduce(torch.kron, [torch.tensor([[1.0, 1.0], [1.0, -1.0]])] * 5)
warnings.filterwarnings("ignore", "torch.quantize_per_tensor")  # deprecated, but the one way to the kernel of Int8


class Quantized:
    """A matrix [out, columns] in 4 or 8 bits. matrix[ids] gives rows in float32, as an embedding does.

    data [out, bytes], uint8, in each row: the codes, of 4 bits two a byte, the low half first; the scales, then the
    zeros of all groups; and `row`, a float32. A last group that is not full is filled up."""

    def __init__(self, data, columns, group=GROUP, bits=4):
        self.data, self.columns, self.group, self.bits, groups = data, columns, group, bits, -(-columns // group)
        self.codes, self.scale, self.zero, row = data.split([groups * group * bits // 8, groups, groups, 4], 1)
        self.row, self.steps = row.flatten().clone().view(torch.float32)[:, None], STEP.to(data.device)  # [out, 1]

    def __getitem__(self, ids):
        scale = self.steps[self.scale[ids].int()] * self.row[ids]  # [n, groups]
        codes, zero = self.codes[ids], self.zero[ids, :, None] / (256 >> self.bits)
        if self.bits == 4:
            codes = (codes.short() | codes.short() << 4).bitwise_and_(0x0F0F).view(torch.uint8)  # halves to bytes
        return (codes.view(*scale.shape, -1) - zero).mul_(scale[:, :, None]).flatten(1)[:, : self.columns]


def quantize(weight, group=GROUP, bits=4):
    """A Quantized of weight [out, in], any float dtype. For each group the range is tried in several widths, as ggml's
    k-quants do: rounding to 16 levels of a narrower range is finer, and cuts off more. After each rounding the best
    scale and zero for these codes are those of a linear regression (HQQ refits its zero the same way). What has the
    least squared error is kept."""
    if group not in (32, 64, 128) or bits not in (4, 8) or not weight.is_floating_point():
        raise ValueError(f"groups of {group}, {bits} bits, {weight.dtype}: only 32, 64 or 128, 4 or 8 bits, and floats")
    data = [quantize_rows(rows, group, bits) for rows in weight.split(2**19 // weight.shape[1] or 1)]  # fits in a cache
    return Quantized(torch.cat(data), weight.shape[1], group, bits)


def quantize_rows(weight, group, bits):
    top, parts = 2**bits - 1, 256 >> bits  # the highest code, and in how many parts of a step the zero is rounded
    x = F.pad(weight.float(), (0, -weight.shape[1] % group)).view(len(weight), -1, group)  # [out, groups, group]
    low, high = x.amin(-1, True).clamp(max=0), x.amax(-1, True).clamp(min=0)  # 0 is always in the range
    options = []
    for width in (1.0, 0.95, 0.9, 0.85, 0.8, 0.7):
        scale = ((high - low) * (width / top)).clamp(min=TINY)  # [out, groups, 1]
        zero = top / 2 - (high + low) / 2 / scale
        for _ in range(2):
            codes = encode(x, scale, zero, top)
            mean_x, mean_code = x.mean(-1, True), codes.mean(-1, True)
            codes -= mean_code
            spread = codes.square().sum(-1, True)
            scale = torch.where(spread > 0, (codes * x).sum(-1, True) / spread, scale).clamp(min=TINY)
            zero = (mean_code - mean_x / scale).clamp(0, top)
        options.append((scale, zero))
    scale, zero = best(x, top, options)
    # To bytes. With the codes that it brings, a neighbour of the nearest scale may fit better.
    row, zero = scale.amax(1, True).clamp(min=2**16 * TINY), (zero * parts).round()  # [out, 1, 1], [out, groups, 1]
    nearest, steps = torch.log2(scale / row).mul(-16).round().int(), STEP.to(x.device)
    near = [(nearest + more).clamp(0, 255) for more in (0, -1, 1)]
    scale, exact, byte = best(x, top, [(steps[byte] * row, zero / parts, byte) for byte in near])
    codes, byte, zero = (part.to(torch.uint8).flatten(1) for part in (encode(x, scale, exact, top), byte, zero))
    codes = codes[:, ::2] | codes[:, 1::2] << 4 if bits == 4 else codes
    return torch.cat([codes, byte, zero, row.view(-1, 1).view(torch.uint8)], 1)


def encode(x, scale, zero, top):
    return (x / scale + zero).round_().clamp_(0, top)


def best(x, top, options):
    """For each group of x, of (scale, zero, ...), each [out, groups, 1], those that have the least squared error."""
    errors = [(encode(x, s, zero, top) - zero).mul_(s).sub_(x).square_().sum(-1, True) for s, zero, *_ in options]
    index = torch.stack(errors).argmin(0, keepdim=True)
    return [torch.stack(values).gather(0, index)[0] for values in zip(*options, strict=True)]


class Reference:
    """A kernel: x [T, in] -> x W^T + bias [T, out]. This one, anywhere and in any shape: dequantize, then multiply."""

    def __init__(self, matrix, bias=None):
        self.matrix, self.bias = matrix, bias
        self.rows = torch.arange(len(matrix.data)).split(4096)  # a head of 150,000 rows would be 1 GB in float32

    def __call__(self, x):
        y = torch.cat([F.linear(x, self.matrix[rows].to(x.dtype)) for rows in self.rows], -1)
        return y if self.bias is None else y + self.bias


class Int8:
    """x86 CPUs, float32: FBGEMM multiplies bytes by bytes, at the speed at which it can read the weights.

    Weights and x become integers with one step for each row. That costs little where the values of a row are alike,
    but in x a few channels are 100 times the rest. So in both every 32 neighbours are mixed first, which leaves their
    product as it was: x W^T = (x H) (W H)^T / 32. The sums are exact, so a row has the same bits in any company."""
    exact = True

    def __init__(self, matrix, bias=None):
        self.bias, (out, _), few = bias, matrix.data.shape, 2**18 // matrix.columns or 1  # rows that fit in a cache
        integers, steps = torch.empty(out, matrix.columns, dtype=torch.int8), torch.empty(out)
        # FBGEMM without VNNI adds up pairs of products in 16 bits: 2 x 255 x 63 fits, and 2 x 255 x 127 does not.
        most = 127 if torch.cpu.get_capabilities().get("avx512_vnni") else 63
        for rows in [slice(start, start + few) for start in range(0, out, few)]:
            values = mix(matrix[rows])
            steps[rows] = values.abs().amax(1).clamp(min=TINY) / most
            integers[rows] = values.div_(steps[rows, None]).round_()
        steps, zeros = steps / math.gcd(matrix.columns, 32), torch.zeros(out, dtype=torch.long)
        weight = torch._make_per_channel_quantized_tensor(integers, steps, zeros, 0)
        self.packed = torch.ops.quantized.linear_prepack(weight, None)

    def __call__(self, x):
        x = mix(x)
        step = x.abs().amax(-1, True).clamp_(min=TINY).div_(127)  # [T, 1]
        multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32  # it rounds x to integers
        y = multiply(x / step, 1.0, 128, self.packed).mul_(step)  # [T, out]
        return y if self.bias is None else y.add_(self.bias)


def mix(x):
    """x H for every n neighbours of x [T, columns], which spreads out what is large (as QuaRot does: Ashkboos et al.
    2024, arXiv 2404.00456). In which order a matmul adds up depends on the number of rows. So x is rounded first, to
    the last bit of 64 times its largest: then no sum of 32 is rounded, and the order does not matter."""
    n, largest = math.gcd(x.shape[1], 32), x.abs().amax(-1, True)  # [T, 1]
    x = torch.add(x, largest, alpha=64).sub_(largest, alpha=64)
    return (x.reshape(-1, n) @ HADAMARD[:n, :n]).view(len(x), -1)


class Int4Pack:
    """torch's own 4-bit matmul, in bfloat16: CUDA from compute capability 8.0 on, and CPUs. Not for an 8-bit head."""

    def __init__(self, matrix, bias=None):
        self.bias, self.group, self.exact = bias, matrix.group, not matrix.data.is_cuda
        scale = matrix.steps[matrix.scale.int()] * matrix.row  # [out, groups]
        offset = (8 - matrix.zero / 16) * scale  # here a weight is (code - 8) scale + offset
        self.scales = torch.stack([scale, offset], -1).transpose(0, 1).contiguous().bfloat16()  # [groups, out, 2]
        low, high = matrix.codes & 15, matrix.codes >> 4
        if self.exact:  # a CPU
            self.packed = torch._convert_weight_to_int4pack_for_cpu(torch.stack([low, high], -1).flatten(1).int(), 1)
        else:  # wants the high half first
            self.packed = torch._convert_weight_to_int4pack(low << 4 | high, 8)

    def __call__(self, x):
        multiply = torch._weight_int4pack_mm_for_cpu if self.exact else torch._weight_int4pack_mm
        y = multiply(x.bfloat16(), self.packed, self.group, self.scales).to(x.dtype)
        return y if self.bias is None else y + self.bias


@functools.cache
def kernel(device, dtype, group=GROUP):
    """The fastest kernel for a device and dtype that agrees with the reference. Warns of one that does not."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 512, generator=generator).to(device, dtype) for rows in (64, 3))
    weight[0] = x[0] = 2.0 * (torch.arange(512) % 32 == 0)  # mixed, the largest sums of bytes that there are
    matrix = quantize(weight, group)
    for kind in {"cpu": [Int8] * (dtype == torch.float32) + [Int4Pack], "cuda": [Int4Pack]}.get(device.type, []):
        try:
            right = Reference(matrix)(x)
            error = (kind(matrix)(x) - right).norm() / right.norm()
            if error < 0.02:
                return kind
            why = f"is off by {error:.0%}"
        except (RuntimeError, AttributeError) as problem:  # this torch lacks the operator, or it refuses the machine
            why = f"fails: {' '.join(str(problem).split())[:100]}"
        warnings.warn(f"4-bit weights on {device}: the kernel {kind.__name__} {why}. The next is slower", stacklevel=2)
    return Reference


class Weights:
    """A model.Checkpoint whose linear layers come out in 4 bits, and head and embedding in head_bits."""

    def __init__(self, checkpoint, tied, stored, head_bits):
        group, bits = stored.get("group_size", GROUP), stored.get("head_bits", 4) if stored else head_bits
        if group not in (32, 64, 128) or bits not in (4, 8):
            raise ValueError(f"{checkpoint.folder}: group_size {group} must be 32, 64 or 128, head_bits {bits} 4 or 8")
        if head_bits not in (4, bits):
            raise ValueError(f"{checkpoint.folder} was quantized with head_bits {bits}, not {head_bits}: do it again")
        self.checkpoint, self.take, self.shapes, self.tied = checkpoint, checkpoint.take, checkpoint.shapes, tied
        self.group, self.head_bits, self.kernel = group, bits, kernel(checkpoint.device, checkpoint.dtype, group)

    def map(self, jobs):
        """[job() for job in jobs], several at a time: half of the work is FBGEMM's layout, which takes one thread."""
        threads, several = torch.get_num_threads(), min(torch.get_num_threads(), 4)  # each needs memory in passing
        try:
            with ThreadPoolExecutor(several, "", torch.set_num_threads, (threads // several,)) as pool:
                yield from pool.map(lambda job: job(), jobs)
        finally:
            torch.set_num_threads(threads)  # here it was never another, but new threads get what was set last

    def linear(self, at, inputs, bias=False, by_rows=False, **outputs):
        """As that of the Checkpoint. by_rows: the result has the matrix itself as `weight`, for an embedding."""
        bits = self.head_bits if by_rows or "lm_head" in outputs else 4
        data = torch.cat([self.matrix(f"{at}{name}", size, inputs, bits).data for name, size in outputs.items()])
        matrix = Quantized(data, inputs, self.group, bits)
        bias = torch.cat([self.take(f"{at}{name}.bias", size) for name, size in outputs.items()]) if bias else None
        kind = self.kernel if self.tied or not by_rows else Reference  # the embedding alone is only looked up
        if kind is Int4Pack and (bits == 8 or len(data) % 16 or inputs % 128):
            from model import Linear  # dequantized once: slower than 4 bits, and of 2 or 4 bytes a weight
            dtype, what = self.checkpoint.dtype, f"{len(data)} x {inputs} in {bits} bits"
            warnings.warn(f"{at}{'+'.join(outputs)}: no kernel for {what}: it is kept in {dtype}", stacklevel=2)
            return Linear(torch.cat([matrix[rows].to(dtype) for rows in Reference(matrix).rows]), bias, by_rows)
        result = kind(matrix, bias)
        result.weight = matrix if by_rows else None
        return result

    def matrix(self, name, out, columns, bits):
        """A Quantized: of the bytes stored as name.4bit or .8bit, or made of name.weight, straight from the file."""
        stored, groups = f"{name}.{bits}bit" in self.shapes, -(-columns // self.group)
        width = groups * (self.group * bits // 8 + 2) + 4 if stored else columns
        name = f"{name}.{bits}bit" if stored else f"{name}.weight"
        data = self.take(name, out, width, mapped=True).to(self.checkpoint.device)
        del self.shapes[name]
        matrix = Quantized(data, columns, self.group, bits) if stored else quantize(data, self.group, bits)
        if stored and not (data.dtype == torch.uint8 and matrix.row.isfinite().all()):
            raise ValueError(f"{self.checkpoint.folder}: {name} is damaged: quantize the model again")
        return matrix


def save(model, out, group=GROUP, head_bits=4):
    """Quantize a model folder or Hub id into the new folder `out`, all of it or nothing. Prints a table of errors."""
    from model import Checkpoint, Config, find, read_json  # here, so that this file can be imported alone
    above = Path(out).absolute().parent
    if os.path.exists(out) or not os.access(above, os.W_OK):
        raise ValueError(f"--out {out}: it exists already, or {above} is no folder that can be written in")
    folder = find(model)
    c, weights, tensors, table, before = Config.read(folder), Checkpoint(folder, "cpu", torch.float32), {}, {}, 0
    if c.quantization_config:
        raise ValueError(f"{folder} holds 4-bit weights already: take the folder that it was made from")
    names = [name for name in weights.shapes if name != "lm_head.weight" or not c.tie_word_embeddings]  # some have both
    for name in tqdm(names, "quantizing", unit="tensor", disable=None):
        tensor, stem = weights.take(name, *weights.shapes[name], mapped=True), name.removesuffix(".weight")
        before += tensor.nbytes
        if tensor.dim() == 1:  # norms and biases stay as they are
            tensors[name] = tensor.clone()
            continue
        bits = head_bits if stem in ("model.embed_tokens", "lm_head") else 4
        matrix = quantize(tensor, group, bits)
        tensors[f"{stem}.{bits}bit"] = matrix.data
        layer, kind = int(stem.split(".")[2]) if ".layers." in stem else -1, stem.split(".")[-1].removesuffix("_proj")
        rows = torch.arange(len(tensor)).split(4096)
        sums = sum(torch.stack([(matrix[i] - tensor[i]).norm() ** 2, tensor[i].float().norm() ** 2]) for i in rows)
        table.setdefault(layer, {})[kind] = (sums[0] / sums[1].clamp(min=TINY)).sqrt().item()
    with tempfile.TemporaryDirectory(dir=above, ignore_cleanup_errors=True) as work:
        part = Path(work, "part")
        part.mkdir()
        for file in {*Path(folder).glob("*.json")} - {*Path(folder).glob("*.index.json")}:
            (part / file.name).write_bytes(file.read_bytes())
        how = {"quant_method": "affine4", "group_size": group, "head_bits": head_bits}  # unknown to other programs
        config = read_json(part / "config.json") | {"quantization_config": how}
        (part / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
        os.replace(part, out)
    print("relative error of each matrix: the root of the sum of squares of what is off, over that of the weights")
    for layer, errors in sorted(table.items()):
        print(f"layer {layer:<3}" * (layer >= 0), *(f"{kind} {error:6.2%} " for kind, error in errors.items()))
    print(f"{out}: {sum(t.nbytes for t in tensors.values()) / 1e6:,.1f} MB, from {before / 1e6:,.1f} MB in {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or Hub id, in 16 or 32 bits")
    parser.add_argument("--out", required=True, help="the folder to make")
    parser.add_argument("--group", type=int, default=GROUP, choices=[32, 64, 128], help=f"Default: {GROUP}")
    parser.add_argument("--head-bits", type=int, default=4, choices=[4, 8], help="of head and embedding. Default: 4")
    try:
        save(**vars(parser.parse_args()))
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        print(f"quantize.py: {' '.join(str(error).split())[:400]}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
