"""The same logits and the same greedy text as transformers, on small seeded models; and the README's adapter."""

import re
from pathlib import Path

import pytest
import torch
import transformers

from model import Qwen2
from toys import decode

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def save(folder, kind=transformers.Qwen2ForCausalLM, seed=0, **change):
    """A seeded model of transformers, with biases and norms that are not trivial, and the folder it is saved in."""
    config = kind.config_class(**SMALL | change)
    torch.manual_seed(seed)
    peer = kind(config).eval()
    for name, weight in peer.named_parameters():
        torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 2.4 * config.hidden_size**-0.5)
    peer.save_pretrained(folder)
    return peer, str(folder)


CASES = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "no sharing of heads": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1},
    "theta of Qwen2.5": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "large enough to be packed": {"hidden_size": 1024, "intermediate_size": 1536},
    "vocabulary of an odd size": {"vocab_size": 161},
    "llama": {"kind": transformers.LlamaForCausalLM},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_text(tmp_path, case):
    peer, folder = save(tmp_path / "m", **CASES[case])
    model, ids = Qwen2.load(folder, device="cpu"), torch.arange(3, 43)
    with torch.no_grad():
        expected = peer(ids[None]).logits[0]
        text = peer.generate(ids[None, :9], max_new_tokens=30, do_sample=False, pad_token_id=0)[0, 9:]
    ours = model(ids, model.new_cache(40), 40)
    torch.testing.assert_close(ours, expected, atol=1e-4 * expected.std().item(), rtol=1e-4)
    assert decode(model, None, ids[:9].tolist(), 30, 0)[0] == text.tolist()


def test_bfloat16_is_as_close_to_float32_as_theirs(tmp_path):  # B59: equality is not promised here, only the distance
    peer, folder = save(tmp_path / "m")
    model, ids = Qwen2.load(folder, bits=16, device="cpu"), torch.arange(3, 43)
    with torch.no_grad():
        exact = peer(ids[None]).logits[0]
        error = (peer.to(torch.bfloat16)(ids[None]).logits[0].float() - exact).abs().max()
    ours = model(ids, model.new_cache(40), 40)
    assert (ours - exact).abs().max() < 2 * error
    first, second = exact.topk(2).values.T
    clear = first - second > 2 * error  # no near tie
    assert clear.any() and torch.equal(ours.argmax(-1)[clear], exact.argmax(-1)[clear])


def test_the_adapter_in_the_readme(tmp_path, monkeypatch, capsys):
    peer, target = save(tmp_path / "target")
    _, draft = save(tmp_path / "draft", seed=1, num_hidden_layers=1)
    (code,) = re.findall(r"```python\n(.*?)```", (Path(__file__).parent.parent / "README.md").read_text(), re.DOTALL)
    for name, folder in (("3B", target), ("0.5B", draft)):
        assert f'"Qwen/Qwen2.5-{name}-Instruct"' in code
        code = code.replace(f'"Qwen/Qwen2.5-{name}-Instruct"', repr(folder))

    class Tokenizer:  # the tokenizer is the one thing that these folders lack
        def encode(self, text):
            return list(range(3, 12))  # not 0, which generate() takes for padding

        def decode(self, ids):
            return " ".join(map(str, ids)) + " "

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: Tokenizer())
    exec(compile(code, "README.md", "exec"), {})
    with torch.no_grad():
        text = peer.generate(torch.arange(3, 12)[None], max_new_tokens=64, do_sample=False, pad_token_id=0)[0, 9:]
    assert capsys.readouterr().out.split() == [str(id) for id in text.tolist()]
