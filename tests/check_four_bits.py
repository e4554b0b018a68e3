"""The checks of quantize.py that need real weights: error, quality, speed, exactness and memory. Some 40 minutes.

    python tests/check_four_bits.py --target DIR --draft DIR [PART ...]     errors, quality, speed, exact, load

DIR: Qwen2.5-Coder-1.5B-Instruct and Qwen2.5-Coder-0.5B-Instruct, or others. With `gguf`, `bitsandbytes` and `hqq`
installed, the other quantizers are those packages' own. --gguf FILE: the file that the draft was made of, so that the
errors are of those layers alone that it holds in 6 or more bits. pytest does not collect this file.
"""

import argparse
import importlib
import inspect
import math
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from huggingface_hub.utils import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))
import quantize
from model import Checkpoint, Config, Linear, Qwen2
from pairs import prompts
from speculative import DraftModel, speculative_decode
from text import Text


def round_to_nearest(weight, group):
    """Affine, with a scale and a zero for each group, here not rounded to 16 bits."""
    x = weight.view(len(weight), -1, group)
    low, high = x.amin(-1, True).clamp(max=0), x.amax(-1, True).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=1e-12)
    zero = (-low / scale).round()
    return (((x / scale + zero).round().clamp(0, 15) - zero) * scale).view_as(weight)


def nf4(weight):
    from bitsandbytes import functional

    return functional.dequantize_4bit(*functional.quantize_4bit(weight, blocksize=64, quant_type="nf4"))


def hqq(weight):
    from hqq.core.quantize import Quantizer

    how = {"nbits": 4, "group_size": 64, "axis": 1, "round_zero": False, "compute_dtype": torch.float32}
    return Quantizer.dequantize(*Quantizer.quantize(weight, device="cpu", **how)).view_as(weight)


def q4_0(weight):
    import gguf

    kind = gguf.GGMLQuantizationType.Q4_0
    return torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind))


METHODS = {  # name: needs, bits a weight, function
    "round to nearest, group 128": (None, 4.25, lambda w: round_to_nearest(w, 128)),
    "round to nearest, group 64": (None, 4.5, lambda w: round_to_nearest(w, 64)),
    "NF4, group 64": ("bitsandbytes", 4.5, nf4),
    "HQQ, group 64": ("hqq", 4.5, hqq),
    "Q4_0 of llama.cpp": ("gguf", 4.5, q4_0),
    "ours, group 64": (None, 4.25, lambda w: quantize.quantize(w, 64)[:]),
    "ours, group 32": (None, 4.5, lambda w: quantize.quantize(w)[:]),
}


def usable(needs):
    return needs is None or importlib.util.find_spec(needs)


def errors(args):
    """Relative error of the weights (Frobenius), mean over the linear layers."""
    weights, source = Checkpoint(args.draft, "cpu", torch.float32), {}
    if args.gguf:
        import gguf

        source = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(args.gguf).tensors}
    names = {"v_proj": "attn_v", "down_proj": "ffn_down", "q_proj": "attn_q", "k_proj": "attn_k"}
    names |= {"o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up"}
    chosen = []
    for name in [name for name in weights.shapes if name.endswith("proj.weight")]:
        _, _, layer, _, kind, _ = name.split(".")
        if source.get(f"blk.{layer}.{names[kind]}.weight", "F16") in ("Q6_K", "Q8_0", "F16", "BF16", "F32"):
            chosen.append(name)
    off = {method: [] for method, (needs, *_) in METHODS.items() if usable(needs)}
    for name in tqdm(chosen, "quantizing", unit="matrix", disable=None):
        weight = weights.take(name, *weights.shapes[name])
        for method in off:
            off[method].append(((METHODS[method][2](weight) - weight).norm() / weight.norm()).item())
    print(f"  {len(chosen)} matrices\n  {'method':<30}{'bits':>6}{'error':>9}")
    mean = {method: statistics.mean(values) for method, values in off.items()}
    for method in off:
        bits = METHODS[method][1]
        if "ours" in method:  # a float32 for each row
            bits += 32 / statistics.mean(weights_columns(args.draft))
        print(f"  {method:<30}{bits:>6.2f}{mean[method]:>9.4f}")
    ours = mean["ours, group 32"]
    return ours <= 0.75 * mean["round to nearest, group 128"] and ours < mean.get("NF4, group 64", math.inf)


def weights_columns(folder):
    c = Config.read(folder)
    return [c.hidden_size] * 6 + [c.intermediate_size]


def texts(folder):
    """Ids of public text that comes with Python: a module, and a part of the language reference. [2][tokens]."""
    import heapq
    from pydoc_data.topics import topics

    text = Text(folder, [])
    english = "\n".join(topics[name] for name in ("assignment", "import", "objects", "exceptions"))
    return [text.tokenizer.encode(some).ids[: TOKENS + 1] for some in (inspect.getsource(heapq), english)]


TOKENS = 768


def log_probs(model, ids):
    return model(ids[:-1], model.new_cache(len(ids)), len(ids) - 1).log_softmax(-1)


def quality(args):
    """Perplexity, and KL to the 16-bit weights in nats a token, on 2 texts. Activations are float32 but where noted."""
    fine = True
    for folder in (args.draft, args.target):
        model, asked = Qwen2.load(folder, 32, "cpu"), texts(folder)
        right = [log_probs(model, ids) for ids in asked]
        kept = [(layer, name, weight) for layer, name, weight in matrices(folder, model)]
        print(f"  {folder}\n  {'weights':<44}{'perplexity':>11}{'KL':>9}{'same top token':>16}")
        show("16 bits", right, right, asked)
        kl = {}
        for method, (needs, bits, function) in METHODS.items():
            if usable(needs):
                for layer, name, weight in tqdm(kept, method, leave=False, disable=None):
                    linear = Linear(function(weight.float()), getattr(layer, name).bias, by_rows=layer is model)
                    setattr(layer, name, linear)
                model.embed = model.head
                kl[method] = show(f"{method} ({bits} bits)", [log_probs(model, ids) for ids in asked], right, asked)
        head = kept[0][2].float()  # in 16 bits, the most that a better one could do
        for bits, weight in ((8, quantize.quantize(head, bits=8)[:]), (16, head)):
            model.embed = model.head = Linear(weight, by_rows=True)
            show(f"ours, head in {bits} bits", [log_probs(model, ids) for ids in asked], right, asked)
        del model, kept, head, weight
        usual = quantize.kernel
        for kind, bits in ((quantize.Int4Pack, 4), (quantize.Int8, 4), (quantize.Int8, 8)):
            quantize.kernel = lambda *_, kind=kind: kind
            four = Qwen2.load(folder, 4, "cpu", head_bits=bits)
            activations = "8-bit" if kind is quantize.Int8 else "bfloat16"
            what = f"ours, {activations} activations" + ", head in 8 bits" * (bits == 8)
            kl[kind, bits] = show(what, [log_probs(four, ids) for ids in asked], right, asked)
        quantize.kernel = usual
        ratio = kl[quantize.Int8, 4] / kl[quantize.Int4Pack, 4]
        print(f"  KL with 8-bit activations over that with 16-bit ones: {ratio:.2f}")
        fine &= ratio <= 1.3
    return fine


def matrices(folder, model):
    """(layer, name of its Linear, bfloat16 weight): all that are quantized, the head as (model, "head", weight)."""
    weights, c = Checkpoint(folder, "cpu", torch.bfloat16), model.config
    yield model, "head", weights.take("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
    parts = {"qkv": "self_attn q_proj k_proj v_proj", "o": "self_attn o_proj", "gate_up": "mlp gate_proj up_proj"}
    for i, layer in enumerate(model.layers):
        for name, where in (parts | {"down": "mlp down_proj"}).items():
            block, *kinds = where.split()
            stored = [f"model.layers.{i}.{block}.{kind}.weight" for kind in kinds]
            yield layer, name, torch.cat([weights.take(n, *weights.shapes[n]) for n in stored])


def show(what, logs, right, asked):
    """A line of the table. Returns the KL divergence, the mean over all tokens of both texts."""
    kl = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in zip(right, logs, strict=True)]).mean().item()
    loss = [-q.gather(1, torch.tensor(ids[1:])[:, None]) for q, ids in zip(logs, asked, strict=True)]
    same = torch.cat([p.argmax(-1) == q.argmax(-1) for p, q in zip(right, logs, strict=True)]).float().mean()
    print(f"  {what:<44}{torch.cat(loss).mean().exp():>11.3f}{kl:>9.4f}{same:>16.1%}", flush=True)
    return kl


def speed(args, repeat=15):
    """Passes of the target over 1, 4 and 8 rows behind 200 tokens, in turn; medians of ratios to one row here."""
    usual, models = quantize.kernel, {}
    quantize.kernel = lambda *_: quantize.Int4Pack
    models["int4pack"] = Qwen2.load(args.target, 4, "cpu")
    quantize.kernel = usual
    models["4 bits"], models["float32"] = Qwen2.load(args.target, 4, "cpu"), Qwen2.load(args.target, 32, "cpu")
    jobs = [("4 bits", 1), ("4 bits", 4), ("4 bits", 8), ("float32", 1), ("int4pack", 1)]
    caches, seconds = {}, {job: [] for job in jobs}
    for name, model in models.items():
        caches[name] = model.new_cache(300)
        model([0] * 200, caches[name], 0)
    for _ in range(repeat + 1):
        for name, rows in jobs:
            start = time.perf_counter()
            models[name]([0] * rows, caches[name], rows)
            seconds[name, rows].append(time.perf_counter() - start)
            caches[name].rollback(200)
    ratio = {}
    for job, times in seconds.items():
        ratio[job] = statistics.median(a / b for a, b in zip(times[1:], seconds[jobs[0]][1:], strict=True))
        milliseconds = 1e3 * statistics.median(times[1:])
        print(f"  {job[0]:<9} {job[1]} rows{milliseconds:>8.1f} ms{ratio[job]:>7.2f}x one row in 4 bits")
    fast = ratio["float32", 1] >= 4 and ratio["int4pack", 1] >= 2
    return fast and ratio["4 bits", 4] <= 1.25 and ratio["4 bits", 8] <= 2.0


def exact(args, tokens=128):
    """Greedy texts with gamma 1, 3 and 7 against plain decoding, in 4 bits: 30 prompts of 128 tokens."""
    target, draft = (Qwen2.load(folder, 4, "cpu") for folder in (args.target, args.draft))
    text, known = Text(args.target, target.config.eos), prompts(True, "all")
    whole = [text.prompt(prompt) for some in known.values() for prompt in some]
    # They are few: the first two thirds and the first third of each ask something else.
    asked = [ids[: len(ids) * thirds // 3] for thirds in (3, 2, 1) for ids in whole][:30]
    different = done = count = 0
    with tqdm(total=4 * len(asked), unit="text", disable=None) as bar:
        for ids in asked:
            written = []
            for gamma in (0, 1, 3, 7):
                rounds = speculative_decode(target, DraftModel(draft, len(ids) + tokens), ids, tokens, gamma, eos=[])
                written.append([id for round in rounds for id in round.tokens])
                bar.update()
            different += sum(other != written[0] for other in written[1:])
            done, count = done + 3, count + 3 * len(written[0])
    print(f"  {different} of {done} texts differ from plain decoding, {count} tokens compared")
    return different == 0 and done == 90


LOAD = """
import sys, time; sys.path.insert(0, sys.argv[2])
import model; from measure import memory
before, start = memory.in_use("cpu"), time.perf_counter()
kept = model.Qwen2.load(sys.argv[1], 4, "cpu")
seconds = time.perf_counter() - start
peak = memory.in_use("cpu", peak=True) - before
print(seconds, peak / 1e6, (memory.in_use("cpu") - before) / 1e6)
"""


def load(args):
    """Loading the target in 4 bits, from 16 bits and from a folder of quantize.py: seconds and memory, each alone."""
    saved = Path(args.target).resolve().parent / f".{Path(args.target).name}-4bit"
    shutil.rmtree(saved, ignore_errors=True)
    root = str(Path(__file__).parent.parent)
    subprocess.run([sys.executable, "quantize.py", args.target, "--out", str(saved)], cwd=root, check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    told = {}
    for what, folder in (("from 16 bits", args.target), ("saved", saved)):
        command = [sys.executable, "-c", LOAD, str(folder), root]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        seconds, peak, size = told[what] = [float(number) for number in said.split()]
        print(f"  {what:<13}{seconds:>7.1f} s, at most {peak:,.0f} MB, afterwards {size:,.0f} MB", flush=True)
    print(f"  {told['from 16 bits'][0] / told['saved'][0]:.1f}x as fast from the saved folder")
    shutil.rmtree(saved)
    return told["from 16 bits"][1] < told["from 16 bits"][2] + 600 and told["from 16 bits"][0] > 5 * told["saved"][0]


@torch.no_grad()
def main():
    parts = {"errors": errors, "quality": quality, "speed": speed, "exact": exact, "load": load}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", metavar="PART", help=", ".join(parts))
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--gguf")
    args = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    failed = []
    for part in args.part or parts:
        print(f"{part}: {' '.join(parts[part].__doc__.split())}", flush=True)
        if not parts[part](args):
            failed.append(part)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
