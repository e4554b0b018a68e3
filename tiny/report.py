"""What the tiny pair is worth on text that it was not trained on: the numbers and samples of tiny/README.md.

    python tiny/report.py              some five minutes on 2 cores; fetches the text if train.py has not
    python tiny/report.py --plot FILE  the loss curves as a picture; needs matplotlib
"""

import argparse
import ast
import json
import math
import pathlib
import sys
import textwrap

import torch

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the library itself judges the pair

import corpus  # noqa: E402
from huggingface_hub.utils import tqdm  # noqa: E402

from model import Config, Qwen2  # noqa: E402
from speculative import DraftModel, speculative_decode  # noqa: E402
from text import Text  # noqa: E402


def score(target, draft, ids, name):
    """Means over ids [tokens], in windows of the context: bits a token of either model, and two acceptance rates.

    The rates are of single drafts behind real text: at temperature 1 sum(min(p, q)), greedily how often both models
    think the same token the likeliest.
    """
    length, predicted = target.config.max_position_embeddings, 0
    sums = torch.zeros(4, dtype=torch.float64)
    for window in tqdm(ids.split(length + 1), name, unit="window", disable=None, leave=False):
        fed, answers = window[:-1], window[1:, None]
        p, q = (model(fed, model.new_cache(length), last=len(fed)).log_softmax(-1) for model in (target, draft))
        bits = [-x.gather(1, answers).sum() / math.log(2) for x in (p, q)]
        same = torch.minimum(p, q).exp().sum(), (p.argmax(-1) == q.argmax(-1)).sum()
        sums += torch.stack([*bits, *same])
        predicted += len(fed)
    return (sums / predicted).tolist()


def write(pair, text, beginning, count, temperature):
    """What the pair writes behind a beginning, up to `count` tokens: the text, and whether it came to its end."""
    target, draft = pair
    ids, generator = text.prompt(beginning), torch.Generator().manual_seed(0)
    sampling = {"temperature": temperature, "generator": generator}
    drafter = DraftModel(draft, len(ids) + count, **sampling)
    rounds = speculative_decode(target, drafter, ids, count, eos=target.config.eos, **sampling)
    written = [id for round in rounds for id in round.tokens]
    return text.decode(written), written[-1] in target.config.eos


def functions(files, count):
    """Beginnings that end with the first line of a function, from held-out code."""
    found = []
    for _, content in files:
        for at in range(len(content)):
            if content.startswith(("\ndef ", "\n    def "), at):
                end = content.index("\n", at + 1) + 1
                if content[at:end].endswith("):\n"):
                    found.append((content[max(0, at - 600) : at + 1], content[at + 1 : end]))
    return [found[i * len(found) // count] for i in range(min(count, len(found)))]


def parses(head, body, ended):
    """Whether head and the lines of body that are indented deeper are Python. None if the function has no end."""
    indent, lines = len(head) - len(head.lstrip()), []
    for line in body.splitlines():
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            ended = True
            break
        lines.append(line)
    if not ended:
        return None
    try:
        ast.parse(textwrap.dedent(head + "\n".join(lines) + "\n"))
    except (SyntaxError, ValueError):  # ValueError: a NUL in it
        return False
    return True


def plot(file):
    """The curves that train.py wrote."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ValueError("--plot draws with matplotlib: pip install matplotlib") from None

    with open(HERE / "curves.json", encoding="utf-8") as f:
        curves = json.load(f)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for ax, name, label in zip(axes, ("target", "draft"), ("held-out loss, nats a token", "drafts kept"), strict=True):
        for domain in ("code", "factual", "creative"):
            ax.plot([row["step"] for row in curves[name]], [row[domain] for row in curves[name]], label=domain)
        ax.set(title=name, xlabel="step", ylabel=label)
        ax.legend()
    figure.savefig(file)


def report(work):
    """All but the picture."""
    folders = [HERE / name for name in ("target", "draft")]
    pair = [Qwen2.load(str(folder), bits=32, device="cpu") for folder in folders]
    text = Text(str(folders[0]), Config.read(str(folders[0])).eos)
    for folder, model in zip(folders, pair, strict=True):
        size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
        print(f"{folder.name:<8}{model.config.num_hidden_layers:>3} layers, {size:.1f} MB")

    held = {domain: parts["held"] for domain, parts in corpus.read(work).items()}
    print("\nHeld-out text: bits per byte, and the share of drafts that would be kept")
    print("domain        bytes   target    draft   temperature 1   greedy")
    for domain, files in held.items():
        ids = corpus.encode(text.tokenizer, files)
        size = sum(len(content.encode()) for _, content in files)
        p_bits, q_bits, sampled, greedy = score(*pair, ids, domain)
        a, b = p_bits * len(ids) / size, q_bits * len(ids) / size
        print(f"{domain:<10}{size:>9,}{a:>9.3f}{b:>9.3f}{sampled:>16.1%}{greedy:>9.1%}")

    answers = []
    for before, head in tqdm(functions(held["code"], 50), "functions", disable=None, leave=False):
        answers.append(parses(head, *write(pair, text, before + head, 200, temperature=0.5)))
    ended = [answer for answer in answers if answer is not None]
    print(f"\nOf {len(answers)} functions begun by held-out code and written on at temperature 0.5, {len(ended)} ended")
    print(f"within 200 tokens, and {sum(ended)} of these are Python that parses.")

    with open(HERE / "prompts.json", encoding="utf-8") as f:
        prompts = json.load(f)
    for domain, (first, *_) in prompts.items():
        print(f"\n--- {domain}, at temperature 0.6, behind this line:\n{first.splitlines()[-1]}\n")
        print(write(pair, text, first, 120, temperature=0.6)[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=pathlib.Path, default=HERE / "work" / "full", help="of train.py, for the text")
    parser.add_argument("--plot", metavar="FILE", help="draw the curves, and nothing else")
    args = parser.parse_args()
    try:
        if args.plot:
            plot(args.plot)
        else:
            args.work.mkdir(parents=True, exist_ok=True)
            report(args.work)
    except (OSError, ValueError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
