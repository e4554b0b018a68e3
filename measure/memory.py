"""What a pair needs of memory, told from the two config.json before any weight is read: `python bench.py memory`.

It counts what model.py, quantize.py and kv_cache.py allocate. --measure loads the pair, decodes, and sets beside the
plan what that came to.
"""

import ctypes
import os

import torch

from measure.machine import free_memory
from model import Config, Linear, Qwen2, find
from quantize import Int8
from speculative import DraftModel, speculative_decode

WAYS = {"4 bits, GPU": (4, "cuda"), "16 bits, GPU": (16, "cuda"), "4 bits, CPU": (4, "cpu")}
WAYS["32 bits, CPU"] = (32, "cpu")  # 4 bits on a GPU: of compute capability 8.0 or newer
FRAMEWORK = {"cuda": 500e6, "cpu": 300e6}  # about: a CUDA context and its libraries; Python with torch
LAPTOP = 6e9  # bytes of GPU memory
LEGEND = """
layers               weights of attention and MLP. 4 bits are 5 with scale and offset on a GPU; on a CPU a byte each
head and embedding   often one matrix. In 4 bits it is there twice: packed for the head's kernel, and to read rows from
caches               keys and values of both models, for texts of --context tokens
logits               of a round's gamma + 1 rows, and the distributions that judging makes of them
a prompt in passing  the largest that 512 of its tokens need on their way through a layer, and their rotations
framework            about what Python with torch takes, on a GPU CUDA's context and libraries
"""


def matrix(out, columns, bits, device):
    """Bytes of a weight [out, columns], laid out for its kernel."""
    if bits != 4:
        return out * columns * bits // 8
    if device == "cuda":
        return out * columns // 2 + out * columns // 32 * 4  # codes; a scale and an offset in bfloat16 for each group
    return out * columns + out * 12  # a byte each; a sum, a step and a zero for each row


def model(c, bits, device, head_bits=4):
    """Bytes of the layers, and of head and embedding, for Config c. head_bits: where the folder does not say."""
    hidden, inner = c.hidden_size, c.intermediate_size
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes = [(q + 2 * kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner)]
    small = (2 * hidden + (q + 2 * kv) * c.attention_bias) * width(bits, device)  # norms and biases
    layers = c.num_hidden_layers * (sum(matrix(*shape, bits, device) for shape in shapes) + small)
    head_bits = c.quantization_config.get("head_bits", 4) if c.quantization_config else head_bits
    kept = bits == 4 and head_bits == 8 and device == "cuda"  # in bfloat16, as there is no kernel for it
    head, embedding = matrix(c.vocab_size, hidden, 16 if kept else bits, device), 0
    if bits == 4 and not (kept and c.tie_word_embeddings):  # rows are read from codes, be they the head's or not
        embedding = c.vocab_size * (hidden * head_bits // 8 + hidden // 32 * 2 + 4)
    elif not c.tie_word_embeddings:
        embedding = head
    return layers, head + embedding


def reads(c, bits, device, context):
    """Bytes that a token behind `context` others reads: the layers, the head, and the cache. c: the Config."""
    rows = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * context * width(bits, device)
    return model(c, bits, device)[0] + matrix(c.vocab_size, c.hidden_size, bits, device) + rows


def read(loaded, context):
    """As `reads`, of a loaded model, whose head and kernels may be others than such a device has as a rule."""
    c, sizes = loaded.config, []
    for layer in (loaded.layers[0].qkv, loaded.head):
        bits = 8 * loaded.dtype.itemsize if type(layer) is Linear else 4
        sizes.append((bits, "cpu" if type(layer) is Int8 else "cuda"))  # the other kernels read codes, two a byte
    rows = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * context * loaded.dtype.itemsize
    return model(c, *sizes[0])[0] + matrix(c.vocab_size, c.hidden_size, *sizes[1]) + rows


def width(bits, device):
    """Bytes of a number that is no weight: float32 or bfloat16."""
    return 4 if device == "cpu" and bits != 16 else 2


def plan(configs, bits, device, context, gamma, head_bits=4):
    """{part: bytes} for configs (target, draft) and texts of up to `context` tokens."""
    parts, number, caches, passing = {}, width(bits, device), 0, 0
    for name, c in zip(("target", "draft"), configs, strict=True):
        parts[f"{name}, layers"], parts[f"{name}, head and embedding"] = model(c, bits, device, head_bits)
        length = min(context, c.max_position_embeddings)
        caches += 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * length * number
        rows = min(512, length)  # of a prompt go through the layers at once; their mask is of booleans and of numbers
        piece = rows * (4 * c.intermediate_size + 6 * c.hidden_size + length) * number + rows * length
        passing = max(passing, piece + 2 * length * (c.hidden_size + c.head_dim) * number)  # all pieces, and rotations
    parts[f"caches, {context:,} tokens"] = caches
    # In float32 of the target the logits, p, and p - q, of the draft q; and sums in float64.
    parts[f"logits, {gamma + 1} rows"] = max(c.vocab_size for c in configs) * (gamma + 1) * (4 * 4 + 8)
    parts["a prompt in passing"] = passing
    parts["framework"] = FRAMEWORK[device]
    return parts


def report(target, draft, gamma, args, device):
    """Print the table for two folders or Hub ids. Returns its rows, for --json."""
    configs = [Config.read(find(path, files=["*config.json"])) for path in (target, draft)]
    plans = {way: plan(configs, *WAYS[way], args.context, gamma, args.head_bits) for way in WAYS}
    rows = [{"part": part, **{way: plans[way][part] for way in WAYS}} for part in plans["4 bits, GPU"]]
    rows.append({"part": "together", **{way: sum(plans[way].values()) for way in WAYS}})
    print(f"target {target}\ndraft  {draft}\n\n{'in MB':<28}" + "".join(f"{way:>14}" for way in WAYS))
    for row in rows:
        print(f"{row['part']:<28}" + "".join(f"{row[way] / 1e6:>14,.0f}" for way in WAYS))
    print(LEGEND)
    places = [("A GPU of 6 GB", "cuda", LAPTOP), (f"What is free here ({device})", device, free_memory(device))]
    for place, kind, room in [place for place in places if place[2] is not None and place[1] != "mps"]:
        print(f"{place}, {room / 1e9:.1f} GB:")
        left = {way: (room - rows[-1][way]) / 1e9 for way in WAYS if WAYS[way][1] == kind}
        for way, spare in left.items():
            print(f"    {way}: " + (f"fits, {spare:.1f} GB to spare" if spare > 0 else f"{-spare:.1f} GB short"))
        if max(left.values()) <= 0:
            print("    Take a shorter --context, or smaller models")
    return rows + (measure(target, draft, configs, gamma, args, device) if args.measure else [])


def measure(target, draft, configs, gamma, args, device):
    """Load the pair, decode up to --context tokens, and print what came to be used beside the plan. Returns rows."""
    if args.context < gamma + 2:
        raise ValueError(f"--context {args.context}: with gamma {gamma} at least {gamma + 2} are needed")
    stored = all(c.quantization_config for c in configs)
    bits, head_bits = args.bits or (4 if stored else 32 if device == "cpu" else 16), args.head_bits
    before = in_use(device)
    pair = [Qwen2.load(find(path), bits, device, head_bits=head_bits) for path in (target, draft)]
    weights = in_use(device) - before
    length = min([args.context, *(c.max_position_embeddings for c in configs)])
    prompt, drafter = [0] * (length - gamma - 1), DraftModel(pair[1], length)
    for _ in speculative_decode(pair[0], drafter, prompt, gamma + 1, gamma):
        pass
    everything = in_use(device, peak=True) - before
    parts, rows = plan(configs, bits, device, length, gamma, head_bits), []
    planned = sum(parts[part] for part in parts if "layers" in part or "head" in part)
    for what, used, told in [
        ("weights", weights, planned),
        ("at most, while decoding", everything, sum(parts.values()) - parts["framework"]),
    ]:
        print(f"measured, {bits} bits: {what} {used / 1e6:,.0f} MB, planned {told / 1e6:,.0f} ({told / used - 1:+.0%})")
        rows.append({"part": what, "bits": bits, "measured": used, "planned": told})
    return rows


def in_use(device, peak=False):
    """Bytes that tensors have of a GPU, or this process of the machine's memory, now or at most since the last call."""
    if device == "cuda":
        used = torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return used
    if not os.path.exists("/proc/self/status"):
        raise ValueError("--measure: how much a process uses can be told on Linux and of a CUDA GPU only")
    if not peak:  # what malloc keeps for later is not needed
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
    with open("/proc/self/status") as f:
        kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in f if line.startswith(("VmHWM", "VmRSS"))}
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")  # the peak begins anew
    return 1024 * kilobytes["VmHWM" if peak else "VmRSS"]
