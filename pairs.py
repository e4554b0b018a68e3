"""The pairs of models that bench.py knows by name, which of them it takes if it is not told, and what it asks them."""

import json
import os

import torch

from measure.machine import free_memory
from model import Checkpoint, find

HERE = os.path.dirname(os.path.abspath(__file__))
PAIRS = {  # name -> target, draft
    "tiny": (os.path.join(HERE, "tiny", "target"), os.path.join(HERE, "tiny", "draft")),
    "qwen2.5": ("Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
    "coder": ("Qwen/Qwen2.5-Coder-1.5B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct"),
}


def choose(target, draft, device, bits):
    """What --target and --draft stand for, each a folder or Hub id, and in words why, if neither was given.

    The default is qwen2.5 where it could run at once, and else tiny. Raises ValueError if one model is missing.
    """
    if target is None and draft is None:
        name, why = default(device, bits)
        other = "--target qwen2.5 (some 7 GB, unless they are on disk)" if name == "tiny" else "--target tiny"
        return *PAIRS[name], f"The pair {name!r}, because {why}.\nThe other: python bench.py {other}"
    if target is None:
        raise ValueError(f"--draft {draft} needs a --target: the larger model, with the same tokenizer")
    target, partner = PAIRS.get(target, (target, None))
    if not (draft or partner):
        raise ValueError(f"--target {target} needs a --draft: a smaller model with the same tokenizer")
    return target, draft or partner, None


def default(device, bits):
    """The name of a pair, and why that one."""
    parameters = 0
    for name in PAIRS["qwen2.5"]:
        try:
            shapes = Checkpoint(find(name, download=False), None, None).shapes
        except (OSError, ValueError):
            return "tiny", f"{name} is not on this machine, or not all of it"
        parameters += sum(torch.Size(shape).numel() for shape in shapes.values())
    bits = bits or (32 if device == "cpu" else 16)
    need, free = parameters * bits / 8 * 1.2, free_memory(device)  # a fifth more, for the caches and what passes by
    need *= 2 if bits == 4 and device == "cpu" else 1  # there they are unpacked to 8
    why = f"qwen2.5 needs {need / 1e9:.1f} GB in {bits} bits"
    if free is None:
        return "tiny", f"{why}, and how much is free cannot be told here"
    return "qwen2.5" if free >= need else "tiny", f"{why}, and {free / 1e9:.1f} GB are free"


def prompts(is_chat, domain):
    """{domain: [prompt]}, of one domain or "all". Raises ValueError if there are none.

    An instruct model is asked. A base model gets the beginning of a text, from files that tiny was not trained on.
    """
    file = os.path.join(HERE, "prompts.json" if is_chat else os.path.join("tiny", "prompts.json"))
    with open(file, encoding="utf-8") as f:
        known = json.load(f)
    if domain != "all" and domain not in known:
        raise ValueError(f"--domain {domain} is for instruct models: a base model has {', '.join(known)}")
    return known if domain == "all" else {domain: known[domain]}
