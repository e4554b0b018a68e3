"""Writes model folders as they come from the Hub, a few hundred kilobytes, for the tests to load and to damage."""

import json

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "vocab_size": 320,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "eos_token_id": 258,
}


def tensors(seed=0, **config):
    """Random weights under the names that a Qwen2 checkpoint has."""
    c, g = CONFIG | config, torch.Generator().manual_seed(seed)
    hidden, inner, kv = c["hidden_size"], c["intermediate_size"], c["hidden_size"] // 2
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for name, size in (("q", hidden), ("k", kv), ("v", kv)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (size, hidden)
            shapes[f"{at}self_attn.{name}_proj.bias"] = (size,)
        shapes[at + "self_attn.o_proj.weight"] = (hidden, hidden)
        shapes |= {at + f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[at + "mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {at + f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return {name: torch.randn(shape, generator=g) * 0.3 for name, shape in shapes.items()}


def tokenizer(exchange=()):
    """An id for each byte, then Qwen's three control tokens and a tool token. exchange: two ids to change over."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    if exchange:
        a, b = exchange
        letters[a], letters[b] = letters[b], letters[a]
    result = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    result.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return result


def write(folder, weights=None, shards=1, seed=0, **config):
    """A whole model folder. With shards=2, in two files and an index. Returns the folder as text."""
    folder.mkdir(exist_ok=True)
    weights = tensors(seed, **config) if weights is None else weights
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 256]}))
    tokenizer().save(str(folder / "tokenizer.json"))
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return str(folder)
    names = sorted(weights)
    files = {name: f"model-{1 + (i >= len(names) // 2):05}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return str(folder)
