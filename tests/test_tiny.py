"""The pair that comes with the repository, and the scripts that made it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

import bench
import pairs
from model import Config, Qwen2
from text import Text, check_same_ids
from toys import oracle

ROOT = Path(__file__).parent.parent
FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
TARGET, DRAFT = pairs.PAIRS["tiny"]
sys.path.insert(0, str(ROOT / "tiny"))
import report  # noqa: E402
import train  # noqa: E402


def greedy_by_transformers(folder, ids, count):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = {"attention_mask": torch.ones(1, len(ids)), "max_new_tokens": count, "do_sample": False}
    return model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()


def greedy_by_model_py(model, ids, count):
    """Without a cache, and up to the end of text."""
    written, (end,) = oracle(model, ids, count), model.config.eos
    return written[: written.index(end) + 1] if end in written else written


def test_the_folders_are_plain_checkpoints():
    assert sum(file.stat().st_size for folder in (TARGET, DRAFT) for file in Path(folder).iterdir()) < 40e6
    for folder in (TARGET, DRAFT):
        assert sorted(file.name for file in Path(folder).iterdir()) == FILES
        with safe_open(Path(folder) / "model.safetensors", "pt") as f:
            assert {f.get_tensor(name).dtype for name in f.keys()} == {torch.bfloat16}  # noqa: SIM118
    check_same_ids(*(Text(folder, []) for folder in (TARGET, DRAFT)))
    assert Config.read(TARGET).num_hidden_layers > 4 * Config.read(DRAFT).num_hidden_layers


@pytest.mark.parametrize("folder", [TARGET, DRAFT])
def test_transformers_writes_the_same_greedy_text(folder):
    model, text = Qwen2.load(folder, bits=32, device="cpu"), Text(folder, Config.read(folder).eos)
    for domain in pairs.prompts(text.is_chat, "all").values():
        ids = text.prompt(domain[0])
        assert greedy_by_transformers(folder, ids, 32) == greedy_by_model_py(model, ids, 32)


def test_transformers_reads_the_same_ids():
    from transformers import AutoTokenizer

    other, text = AutoTokenizer.from_pretrained(TARGET), Text(TARGET, Config.read(TARGET).eos)
    sample = "def f(x):\n    return x ** 2  # naïve\n\n\nKING JOHN\nNow, say, Chatillon,\n\t1984 £"
    for prompt in [sample, *(some[0] for some in pairs.prompts(text.is_chat, "all").values())]:
        assert other.encode(prompt) == text.prompt(prompt)
        assert other.decode(text.prompt(prompt)) == prompt == text.decode(text.prompt(prompt))
    assert other.eos_token_id in Config.read(TARGET).eos
    assert not text.is_chat and text.im_end is not None


def test_without_arguments_bench_takes_this_pair(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pairs, "free_memory", lambda device: 0.0)
    file = tmp_path / "out.json"
    bench.main(["--device", "cpu", "--max-new-tokens", "16", "--repeat", "1", "--json", str(file)])
    shown, result = capsys.readouterr().out, json.loads(file.read_text())
    assert "'tiny', because" in shown and "--target qwen2.5" in shown
    assert (result["pair"]["target"], result["pair"]["draft"]) == (TARGET, DRAFT)
    assert {row["domain"] for row in result["rows"]} == {"code", "factual", "creative"}
    assert all(row["accepted"] > 0 for row in result["rows"] if row["mode"] == "speculative")


def test_smoke(tmp_path):
    """Fetching aside, everything that train.py does: the losses fall, the draft learns, and the folders load."""
    command = [sys.executable, str(ROOT / "tiny" / "train.py"), "--smoke", "--work", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    curves = json.loads((tmp_path / "curves.json").read_text())
    for domain in ("code", "factual"):
        assert curves["target"][-1][domain] < curves["target"][0][domain] - 1  # nats
        assert curves["draft"][-1][domain] > curves["draft"][0][domain] + 0.02  # of drafts kept
    again = subprocess.run(command, capture_output=True, text=True, timeout=600)  # goes on where there is nothing left
    assert again.returncode == 0 and json.loads((tmp_path / "curves.json").read_text()) == curves
    for name in ("target", "draft"):
        folder = str(tmp_path / name)
        model, text = Qwen2.load(folder, bits=32, device="cpu"), Text(folder, Config.read(folder).eos)
        ids = text.prompt("import os\n\ndef main(")
        assert greedy_by_transformers(folder, ids, 16) == greedy_by_model_py(model, ids, 16)


@pytest.fixture
def small(monkeypatch):
    small = train.CONFIG | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 32}
    small |= {"num_attention_heads": 1, "num_key_value_heads": 1, "eos_token_id": 0}
    monkeypatch.setattr(train, "CONFIG", small)
    ids = torch.randint(32, (1000,), generator=torch.Generator().manual_seed(0))
    return {"code": ids}, {"target": 220, "length": 16}


def test_an_interruption_changes_nothing(small, tmp_path, monkeypatch):
    data, plan = small
    amp = torch.autocast("cpu", enabled=False)
    whole, curve = train.train_target(data, data, plan, tmp_path, amp)
    (tmp_path / "target.pt").unlink()
    windows = train.corpus.windows

    def interrupted(data, step, rows, length):
        if step == 150:
            raise KeyboardInterrupt
        return windows(data, step, rows, length)

    monkeypatch.setattr(train.corpus, "windows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train.train_target(data, data, plan, tmp_path, amp)
    monkeypatch.setattr(train.corpus, "windows", windows)
    resumed, again = train.train_target(data, data, plan, tmp_path, amp)
    assert again == curve and len(curve) == 4
    for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_the_trained_model_is_the_one_that_model_py_runs(tmp_path):
    """Same logits, and sampling with a cache at temperature 0 is greedy decoding without one."""
    config = train.CONFIG | {"num_hidden_layers": 2}
    model = train.Qwen2(config)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, generator=generator)
    model.bfloat16().float()  # what the file can hold
    train.write(model, Tokenizer.from_file(TARGET + "/tokenizer.json"), tmp_path / "m")
    loaded = Qwen2.load(str(tmp_path / "m"), bits=32, device="cpu")
    ids = torch.randint(4096, (3, 40), generator=generator)
    with torch.no_grad():
        ours = torch.stack([loaded(row, loaded.new_cache(40), 40) for row in ids])
        torch.testing.assert_close(model(ids), ours, atol=2e-4, rtol=1e-4)
    amp = torch.autocast("cpu", enabled=False)
    written = train.sample(model, ids[:2, :8], 20, torch.tensor([[0.0], [1.0]]), generator, amp)
    assert written[0, 8:].tolist() == oracle(loaded, ids[0, :8].tolist(), 12) != written[1, 8:].tolist()


def test_samples_have_the_targets_distribution(small):
    """At a temperature, over many rows with one beginning: total variation from softmax(logits / t)."""
    data, _ = small
    model, rows, t = train.Qwen2(train.CONFIG), 20_000, 2.0
    torch.nn.init.normal_(model.embed_tokens.weight, std=0.1, generator=torch.Generator().manual_seed(1))
    beginning = data["code"][:5].expand(rows, 5)
    generator, amp = torch.Generator().manual_seed(2), torch.autocast("cpu", enabled=False)
    drawn = train.sample(model, beginning, 6, torch.full((rows, 1), t), generator, amp)[:, 5]
    with torch.no_grad():
        p = (model(beginning[:1])[0, -1] / t).softmax(-1)
    assert 0.2 < p.max() < 0.6 and (p - 1 / 32).abs().sum() / 2 > 0.2  # neither one certain token nor all alike
    assert (drawn.bincount(minlength=32) / rows - p).abs().sum() / 2 < 0.03


def test_whole_files_are_held_out(tmp_path):
    text = train.corpus.read(tmp_path, smoke=True)
    for parts in text.values():
        names = {part: {name for name, _ in files} for part, files in parts.items()}
        assert names["train"] and names["held"] and not names["train"] & names["held"]
    assert train.corpus.read(tmp_path) == text  # kept, so that going on sees the same
    for domain, beginnings in train.corpus.prompts(text).items():
        assert len(beginnings) == 5
        assert all(any(beginning in content for _, content in text[domain]["held"]) for beginning in beginnings)


def test_another_plan_is_refused(tmp_path):
    (tmp_path / "plan.json").write_text("[]")
    command = [sys.executable, str(ROOT / "tiny" / "train.py"), "--smoke", "--work", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and str(tmp_path) in done.stderr


@pytest.mark.parametrize("body, ended, answer", [
    ("        return 1\n\n    def g", False, True),
    ("        return (1\n\n    def g", False, False),
    ("        return 1\n", True, True),
    ("        return 1\n        x = 2", False, None),
])  # fmt: skip
def test_whether_a_function_parses(body, ended, answer):
    assert report.parses("    def f(self):\n", body, ended) is answer


def test_a_plot_without_matplotlib_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    monkeypatch.setattr(sys, "argv", ["report.py", "--plot", "x.svg"])
    with pytest.raises(SystemExit) as stopped:
        report.main()
    lines = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and len(lines) == 1 and "pip install matplotlib" in lines[0]
