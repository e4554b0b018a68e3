"""Weights in 4 bits, by hand: how they are found, how they are stored, and how they are multiplied with.

    python quantize.py MODEL --out DIR      from a folder or Hub id to one of 0.28 times the size

A token reads every weight once, so on most machines decoding is as fast as the weights are small. Each row of a matrix
is cut into groups of 32, and a group has a scale and a zero of its own (a byte each):

    weight = row * 2^(-scale / 16) * (code - zero / 16)      code 0 .. 15, scale and zero 0 .. 255, row a float32

That is 4.5 bits a weight, and 32 more a row. The scale counts down from the row's largest in sixteenths of an octave,
so that an outlier costs its own group and no other (until `Int8` rounds a whole row once more). No data is looked at.
"""

import argparse
import functools
import json
import math
import os
import shutil
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


class FourBit:
    """A matrix [out, columns]. matrix[ids] gives rows in float32, as an embedding does.

    data [out, bytes], uint8, in each row: the codes, two a byte, the low half first; the scales, then the zeros of all
    groups; and `row`, a float32. A last group that is not full is filled up.
    """

    def __init__(self, data, columns, group=GROUP):
        self.data, self.columns, self.group, groups = data, columns, group, -(-columns // group)
        self.codes, self.scale, self.zero, row = data.split([groups * group // 2, groups, groups, 4], 1)
        self.row, self.steps = row.flatten().clone().view(torch.float32)[:, None], STEP.to(data.device)  # [out, 1]

    def __getitem__(self, ids):
        scale = self.steps[self.scale[ids].int()] * self.row[ids]  # [n, groups]
        codes = self.codes[ids].short()
        codes = (codes | codes << 4).bitwise_and_(0x0F0F).view(torch.uint8).view(*scale.shape, -1)  # halves to bytes
        values = (codes - self.zero[ids, :, None] / 16).mul_(scale[:, :, None])  # [n, groups, group]
        return values.view(len(scale), -1)[:, : self.columns]


def quantize(weight, group=GROUP):
    """A FourBit of weight [out, in], any float dtype.

    For each group the range is tried in several widths, as ggml's k-quants do: rounding to 16 levels of a narrower
    range is finer, and cuts off more. After each rounding the best scale and zero for these codes are those of a linear
    regression (HQQ refits its zero the same way). What has the least squared error is kept.
    """
    if group not in (32, 64, 128) or not weight.is_floating_point():
        raise ValueError(f"the group is {group}, of {weight.dtype}: it must be 32, 64 or 128, of floats")
    data = [quantize_rows(rows, group) for rows in weight.split(2**19 // weight.shape[1] or 1)]  # fits in a cache
    return FourBit(torch.cat(data), weight.shape[1], group)


def quantize_rows(weight, group):
    x = F.pad(weight.float(), (0, -weight.shape[1] % group)).view(len(weight), -1, group)  # [out, groups, group]
    low, high = x.amin(-1, True).clamp(max=0), x.amax(-1, True).clamp(min=0)  # 0 is always in the range
    options = []
    for width in (1.0, 0.95, 0.9, 0.85, 0.8, 0.7):
        scale = ((high - low) * (width / 15)).clamp(min=TINY)  # [out, groups, 1]
        zero = 7.5 - (high + low) / 2 / scale
        for _ in range(2):
            codes = encode(x, scale, zero)
            mean_x, mean_code = x.mean(-1, True), codes.mean(-1, True)
            codes -= mean_code
            spread = codes.square().sum(-1, True)
            scale = torch.where(spread > 0, (codes * x).sum(-1, True) / spread, scale).clamp(min=TINY)
            zero = (mean_code - mean_x / scale).clamp(0, 15)
        options.append((scale, zero))
    scale, zero = best(x, options)
    # To bytes. With the codes that it brings, a neighbour of the nearest scale may fit better.
    row, zero = scale.amax(1, True).clamp(min=2**16 * TINY), (zero * 16).round()  # [out, 1, 1], [out, groups, 1]
    nearest, steps = torch.log2(scale / row).mul(-16).round().int(), STEP.to(x.device)
    near = [(nearest + more).clamp(0, 255) for more in (0, -1, 1)]
    scale, _, byte = best(x, [(steps[byte] * row, zero / 16, byte) for byte in near])
    codes, byte, zero = (part.to(torch.uint8).flatten(1) for part in (encode(x, scale, zero / 16), byte, zero))
    return torch.cat([codes[:, ::2] | codes[:, 1::2] << 4, byte, zero, row.view(-1, 1).view(torch.uint8)], 1)


def encode(x, scale, zero):
    return (x / scale + zero).round_().clamp_(0, 15)


def best(x, options):
    """For each group of x, of (scale, zero, ...), each [out, groups, 1], those that have the least squared error."""
    errors = [(encode(x, s, zero) - zero).mul_(s).sub_(x).square_().sum(-1, True) for s, zero, *_ in options]
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
    product as it was: x W^T = (x H) (W H)^T / 32. The sums are exact, so a row has the same bits in any company.
    """
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
    n = math.gcd(x.shape[1], 32)
    largest = x.abs().amax(-1, True)  # [T, 1]
    x = torch.add(x, largest, alpha=64).sub_(largest, alpha=64)
    return (x.reshape(-1, n) @ HADAMARD[:n, :n]).view(len(x), -1)


class Int4Pack:
    """torch's own 4-bit matmul, in bfloat16: CUDA from compute capability 8.0 on, and CPUs."""

    def __init__(self, matrix, bias=None):
        self.bias, self.group, self.exact = bias, matrix.group, not matrix.data.is_cuda
        scale = matrix.steps[matrix.scale.int()] * matrix.row  # [out, groups]
        offset = (8 - matrix.zero / 16) * scale  # here a weight is (code - 8) scale + offset
        self.scales = torch.stack([scale, offset], -1).transpose(0, 1).contiguous().bfloat16()  # [groups, out, 2]
        low, high = matrix.codes & 15, matrix.codes >> 4
        if self.exact:  # a CPU
            codes = torch.stack([low, high], -1).view(len(low), -1).int()
            self.packed = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
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
    """A model.Checkpoint whose linear layers come out in 4 bits: as stored, or quantized one after the other."""

    def __init__(self, checkpoint, group, tied):
        if group not in (32, 64, 128):
            raise ValueError(f"{checkpoint.folder}: group_size is {group} in config.json, and must be 32, 64 or 128")
        self.checkpoint, self.take, self.shapes, self.group = checkpoint, checkpoint.take, checkpoint.shapes, group
        self.kernel, self.tied = kernel(checkpoint.device, checkpoint.dtype, group), tied

    def map(self, jobs):
        """[job() for job in jobs], several at a time: half of the work is FBGEMM's layout, which takes one thread."""
        threads = torch.get_num_threads()
        several = min(threads, 4)  # as each needs memory in passing
        try:
            with ThreadPoolExecutor(several, "", torch.set_num_threads, (threads // several,)) as pool:
                yield from pool.map(lambda job: job(), jobs)
        finally:
            torch.set_num_threads(threads)  # here it was never another, but new threads get what was set last

    def linear(self, at, inputs, bias=False, by_rows=False, **outputs):
        """As that of the Checkpoint. by_rows: the result has the matrix itself as `weight`, for an embedding."""
        data = torch.cat([self.matrix(f"{at}{name}", size, inputs).data for name, size in outputs.items()])
        matrix = FourBit(data, inputs, self.group)
        bias = torch.cat([self.take(f"{at}{name}.bias", size) for name, size in outputs.items()]) if bias else None
        kind = self.kernel if self.tied or not by_rows else Reference  # the embedding alone is only looked up
        if kind is Int4Pack and (len(data) % 16 or inputs % 128):
            warnings.warn(f"{at}{'+'.join(outputs)}: no kernel for {len(data)} x {inputs}: it is slow", stacklevel=2)
            kind = Reference
        result = kind(matrix, bias)
        result.weight = matrix if by_rows else None
        return result

    def matrix(self, name, out, columns):
        """A FourBit: of the bytes stored as name.4bit, or made of name.weight, straight from the file."""
        stored, groups = f"{name}.4bit" in self.shapes, -(-columns // self.group)
        name, width = (f"{name}.4bit", groups * (self.group // 2 + 2) + 4) if stored else (f"{name}.weight", columns)
        data = self.take(name, out, width, mapped=True).to(self.checkpoint.device)
        del self.shapes[name]
        matrix = FourBit(data, columns, self.group) if stored else quantize(data, self.group)
        if stored and not (data.dtype == torch.uint8 and matrix.row.isfinite().all()):
            raise ValueError(f"{self.checkpoint.folder}: {name} is damaged: quantize the model again")
        return matrix


def save(model, out, group=GROUP):
    """Quantize a model folder or Hub id into the new folder `out`, all of it or nothing. Prints a table of errors."""
    from model import Checkpoint, Config, find, read_json  # here, so that this file can be imported alone
    above = Path(out).absolute().parent
    if os.path.exists(out) or not os.access(above, os.W_OK):
        raise ValueError(f"--out {out}: it exists already, or {above} cannot be written in")
    folder = find(model)
    c, weights, tensors, table, before = Config.read(folder), Checkpoint(folder, "cpu", torch.float32), {}, {}, 0
    if c.quantization_config:
        raise ValueError(f"{folder} holds 4-bit weights already: take the folder that it was made from")
    for name in tqdm(list(weights.shapes), "quantizing", unit="tensor", disable=None):
        tensor, stem = weights.take(name, *weights.shapes[name], mapped=True), name.removesuffix(".weight")
        if stem == "lm_head" and c.tie_word_embeddings:
            continue  # some have one though they are tied
        before += tensor.nbytes
        if tensor.dim() == 1:  # norms and biases stay as they are
            tensors[name] = tensor.clone()
            continue
        matrix = quantize(tensor, group)
        tensors[f"{stem}.4bit"] = matrix.data
        layer, kind = int(stem.split(".")[2]) if ".layers." in stem else -1, stem.split(".")[-1].removesuffix("_proj")
        rows = torch.arange(len(tensor)).split(4096)
        off = sum((matrix[i] - tensor[i]).square().sum() for i in rows)
        whole = sum(tensor[i].float().square().sum() for i in rows).clamp(min=TINY)
        table.setdefault(layer, {})[kind] = (off / whole).sqrt().item()
    with tempfile.TemporaryDirectory(dir=above, ignore_cleanup_errors=True) as work:
        part = Path(work, "part")
        part.mkdir()
        for file in {*Path(folder).glob("*.json")} - {*Path(folder).glob("*.index.json")}:
            shutil.copyfile(file, part / file.name)
        how = {"quant_method": "affine4", "group_size": group}  # unknown to other programs
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
    try:
        save(**vars(parser.parse_args()))
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        print(f"quantize.py: {' '.join(str(error).split())[:400]}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
