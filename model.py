"""Qwen2 and Qwen2.5, any size, in one file: config, layers, forward, and loading of raw safetensors.

    model = Qwen2.load("Qwen/Qwen2.5-0.5B-Instruct")  # or a folder
    logits = model([9707, 11], model.new_cache(1024), last=1)  # [1, vocab]: what follows the second token

T is the number of tokens fed. There is no batch axis, and no training. A plain Llama, which has no biases, loads too.
"""

import json
import os
import re
import warnings
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from huggingface_hub import constants, snapshot_download
from huggingface_hub.utils import tqdm
from safetensors import SafetensorError, safe_open


@dataclass
class Config:
    """The entries of config.json that matter here, under their own names."""
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int  # fewer than heads: several query heads share one of keys and values (GQA)
    head_dim: int
    vocab_size: int  # rows of the embedding. Padded: the tokenizer has fewer ids
    max_position_embeddings: int  # the context: the longest text, in tokens
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool  # the head is the embedding matrix itself
    attention_bias: bool  # of q, k and v
    quantization_config: dict  # empty, but in a folder that quantize.py wrote
    eos: list  # the ids that end a text

    @classmethod
    def read(cls, folder):
        """From the json files of a model folder. Raises ValueError naming whatever this file cannot run."""
        path = os.path.join(folder, "config.json")
        c = {name: value for name, value in read_json(path).items() if value is not None}
        rope = c.get("rope_parameters", {})  # transformers 5 puts rope_theta and the scaling in here
        kind = c.get("rope_scaling", rope)
        kind = kind.get("type", kind.get("rope_type", "default")) if isinstance(kind, dict) else kind
        for refused, what in [
            (c.get("model_type") not in ("qwen2", "llama"), f"model_type {c.get('model_type')!r} (not qwen2 or llama)"),
            (c.get("use_sliding_window"), "use_sliding_window: true"),
            (kind != "default", f"rope scaling {kind!r}"),
            (c.get("hidden_act", "silu") != "silu", f"hidden_act {c.get('hidden_act')!r}"),
            ("affine4" not in str(c.get("quantization_config", "affine4")), "this quantization_config"),
        ]:
            if refused:
                raise ValueError(f"{path}: {what} is not supported here; take another checkpoint")
        hidden, heads = c.get("hidden_size"), c.get("num_attention_heads")
        head_dim = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None
        implied = {"num_key_value_heads": heads, "head_dim": head_dim, "attention_bias": c["model_type"] == "qwen2",
                   "tie_word_embeddings": False, "quantization_config": {}}  # fmt: skip
        # Files disagree on what ends a text. For generation, generation_config.json is the one that decides.
        generation, eos = os.path.join(folder, "generation_config.json"), c.get("eos_token_id", [])
        if os.path.exists(generation) and read_json(generation).get("eos_token_id") is not None:
            eos = read_json(generation)["eos_token_id"]
        c = {**implied, **rope, **c, "eos": eos if isinstance(eos, list) else [eos]}
        for field in fields(cls):
            value, kinds = c.get(field.name), (int, float) if field.type is float else field.type
            if not isinstance(value, kinds) or (field.type in (int, float) and value <= 0):
                raise ValueError(f"{path}: {field.name} is {value!r}, which no Qwen2 model has")
        return cls(**{field.name: c[field.name] for field in fields(cls)})


class Linear:
    """x [T, in] -> x W^T + b [T, out]. In float32 on a CPU, F.linear takes one row on one thread, and copies the weight
    for more. So a large one is laid out once, by oneDNN: 4 rows then cost about what 1 costs, the time to stream it. A
    small one, or one also read `by_rows` (an embedding), is multiplied in 8 blocks that threads can share."""

    def __init__(self, weight, bias=None, by_rows=False):
        self.weight, self.bias, self.how = weight, bias, "plain"
        if weight.dtype == torch.float32 and weight.device.type == "cpu":
            large = weight.numel() > 2**20 and not by_rows and torch.backends.mkldnn.is_available()
            if large and hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # private, but what torch.compile relies on
                self.weight, self.how = torch.ops.mkldnn._reorder_linear_weight(weight, 8), "packed"
            elif len(weight) % 8 == 0:
                self.how = "blocks"

    def __call__(self, x):
        if self.how == "packed":
            few = F.pad(x, (0, 0, 0, 4 - len(x))) if len(x) < 4 else x  # 4 rows are no slower than 1, rather faster
            return torch.ops.mkldnn._linear_pointwise(few, self.weight, self.bias, "none", [], "")[: len(x)]
        if self.how == "blocks":
            blocks = self.weight.view(8, len(self.weight) // 8, -1)  # [8, out / 8, in]
            y = torch.bmm(blocks, x.t().expand(8, -1, -1)).view(len(self.weight), len(x)).t().contiguous()  # [T, out]
            return y if self.bias is None else y + self.bias
        return F.linear(x, self.weight, self.bias)


class Layer:
    """Attention, then the MLP. q, k, v are one matmul, and so are gate and up: fewer operators, same numbers."""

    def __init__(self, c, weights, index):
        self.config, at, hidden, inner = c, f"model.layers.{index}.", c.hidden_size, c.intermediate_size
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.attention_norm = weights.take(f"{at}input_layernorm.weight", hidden)
        self.qkv = weights.linear(f"{at}self_attn.", hidden, c.attention_bias, q_proj=q, k_proj=kv, v_proj=kv)
        self.o = weights.linear(f"{at}self_attn.", q, o_proj=hidden)
        self.mlp_norm = weights.take(f"{at}post_attention_layernorm.weight", hidden)
        self.gate_up = weights.linear(f"{at}mlp.", hidden, gate_proj=inner, up_proj=inner)
        self.down = weights.linear(f"{at}mlp.", inner, down_proj=hidden)

    def __call__(self, x, index, cache, rope, mask):
        c = self.config
        y = self.qkv(F.rms_norm(x, (c.hidden_size,), self.attention_norm, c.rms_norm_eps))
        y = y.view(len(x), -1, c.head_dim).transpose(0, 1)  # [heads + 2 kv_heads, T, head_dim]
        q, k, v = y.split([c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads])
        k, v = cache.append(index, rotate(k, *rope), v)  # [kv_heads, cached + T, head_dim]
        y = attend(rotate(q, *rope), k, v, mask)
        x = x + self.o(y.transpose(0, 1).reshape(len(x), -1))  # [T, heads * head_dim] -> [T, hidden]
        gate, up = self.gate_up(F.rms_norm(x, (c.hidden_size,), self.mlp_norm, c.rms_norm_eps)).chunk(2, -1)
        # Threads share rows between them, and where one ends in the middle of a vector register, exp rounds otherwise.
        return x + self.down(torch.cat([F.silu(rows) for rows in gate.split(1 if mask is None else len(x))]) * up)


def attend(q, k, v, mask):
    """q [heads, T, head_dim] over k, v [kv_heads, cached + T, head_dim]. Without a mask row by row, each over the keys
    up to its own: the shapes of plain decoding, and so its very bits, which one call for all rows would not give."""
    if mask is None and q.shape[1] > 1:
        ends = range(k.shape[1] - q.shape[1] + 1, k.shape[1] + 1)
        return torch.cat([attend(q[:, i : i + 1], k[:, :end], v[:, :end], None) for i, end in enumerate(ends)], 1)
    return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)[0]


def rotate(x, cos, sin):
    """Rotary position embedding of x [heads, T, head_dim]: channel j turns with channel j + head_dim / 2. Rolling by
    half exchanges the two, and the sign is in `sin`. Su et al. 2021, arXiv 2104.09864."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Qwen2:
    """A decoder. `load` makes one; `model(ids, cache, last)` feeds it tokens."""

    def __init__(self, config, embed, layers, norm, head):
        self.config, self.embed, self.layers, self.norm, self.head = config, embed, layers, norm, head
        self.device, self.dtype, self.exact = norm.device, norm.dtype, getattr(head, "exact", False)
        self.cos = self.sin = torch.empty(0).to(norm)  # [positions, head_dim], as many as a text has needed so far

    def new_cache(self, max_length):
        """An empty cache for texts of up to max_length tokens, or for as many as the model's context allows."""
        from kv_cache import KVCache  # here, so that this file can be imported alone
        c, length = self.config, min(max_length, self.config.max_position_embeddings)
        return KVCache(c.num_hidden_layers, c.num_key_value_heads, c.head_dim, length, self.dtype, self.device)

    def __call__(self, ids, cache, last):
        """Add the tokens ids [T] to the cache. Returns logits [last, vocab], float32: what follows each of the last.
        `last` may be 0. Only these rows go through the head: all rows of a long prompt would be over a gigabyte."""
        ids = torch.as_tensor(ids, device=self.device)
        if ids.dim() != 1:
            raise NotImplementedError(f"batch size is one here: ids must be [T], not {list(ids.shape)}")
        assert 0 <= last <= len(ids), f"last is {last}, of {len(ids)} tokens"
        x = torch.cat([self.hidden_states(some, cache) for some in ids.split(512)])[len(ids) - last :]  # small masks
        x = F.rms_norm(x, (self.config.hidden_size,), self.norm, self.config.rms_norm_eps)
        return self.head(x).float() if last else torch.empty(0, self.config.vocab_size, device=self.device)

    def hidden_states(self, ids, cache):
        """Embed ids [T], run all layers over them, and let the cache advance. Returns [T, hidden]."""
        start, end = cache.length, cache.length + len(ids)
        while end > len(self.cos):  # computed anew in each pass, these would be a tenth of a small draft's operators
            turns = self.config.rope_theta ** -(torch.arange(0, self.config.head_dim, 2.0) / self.config.head_dim)
            angles = torch.outer(torch.arange(len(self.cos), len(self.cos) + 512.0), turns)  # [512, head_dim / 2]
            self.cos = torch.cat([self.cos, angles.cos().repeat(1, 2).to(self.norm)])
            self.sin = torch.cat([self.sin, torch.cat([-angles.sin(), angles.sin()], -1).to(self.norm)])
        rope = self.cos[start:end], self.sin[start:end]
        # Row i may see all that is cached and itself, keys 0 .. start + i. SDPA's own is_causal would line the triangle
        # up with key 0 and hide nearly all from a verify pass. One row needs no mask; nor do few, see `attend`.
        alone = len(ids) <= (16 if self.exact else 1)
        mask = None if alone else torch.ones(len(ids), end, dtype=torch.bool, device=self.device).tril(start)
        x = self.embed.weight[ids].to(self.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, index, cache, rope, mask)
        cache.advance(len(ids))
        return x

    @classmethod
    def load(cls, path, bits=None, device=None, dtype=None, head_bits=4):
        """Read a folder or Hub id. bits: 32 (the default on a CPU), 16, or 4, by quantize.py, with a head in 4 or 8.
        Raises OSError or ValueError, in one line, for files that are missing, damaged or of another model."""
        folder = find(path)
        device, c = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")), Config.read(folder)
        bits = bits or (4 if c.quantization_config else 32 if device.type == "cpu" else 16)
        if bits not in (4, 16, 32) or (bits != 4 and (c.quantization_config or head_bits != 4)):
            raise ValueError(f"{folder}: bits is {bits} and must be 4 with head_bits or weights in 4, else 4, 16 or 32")
        dtype = dtype or (torch.float32 if bits == 32 or (bits == 4 and device.type == "cpu") else torch.bfloat16)
        weights, tied, shape = Checkpoint(folder, device, dtype), c.tie_word_embeddings, (c.vocab_size, c.hidden_size)
        if bits == 4:
            from quantize import Weights  # here, so that this file can be imported alone
            weights = Weights(weights, tied, c.quantization_config, head_bits)
        if tied and "lm_head.weight" in weights.shapes:  # some have one though they are tied
            two = [weights.take(f"{n}.weight", *shape, mapped=True) for n in ("lm_head", "model.embed_tokens")]
            if not torch.equal(*two):
                warnings.warn(f"{folder}: lm_head.weight is ignored: tied, but unlike the embedding", stacklevel=2)
            del weights.shapes["lm_head.weight"]
        jobs = [lambda: weights.linear("model.", c.hidden_size, embed_tokens=c.vocab_size, by_rows=True)]
        jobs += [lambda: weights.linear("", c.hidden_size, lm_head=c.vocab_size)] * (not tied)
        jobs += [lambda i=i: Layer(c, weights, i) for i in range(c.num_hidden_layers)]
        parts = weights.map(jobs) if bits == 4 else (job() for job in jobs)
        embed, *layers = tqdm(parts, "loading", len(jobs), disable=None)
        head = embed if tied else layers.pop(0)
        norm = weights.take("model.norm.weight", c.hidden_size)
        if weights.shapes:
            raise ValueError(f"{folder}: {min(weights.shapes)} has no place in this model: is config.json its own?")
        return cls(c, embed, layers, norm, head)


def find(path, download=True, files=("*.json", "*.safetensors")):
    """The folder of a model: `path` itself, or the Hub client's copy of it, downloaded if need be and if `download`."""
    if os.path.isdir(path):
        return os.path.normpath(path)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path) or os.path.exists(path.split("/")[0]):
        raise FileNotFoundError(f"{path}: no such folder (a Hub id would look like Qwen/Qwen2.5-0.5B-Instruct)")
    try:
        return snapshot_download(path, allow_patterns=list(files), local_files_only=not download)
    except Exception as error:  # many kinds, of the client and of what it is built on; the network is not ours to fix
        why = "HF_HUB_OFFLINE is set. " * constants.HF_HUB_OFFLINE + (" ".join(str(error).split()) or repr(error))
        raise OSError(f"{path}: not whole in {constants.HF_HUB_CACHE}, nor to be had: {why[:300]}") from None


def read_json(path):
    """A json file that holds an object. Raises in one line if there is none."""
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path} is missing: this is not a model folder, or its download is incomplete")
    try:
        with open(path, encoding="utf-8") as f:
            content = json.load(f)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): download it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__} and no object: download it again")
    return content


class Checkpoint:
    """The tensors of a folder. All files are checked before any tensor is read."""

    def __init__(self, folder, device, dtype):
        files, index = ["model.safetensors"], os.path.join(folder, "model.safetensors.index.json")
        if not os.path.exists(os.path.join(folder, files[0])):
            try:
                files = sorted({os.path.basename(file) for file in read_json(index)["weight_map"].values()})
            except (KeyError, TypeError, AttributeError):
                raise ValueError(f"{index} has no weight_map: download it again") from None
        self.folder, self.device, self.dtype, self.shapes, self.file = folder, device, dtype, {}, {}
        for file in [os.path.join(folder, name) for name in files]:
            for name, shape in read_header(file).items():
                self.shapes[name], self.file[name] = shape, file

    def take(self, name, *shape, mapped=False):
        """One tensor, on the device and in the dtype. mapped: only a look at the file's own bytes, which may change."""
        if name not in self.shapes:
            hint = "tie_word_embeddings is false in config.json" if name == "lm_head.weight" else "download it again"
            raise ValueError(f"{self.folder}: the tensor {name} is missing: {hint}")
        file, stored = self.file[name], self.shapes[name] if mapped else self.shapes.pop(name)
        if stored != list(shape):
            raise ValueError(f"{file}: {name} has shape {stored}, but config.json asks for {list(shape)}")
        try:
            with safe_open(file, "pt") as f:
                tensor = f.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise OSError(f"{file}: cannot map {os.path.getsize(file) / 1e9:.1f} GB ({error}): free memory") from None
        codes, wide = mapped and tensor.dtype == torch.uint8, tensor.is_floating_point() and tensor.element_size() > 1
        if not (codes or (wide and torch.stack(tensor.aminmax()).isfinite().all())):
            raise ValueError(f"{file}: {name} contains NaN or infinity, or is no 16- or 32-bit float: {tensor.dtype}")
        return tensor if mapped else tensor.to(self.device, self.dtype, copy=True)

    def linear(self, at, inputs, bias=False, by_rows=False, **outputs):
        """Several linear layers on the same input, one below the other, as a single one."""
        weight = torch.cat([self.take(f"{at}{name}.weight", size, inputs) for name, size in outputs.items()])
        bias = torch.cat([self.take(f"{at}{name}.bias", size) for name, size in outputs.items()]) if bias else None
        return Linear(weight, bias, by_rows)


def read_header(file):
    """Names and shapes of a safetensors file: 8 bytes of length, that much JSON, then the data."""
    if not os.path.exists(file):
        raise FileNotFoundError(f"{file} is missing, but the index names it: the download is incomplete")
    size = os.path.getsize(file)
    with open(file, "rb") as f:
        start = f.read(8)
        length = int.from_bytes(start, "little")
        header = f.read(length) if length < size else ""
    if start == b"version ":
        raise ValueError(f"{file} is a git-lfs pointer, not the file: run `git lfs pull`, or download it again")
    try:
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        expected = 8 + length + max([entry["data_offsets"][1] for entry in entries.values()], default=0)
        shapes = {name: entry["shape"] for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        raise ValueError(f"{file} has {size} bytes and is no safetensors file: download it again") from None
    if size != expected:
        raise ValueError(f"{file} has {size} bytes and should have {expected}: download it again")
    return shapes
