"""Other engines on the prompts of bench.py: Hugging Face transformers, and servers that speak OpenAI's protocol.

    transformers_modes(target, draft, "cpu", 32) -> {"plain": write, "assisted": write, "lookup": write}
    server_modes(["http://127.0.0.1:8080"])      -> {"server": write}

write(ids, limit, eos) -> Written: ids, the prompt, a list; limit, how many tokens to write; eos, the ids that end a
text. All is greedy, each prompt is read anew, and reading it is in no time: the clock starts when the first round's
tokens arrive, as it does for ours. The first call of an engine is slower than others, so write something untimed first.
"""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections import namedtuple

import torch

from model import Config

# One prompt, written once. ids or text, the other one None: all that was written, in ids with the end of text. tokens,
# seconds: behind the first round. drafted, accepted: likewise, None where the engine does not tell. A round adds one
# token of the target's to what it accepted, so there were tokens - accepted rounds, as long as nothing cut one off.
Written = namedtuple("Written", "ids text tokens seconds drafted accepted")


class Rounds:
    """What generate() calls a streamer: it hears of the prompt, and then of the tokens of each round."""

    def __init__(self):
        self.tokens, self.times, self.rows = [], [], []

    def put(self, ids):  # on the CPU by now, so whatever had to be waited for has been
        self.times.append(time.perf_counter())
        self.tokens.append(ids.flatten().tolist())

    def end(self):
        pass

    def count(self, module, args, output):
        """A hook behind each pass of the target: its rows of logits are one more than the drafts that it judged."""
        self.rows.append(output.logits.shape[1])


def transformers_modes(target, draft, device, bits):
    """Load both folders, once. bits: 16 or 32. Raises ValueError or OSError for what transformers cannot run."""
    for folder in (target, draft):
        if bits not in (16, 32) or Config.read(folder).quantization_config:
            what = f"{folder}: transformers cannot read our 4 bits"
            raise ValueError(f"{what}; give --bits 32 or 16 and, if it is quantized, the folder that it was made from")
    try:
        import transformers
    except ImportError:
        raise ValueError("to measure transformers, install it: pip install transformers") from None
    transformers.logging.set_verbosity_error()  # it warns of what it passes to itself
    transformers.logging.disable_progress_bar()  # shown even where nobody watches
    models, context = [], Config.read(target).max_position_embeddings
    for folder in (target, draft):
        dtype = {32: torch.float32, 16: torch.bfloat16}[bits]
        models.append(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval())
        # A checkpoint's generation_config.json may ask for more than greedy decoding: those of Qwen2.5 ask for a
        # repetition penalty, which do_sample=False leaves on. So nothing of it is kept, and what is left are
        # transformers' own defaults: up to 20 drafts, until the draft is less than 40 % sure. (Where scikit-learn is
        # installed it moves that, anew for each text.) The schedule "heuristic" would carry over from text to text.
        models[-1].generation_config = transformers.GenerationConfig(num_assistant_tokens_schedule="constant")

    def mode(**how):
        def write(ids, limit, eos):
            rounds, prompt = Rounds(), torch.tensor([ids], device=device)
            options = {"max_new_tokens": min(limit, context - len(ids)), "eos_token_id": list(eos) or None}
            options |= {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
            with models[0].register_forward_hook(rounds.count):
                models[0].generate(prompt, streamer=rounds, **options, **how)
            _, first, *rest = rounds.tokens
            tokens = sum(map(len, rest))
            # Drafted and accepted as ours are, but for the last round: lookup drafts beyond the limit, and where that
            # or an accepted end of text cuts the round off, it ends in a draft, which does not count as accepted here.
            drafts = sum(rows - 1 for rows in rounds.rows[1:]), tokens - len(rest)
            return Written(sum(rest, first), None, tokens, rounds.times[-1] - rounds.times[1], *drafts)

        return write

    # Its lookup falls back to a single token and takes the first place found; ours wants two tokens, and the latest.
    return {"plain": mode(), "assisted": mode(assistant_model=models[1]), "lookup": mode(prompt_lookup_num_tokens=10)}


def ask(url, body=None, timeout=600):
    """Yield the lines of a server's answer as they arrive. With a body it is a POST. Raises OSError, in one line."""
    try:
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            yield from answer
    except urllib.error.HTTPError as error:
        said = " ".join(error.read(300).decode(errors="replace").split())
        raise OSError(f"{url} answers {error.code} {error.reason}: {said}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise OSError(f"{url}: no answer ({getattr(error, 'reason', error)}); is the server running there?") from None


def server_modes(urls, model=None):
    """One mode a server. urls: with or without /v1. model: the name to ask for; None if each server has just one.

    Each is asked for its models, so that a wrong address is found at once. Raises ValueError or OSError, in one line.
    """
    return {f"server {i}" if len(urls) > 1 else "server": server(url, model) for i, url in enumerate(urls, 1)}


def drafts_of_vllm(url):
    """The drafts that a vLLM has judged since it was started, and those that it kept: over all requests, so nobody else
    may use it meanwhile. [None, None] of another server, and without --speculative-config."""
    try:
        page = b"".join(ask(f"{url}/metrics", timeout=30)).decode(errors="replace")
    except OSError:
        return [None, None]
    names = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"
    found = [[float(line.split()[-1]) for line in page.splitlines() if line.startswith(name + "{")] for name in names]
    return [int(sum(engines)) if engines else None for engines in found]


def server(url, model):
    root = url.rstrip("/").removesuffix("/v1")
    url = root + "/v1"
    try:
        models = [entry["id"] for entry in json.loads(b"".join(ask(f"{url}/models", timeout=30)))["data"]]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{url}/models answers, but not as OpenAI's protocol has it: not such a server") from None
    if model is None and len(models) != 1:
        raise ValueError(f"{url} has {len(models)} models, so name the one to measure: {', '.join(models)}")

    def write(ids, limit, eos):
        body = {"model": model or models[0], "prompt": list(ids), "max_tokens": limit, "temperature": 0, "stream": True}
        # Penalties that vLLM would take from generation_config.json, and llama.cpp from how it was started. (Each
        # ignores what only the other one knows. llama.cpp ends a text at the model's own ids alone.)
        body |= {"repetition_penalty": 1, "repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
        # A prompt that is remembered makes decoding no faster, but is read in other pieces, and so rounded otherwise.
        body |= {"stop_token_ids": list(eos), "cache_prompt": False}
        # Both are to say in each chunk how many tokens there are so far: it may hold several, or only half of one.
        body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "timings_per_token": True}
        text, seen, total, told, ended, before = "", [], None, {}, False, drafts_of_vllm(root)
        for line in ask(f"{url}/completions", body):
            now = time.perf_counter()
            chunk = json.loads(line[6:]) if line.startswith(b"data: {") else {}  # else a sign of life, or [DONE]
            if "error" in chunk:
                raise OSError(f"{url}/completions: {chunk['error']}")
            told = chunk.get("timings") or told
            count = (chunk.get("usage") or {}).get("completion_tokens", told.get("predicted_n"))
            total = total if count is None else count
            for choice in chunk.get("choices", []):  # the one, or none in a chunk that only counts
                text += choice.get("text") or ""
                ended = ended or choice.get("finish_reason") is not None
                if count != 0:
                    seen.append((now, count, told))
        if not (ended and seen and total):
            raise OSError(f"{url}/completions: the answer broke off, or does not say how many tokens it has")
        start, first, then = seen[0]
        tokens = total - (first or 1)  # where the first chunk does not tell, it has one, as of a server without drafts
        # llama.cpp tells of drafts as soon as there are any, and counts them as ours, except that drafts behind an
        # accepted end of text may be accepted, too.
        drafts = [told[n] - then.get(n, 0) if n in told else None for n in ("draft_n", "draft_n_accepted")]
        sums = [*zip(before, drafts_of_vllm(root), strict=True)]
        if None not in sum(sums, ()):  # vLLM judges no drafts in its first round, that of the prompt
            drafted, accepted = (after - before for before, after in sums)
            rounds = len({count for _, count, _ in seen}) - 1  # it sends a chunk for each
            drafts = drafted, min(accepted, tokens - rounds)  # it also counts what it accepts beyond max_tokens
        return Written(None, text, tokens, seen[-1][0] - start, *drafts)

    return write
