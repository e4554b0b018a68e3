"""Train the pair that comes with the repository: two small Qwen2 models, a target and a draft distilled from it.

    python tiny/train.py            fetch the text, train both, write tiny/target and tiny/draft: hours on 2 cores
    python tiny/train.py --smoke    all of that in a minute, on text that is on every machine, into tiny/work/smoke

It goes on where it was interrupted. The folders that it writes are plain Qwen2 checkpoints, for any loader.
"""

import argparse
import json
import math
import os
import pathlib
import sys

import corpus
import torch
import torch.nn.functional as F
from huggingface_hub.utils import tqdm
from safetensors.torch import save_file
from torch import nn

# Deep and narrow: at this size much of a step goes into starting operators, of which 1 layer has far fewer than 12.
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "torch_dtype": "bfloat16",
    "num_hidden_layers": 12, "hidden_size": 256, "intermediate_size": 640,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rope_theta": 10000.0,
    "vocab_size": 4096, "tie_word_embeddings": True, "eos_token_id": 4093,  # <|endoftext|>
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "use_sliding_window": False, "initializer_range": 0.05,
}  # fmt: skip
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DRAFT_CONFIG = CONFIG | {"num_hidden_layers": 1, "intermediate_size": 1536}
# Steps of each model; tokens in a window; batches of text that the target writes for the draft, 80 texts each.
FULL = {"target": 4500, "draft": 5200, "length": 512, "batches": 32}
SMOKE = {"target": 150, "draft": 100, "length": 128, "batches": 1}


class Layer(nn.Module):
    """As in model.py, but batched and differentiable. The parameters have the names of a checkpoint."""

    def __init__(self, c):
        super().__init__()
        hidden, inner = c["hidden_size"], c["intermediate_size"]
        self.head_dim = hidden // c["num_attention_heads"]
        kv = c["num_key_value_heads"] * self.head_dim
        self.input_layernorm = nn.RMSNorm(hidden, c["rms_norm_eps"])
        sizes = {"q_proj": hidden, "k_proj": kv, "v_proj": kv, "o_proj": hidden}
        linear = {name: nn.Linear(hidden, size, bias=name != "o_proj") for name, size in sizes.items()}
        self.self_attn = nn.ModuleDict(linear)
        self.post_attention_layernorm = nn.RMSNorm(hidden, c["rms_norm_eps"])
        shapes = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
        self.mlp = nn.ModuleDict({name: nn.Linear(*s, bias=False) for name, s in shapes.items()})

    def forward(self, x, rope, mask, cache, start):
        batch, length, _ = x.shape
        y = self.input_layernorm(x)
        q, k, v = (self.self_attn[name](y) for name in ("q_proj", "k_proj", "v_proj"))
        q, k, v = (z.view(batch, length, -1, self.head_dim).transpose(1, 2) for z in (q, k, v))  # [batch, heads, T, 64]
        q, k = (z * rope[0] + z.roll(self.head_dim // 2, -1) * rope[1] for z in (q, k))
        if cache is not None:  # [2, batch, kv_heads, longest, 64]: sampling, a token at a time
            cache[0, :, :, start : start + length], cache[1, :, :, start : start + length] = k, v
            k, v = cache[:, :, :, : start + length]
        # Written out, as the backward pass of torch's fused attention takes twice as long on a CPU.
        grouped = q.reshape(batch, k.shape[1], -1, self.head_dim)  # heads that share keys, one below the other
        scores = (grouped * self.head_dim**-0.5 @ k.transpose(2, 3)).view(batch, -1, length, k.shape[2])
        weights = (scores + mask).softmax(-1).view(batch, k.shape[1], -1, k.shape[2])
        y = (weights @ v).view(batch, -1, length, self.head_dim)
        x = x + self.self_attn["o_proj"](y.transpose(1, 2).reshape(batch, length, -1))
        y = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y))


class Qwen2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        generator = torch.Generator().manual_seed(0)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # What a layer adds to its input begins smaller, so that the sum of 12 layers does not drown the input.
                small = (2 * c["num_hidden_layers"]) ** -0.5 if "o_proj" in name or "down_proj" in name else 1
                nn.init.normal_(weight, std=c["initializer_range"] * small, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, ids, caches=None, start=0):
        """ids [batch, T] -> logits [batch, T, vocab], float32. With caches, `start` tokens are in them already."""
        half, length = self.layers[0].head_dim // 2, ids.shape[1]
        frequencies = self.config["rope_theta"] ** -(torch.arange(half, device=ids.device) / half)
        angles = torch.outer(torch.arange(start, start + length, device=ids.device), frequencies)
        dtype = torch.bfloat16 if torch.is_autocast_enabled(ids.device.type) else torch.float32  # of q and k
        rope = angles.cos().repeat(1, 2).to(dtype), torch.cat([-angles.sin(), angles.sin()], -1).to(dtype)  # [T, 64]
        mask = torch.full((length, start + length), -math.inf, device=ids.device, dtype=dtype).triu(start + 1)
        x = self.embed_tokens(ids)
        for i, layer in enumerate(self.layers):
            x = layer(x, rope, mask, None if caches is None else caches[i], start)
        with torch.autocast(ids.device.type, enabled=False):  # logits of 8 bits' precision would tie
            return F.linear(self.norm(x).float(), self.embed_tokens.weight)


def mean_of_each(data, values):
    """{domain: mean} of values [rows * domains, T] at the positions of such a batch."""
    return dict(zip(data, values.view(len(data), -1).mean(1).tolist(), strict=True))


def save(content, path):
    """All of it or nothing."""
    torch.save(content, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def train(name, model, loss_of, evaluate, steps, peak, work):
    """AdamW with a cosine. loss_of(step) gives a loss, evaluate() {what: number}. Returns that, of every 100th step.

    Goes on from work/name.pt. As a step picks its text by its number, an interruption changes nothing.
    """
    path, start, curve = work / f"{name}.pt", 0, []
    decayed = [{"params": [w for w in model.parameters() if w.dim() == 2], "weight_decay": 0.1}]
    others = [{"params": [w for w in model.parameters() if w.dim() < 2], "weight_decay": 0.0}]  # norms and biases
    optimizer = torch.optim.AdamW(decayed + others, betas=(0.9, 0.98), fused=True)
    if path.exists():
        saved = torch.load(path, weights_only=True, map_location=DEVICE)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start, curve = saved["step"], saved["curve"]
    curve = curve or [{"step": 0, **evaluate()}]
    with tqdm(total=steps, initial=start, desc=name, unit="step", disable=None) as bar:
        for step in range(start, steps):
            warmup, cosine = (step + 1) / min(100, steps / 2), (1 + math.cos(math.pi * step / steps)) / 2
            for group in optimizer.param_groups:
                group["lr"] = peak * min(warmup, 0.05 + 0.95 * cosine)
            loss = loss_of(step)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            bar.update()
            if (step + 1) % 100 == 0 or step + 1 == steps:
                curve.append({"step": step + 1, **evaluate()})
                bar.write("  ".join(f"{what} {value:.4g}" for what, value in curve[-1].items()))
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save(state | {"step": step + 1, "curve": curve}, path)
    return curve


def train_target(data, held, plan, work, amp):
    """The target, on the next token of the text."""
    model = Qwen2(CONFIG).to(DEVICE)

    def losses(batch):
        batch = batch.to(DEVICE)
        with amp:
            logits = model(batch[:, :-1])
        return F.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none")  # [rows, T], in nats

    @torch.no_grad()
    def evaluate():
        return mean_of_each(held, losses(corpus.windows(held, 0, 4, plan["length"])))

    def loss_of(step):
        return losses(corpus.windows(data, step, 1, plan["length"])).mean()

    return model, train("target", model, loss_of, evaluate, plan["target"], 2e-3, work)


@torch.no_grad()
def sample(model, prompts, length, temperature, generator, amp):
    """Continue prompts [rows, T] to [rows, length], each row at its own temperature [rows, 1]; 0 is greedy."""
    c, device = model.config, prompts.device
    shape = c["num_hidden_layers"], 2, len(prompts), c["num_key_value_heads"], length, model.layers[0].head_dim
    ids, start = prompts, 0
    with amp:
        dtype = torch.bfloat16 if torch.is_autocast_enabled(device.type) else torch.float32
        caches = torch.zeros(shape, device=device, dtype=dtype)
        while ids.shape[1] < length:
            logits = model(ids[:, start:], caches, start)[:, -1]
            # The largest of logits / t + Gumbel noise is a draw from softmax(logits / t). Times t, it may also be 0.
            noise = -torch.empty_like(logits).exponential_(generator=generator).log()
            start, ids = ids.shape[1], torch.cat([ids, (logits + temperature * noise).argmax(-1, keepdim=True)], 1)
    return ids


def own_text(target, data, plan, work, amp):
    """What the target writes behind the beginnings of real text: {domain: ids [texts, length / 2]}."""
    path = work / "own.pt"
    if not path.exists():
        generator, own = torch.Generator(DEVICE).manual_seed(0), {domain: [] for domain in data}
        for batch in tqdm(range(plan["batches"]), "sampling", unit="batch", disable=None):
            for domain, rows in [(domain, 48 if domain == "code" else 16) for domain in data]:
                prompts = corpus.windows({domain: data[domain]}, -1 - batch, rows, plan["length"] // 8 - 1).to(DEVICE)
                # A third of them greedily, as that is how the pair is mostly used; others at temperatures up to 1.
                temperature = (1.5 * torch.rand(rows, 1, device=DEVICE, generator=generator) - 0.5).clamp(min=0)
                own[domain].append(sample(target, prompts, plan["length"] // 2, temperature, generator, amp).cpu())
        save({domain: torch.cat(texts) for domain, texts in own.items()}, path)
    return torch.load(path, weights_only=True)


def distil(target, data, held, plan, work, amp):
    """The draft, on the target's distribution over text that the target wrote, as that is where it will be asked.

    A draft is kept with probability sum(min(p, q)) (Leviathan et al. 2023, corollary 3.6): `evaluate` gives its mean.
    """
    own = own_text(target, data, plan, work, amp)

    @torch.no_grad()
    def ask_target(ids):
        with amp:
            return target(ids.to(DEVICE)).log_softmax(-1)

    # Once for all: 5 GB for 2,560 texts.
    p_own = {domain: torch.cat([ask_target(some).half().cpu() for some in own[domain].split(8)]) for domain in own}
    model = Qwen2(DRAFT_CONFIG).to(DEVICE)
    new, old = model.state_dict(), target.state_dict()  # begin as the target without most of its layers
    model.load_state_dict({n: old[n] if n in old and old[n].shape == new[n].shape else new[n] for n in new})

    @torch.no_grad()
    def evaluate():
        ids = corpus.windows(held, 0, 4, plan["length"] - 1)
        with amp:
            q = model(ids.to(DEVICE)).log_softmax(-1)
        return mean_of_each(held, torch.minimum(ask_target(ids), q).exp().sum(-1))

    def loss_of(step):
        dice = torch.Generator().manual_seed(step)
        share = {domain: 6 if domain == "code" else 1 for domain in own}  # a draft for code above all
        rows = {domain: torch.randint(len(own[domain]), (share[domain],), generator=dice) for domain in own}
        ids, p = (torch.cat([some[domain][rows[domain]] for domain in own]).to(DEVICE) for some in (own, p_own))
        with amp:
            q = model(ids).log_softmax(-1)
        return F.kl_div(q, p.float(), reduction="none", log_target=True).sum(-1).mean()  # KL(p || q), in nats

    return model, train("draft", model, loss_of, evaluate, plan["draft"], 2e-3, work)


def write(model, tokenizer, folder):
    """A model folder such as the Hub has."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {f"model.{name}": weight.detach().bfloat16().cpu() for name, weight in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    end, id = corpus.CONTROL[0], model.config["eos_token_id"]
    about = {"tokenizer_class": "Qwen2Tokenizer", "model_max_length": model.config["max_position_embeddings"]}
    about |= {"eos_token": end, "pad_token": end, "unk_token": None, "add_prefix_space": False}
    generation = {"eos_token_id": id, "pad_token_id": id}
    files = {"config": model.config, "generation_config": generation, "tokenizer_config": about}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def run(args):
    """Text, tokenizer, target, draft, each from the work folder as far as it is there already."""
    here = pathlib.Path(__file__).resolve().parent
    work = args.work or here / "work" / ("smoke" if args.smoke else "full")
    plan, out = (SMOKE, work) if args.smoke else (FULL, here)
    work.mkdir(parents=True, exist_ok=True)
    path, begun = work / "plan.json", json.dumps([plan, CONFIG, DRAFT_CONFIG])
    if path.exists() and path.read_text() != begun:
        raise ValueError(f"{work} holds a training with other sizes or steps: delete it, or take another --work")
    path.write_text(begun)

    text = corpus.read(work, args.smoke)
    tokenizer = corpus.make_tokenizer(text, CONFIG["vocab_size"], work / "tokenizer.json")
    data = {domain: corpus.encode(tokenizer, parts["train"]) for domain, parts in text.items()}
    held = {domain: corpus.encode(tokenizer, parts["held"]) for domain, parts in text.items()}
    for domain in text:
        print(f"{domain:<9}{len(data[domain]):>10,} tokens to train on,{len(held[domain]):>8,} held out")

    mixed = args.dtype == "bfloat16" or (DEVICE == "cuda" and not args.dtype)
    amp = torch.autocast(DEVICE, torch.bfloat16, enabled=mixed)
    print("target: held-out loss in nats a token")
    target, loss = train_target(data, held, plan, work, amp)
    print("draft: how much of a draft would be kept on held-out text, at temperature 1")
    draft, kept = distil(target, data, held, plan, work, amp)
    write(target, tokenizer, out / "target")
    write(draft, tokenizer, out / "draft")
    (out / "prompts.json").write_text(json.dumps(corpus.prompts(text), indent=1) + "\n")
    (out / "curves.json").write_text(json.dumps({"target": loss, "draft": kept}, indent=1) + "\n")
    print(f"wrote {out / 'target'} and {out / 'draft'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a minute of everything, for the tests")
    parser.add_argument("--work", type=pathlib.Path, help="for downloads and checkpoints. Default: tiny/work/...")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of matmuls. Default: bfloat16 on a GPU only")
    try:
        run(parser.parse_args())
    except (OSError, ValueError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
