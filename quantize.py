"""Weights in 4 bits, by hand: how they are found, how they are stored, and how they are multiplied with.

    python quantize.py MODEL --out DIR      from a folder or Hub id to one of 0.28 times the size

A token reads every weight once, so on most machines decoding is as fast as the weights are small. Each row of a matrix
is cut into groups of 32, and a group has a scale and a zero of its own (a byte each):

    weight = row * 2^(-scale / 16) * (code - zero / 16)      code 0 .. 15, scale and zero 0 .. 255, row a float32

That is 4.5 bits a weight, and 32 more a row. The scale counts down from the row's largest in sixteenths of an octave,
so that an outlier costs its own group and no other. Nothing but the weights is looked at: no data.
"""

import argparse
import functools
import glob
import json
import os
import shutil
import sys
import tempfile
import warnings

import torch
import torch.nn.functional as F
from huggingface_hub.utils import tqdm
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

GROUP = 32  # the largest that is below round-to-nearest by a quarter; 16 would cost 5.0 bits
TINY = torch.finfo(torch.float32).tiny
STEP = torch.exp2(torch.arange(256) / -16)  # looked up, as exp2 has other last bits where it fills no vector register


class FourBit:
    """A matrix [out, columns]. matrix[ids] gives rows in float32, as an embedding does.

    codes [out, padded / 2], uint8: two a byte, the low half first. padded is columns, up to a multiple of the group.
    scale, zero [out, groups], uint8. row [out], float32. All on one device.
    """

    def __init__(self, codes, scale, zero, row, columns):
        self.codes, self.scale, self.zero, self.row, self.columns = codes, scale, zero, row, columns
        self.group, self.steps = 2 * codes.shape[1] // scale.shape[1], STEP.to(row.device)

    def __getitem__(self, ids):
        scale = self.steps[self.scale[ids].int()] * self.row[ids, None]  # [n, groups]
        codes = torch.stack([self.codes[ids] & 15, self.codes[ids] >> 4], -1).view(*scale.shape, -1)
        values = (codes - self.zero[ids, :, None] / 16) * scale[:, :, None]  # [n, groups, group]
        return values.view(len(scale), -1)[:, : self.columns]

    def parts(self):
        return {"codes": self.codes, "scale": self.scale, "zero": self.zero, "row": self.row}


def stack(matrices):
    """Matrices of the same columns and groups, one below the other."""
    if len({matrix.group for matrix in matrices}) > 1:
        raise ValueError(f"one layer in groups of {[matrix.group for matrix in matrices]}: quantize the model again")
    parts = zip(*(matrix.parts().values() for matrix in matrices), strict=True)
    return FourBit(*map(torch.cat, parts), matrices[0].columns)


def quantize(weight, group=GROUP):
    """A FourBit of weight [out, in], any float dtype. A last group that is not full is padded with zeros.

    For each group the range is tried in several widths, as ggml's k-quants do: rounding to 16 levels of a narrower
    range is finer, and cuts off more. After each rounding the best scale and zero for these codes are those of a linear
    regression (HQQ refits its zero the same way). What has the least squared error is kept.
    """
    if group < 2 or group % 2:
        raise ValueError(f"the group is {group}: it must be an even number, as two codes share a byte")
    some = [quantize_rows(rows, group) for rows in weight.split(max(1, 2**19 // weight.shape[1]))]  # fits in a cache
    return FourBit(*map(torch.cat, zip(*some, strict=True)), weight.shape[1])


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
    best = least_error(x, options)  # [1, out, groups, 1]
    scale, zero = (torch.stack(values).gather(0, best)[0] for values in zip(*options, strict=True))
    # To bytes. With the codes that it brings, a neighbour of the nearest scale may fit better.
    row, zero = scale.amax(1, True).clamp(min=2**16 * TINY), (zero * 16).round()  # [out, 1, 1], [out, groups, 1]
    nearest, steps = torch.log2(scale / row).mul(-16).round().int(), STEP.to(x.device)
    near = [(nearest + more).clamp(0, 255) for more in (0, -1, 1)]
    best = least_error(x, [(steps[byte] * row, zero / 16) for byte in near])
    byte = torch.stack(near).gather(0, best)[0]
    codes = encode(x, steps[byte] * row, zero / 16).to(torch.uint8).view(len(x), -1)
    scale, zero = (values.squeeze(-1).to(torch.uint8) for values in (byte, zero))
    return codes[:, ::2] | codes[:, 1::2] << 4, scale, zero, row.view(-1)


def encode(x, scale, zero):
    return (x / scale + zero).round_().clamp_(0, 15)


def least_error(x, options):
    """Which of the pairs of scale and zero, each [out, groups, 1], has the least squared error in each group of x."""
    errors = [(encode(x, scale, zero) - zero).mul_(scale).sub_(x).square_().sum(-1, True) for scale, zero in options]
    return torch.stack(errors).argmin(0, keepdim=True)


# Kernels: x [T, in] -> x W^T + bias [T, out].


class Reference:
    """Any device, any shape: dequantize, then multiply."""

    def __init__(self, matrix, bias=None):
        self.matrix, self.bias = matrix, bias

    def __call__(self, x):
        blocks = range(0, len(self.matrix.row), 4096)  # a head of 150,000 rows would be 1 GB in float32
        y = torch.cat([F.linear(x, self.matrix[i : i + 4096].to(x.dtype)) for i in blocks], -1)
        return y if self.bias is None else y + self.bias


class Int8:
    """x86 CPUs, float32: FBGEMM multiplies bytes by bytes, at the speed at which it can read the weights.

    The weights become integers of +-63 with one step for each row, which costs little as groups within a row are alike.
    Not +-127: without VNNI the sums of two products are kept in 16 bits, and would saturate. x is rounded to bytes with
    a step for each row of x and, as a few of a model's channels are a hundred times larger than others, for each block
    of its columns. The sums are exact, so a row of the result does not depend on how many rows are fed.
    """

    exact = True

    def __init__(self, matrix, bias=None, block=None):
        out, self.bias, self.blocks = len(matrix.row), bias, []
        integers, step = torch.empty(out, matrix.columns, dtype=torch.int8), torch.empty(out)
        for rows in [slice(i, i + 4096) for i in range(0, out, 4096)]:
            values = matrix[rows]
            step[rows] = values.abs().amax(1).clamp(min=TINY) / 63
            integers[rows] = (values / step[rows, None]).round().to(torch.int8)
        self.width = block or matrix.columns
        for part in integers.split(self.width, 1):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # deprecated, but in this torch the one way to this kernel
                part = torch._make_per_channel_quantized_tensor(part.contiguous(), step, torch.zeros(out).long(), 0)
            self.blocks.append(torch.ops.quantized.linear_prepack(part, None))

    def __call__(self, x):
        multiply, total = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32, None
        for part, packed in zip(x.split(self.width, -1), self.blocks, strict=True):
            step = part.abs().amax(-1, True).clamp_(min=TINY).div_(127)  # [T, 1]
            y = multiply(part / step, 1.0, 128, packed)  # rounds to -127 .. 127
            total = y.mul_(step) if total is None else total.addcmul_(y, step)
        return total if self.bias is None else total.add_(self.bias)


class Int4Pack:
    """torch's own 4-bit matmul, in bfloat16: CUDA from compute capability 8.0 on, and CPUs."""

    def __init__(self, matrix, bias=None):
        self.bias, self.group, cuda = bias, matrix.group, matrix.row.is_cuda
        self.exact = not cuda
        scale = matrix.steps[matrix.scale.int()] * matrix.row[:, None]  # [out, groups]
        offset = (8 - matrix.zero / 16) * scale  # here a weight is (code - 8) scale + offset
        self.scales = torch.stack([scale, offset], -1).transpose(0, 1).contiguous().bfloat16()  # [groups, out, 2]
        low, high = matrix.codes & 15, matrix.codes >> 4
        if cuda:  # wants the high half first
            self.packed = torch._convert_weight_to_int4pack(low << 4 | high, 8)
            self.multiply = torch._weight_int4pack_mm
        else:
            codes = torch.stack([low, high], -1).view(len(low), -1).int()
            self.packed = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
            self.multiply = torch._weight_int4pack_mm_for_cpu

    def __call__(self, x):
        y = self.multiply(x.bfloat16(), self.packed, self.group, self.scales).to(x.dtype)
        return y if self.bias is None else y + self.bias


@functools.cache
def kernel(device, dtype, group=GROUP):
    """The fastest kernel for a device and dtype that agrees with the reference. Warns of one that does not."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 512, generator=generator).to(device, dtype) for rows in (64, 3))
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

    def __init__(self, checkpoint):
        self.checkpoint, self.take, self.shapes = checkpoint, checkpoint.take, checkpoint.shapes

    def linear(self, at, inputs, bias=False, by_rows=False, **outputs):
        """As that of the Checkpoint. by_rows: the result has the matrix itself as `weight`, for an embedding."""
        matrix = stack([self.matrix(f"{at}{name}", size, inputs) for name, size in outputs.items()])
        bias = torch.cat([self.take(f"{at}{name}.bias", size) for name, size in outputs.items()]) if bias else None
        kind, shape = kernel(self.checkpoint.device, self.checkpoint.dtype, matrix.group), (len(matrix.row), inputs)
        if kind is Int4Pack and (shape[0] % 16 or inputs % max(128, matrix.group)):
            warnings.warn(f"{at}{'+'.join(outputs)}: no kernel for a shape of {shape}: it will be slow", stacklevel=2)
            kind = Reference
        head = {"lm_head.weight", "lm_head.codes"} & self.shapes.keys()  # then an embedding is only looked up
        result = (Reference if by_rows and head else kind)(matrix, bias)
        result.weight = matrix if by_rows else None
        return result

    def matrix(self, name, out, columns):
        """A FourBit: of the tensors name.codes, scale, zero, row, or made of name.weight, straight from the file."""
        device, shapes = self.checkpoint.device, self.shapes
        if f"{name}.codes" not in shapes:
            matrix = quantize(self.take(f"{name}.weight", out, columns, mapped=True).to(device))
            del shapes[f"{name}.weight"]
            return matrix
        file = self.checkpoint.file[f"{name}.codes"]
        stored = {part: shapes.pop(f"{name}.{part}", None) for part in ("codes", "scale", "zero", "row")}
        half, groups = (stored["codes"] or [0])[-1], (stored["scale"] or [0])[-1]
        wanted = {"codes": [out, half], "scale": [out, groups], "zero": [out, groups], "row": [out]}
        if stored != wanted or not groups or 2 * half % groups or not 0 <= 2 * half - columns < 2 * half // groups:
            raise ValueError(f"{file}: {name} has parts of shapes {stored}, and config.json asks for {[out, columns]}")
        try:
            with safe_open(file, "pt") as f:
                parts = {part: f.get_tensor(f"{name}.{part}").to(device, copy=True) for part in wanted}
        except (OSError, SafetensorError) as error:
            raise OSError(f"{file}: cannot read {name} ({error}): quantize the model again") from None
        kinds = [part.dtype for part in parts.values()]
        if kinds != [torch.uint8] * 3 + [torch.float32] or not parts["row"].isfinite().all():
            raise ValueError(f"{file}: {name} is damaged, or not from quantize.py: {kinds}")
        return FourBit(*parts.values(), columns)


def save(model, out, group=GROUP):
    """Quantize a model folder or Hub id into the new folder `out`, all of it or nothing. Prints a table of errors."""
    from model import Checkpoint, Config, find, read_json

    above = os.path.dirname(os.path.abspath(out))
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
        tensors |= {f"{stem}.{part}": values for part, values in matrix.parts().items()}
        layer = int(stem.split(".")[2]) if ".layers." in stem else -1
        table.setdefault(layer, {})[stem.split(".")[-1].removesuffix("_proj")] = relative_error(matrix, tensor)
    with tempfile.TemporaryDirectory(dir=above, ignore_cleanup_errors=True) as work:
        part = os.path.join(work, "part")
        os.mkdir(part)
        for file in glob.glob(os.path.join(glob.escape(folder), "*.json")):
            if not file.endswith("index.json"):
                shutil.copyfile(file, os.path.join(part, os.path.basename(file)))
        config = read_json(os.path.join(folder, "config.json")) | {"quantization_config": {"quant_method": "affine4"}}
        with open(os.path.join(part, "config.json"), "w", encoding="utf-8") as f:
            json.dump(config, f, indent=1)
        save_file(tensors, os.path.join(part, "model.safetensors"), metadata={"format": "pt"})
        os.replace(part, out)
    print("relative error of each matrix: the root of the sum of squares of what is off, over that of the weights")
    for layer, errors in sorted(table.items()):
        print(f"layer {layer:<3}" * (layer >= 0), *(f"{kind} {error:6.2%} " for kind, error in errors.items()))
    after = sum(tensor.nbytes for tensor in tensors.values())
    print(f"{out}: {after / 1e6:,.1f} MB, from {before / 1e6:,.1f} MB in {folder}")


def relative_error(matrix, weight):
    """||W' - W|| / ||W||, Frobenius, of a FourBit W' and the matrix W that it was made of."""
    some = list(torch.arange(len(weight)).split(4096))
    off = sum((matrix[ids] - weight[ids].float()).square().sum().item() for ids in some)
    return (off / max(sum(weight[ids].float().square().sum().item() for ids in some), TINY)) ** 0.5


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or Hub id, in 16 or 32 bits")
    parser.add_argument("--out", required=True, help="the folder to make")
    parser.add_argument("--group", type=int, default=GROUP, choices=[32, 64, 128], help=f"Default: {GROUP}")
    args = parser.parse_args()
    try:
        save(args.model, args.out, args.group)
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        print(f"quantize.py: {' '.join(str(error).split())[:400]}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
