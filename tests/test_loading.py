"""Loading: what a folder may look like, and one clear line for each way in which it may be damaged."""

import json
import socket

import pytest
import torch
from safetensors import safe_open

import folders
import model
from bench import main
from model import Config, Qwen2

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 988097824\n"


def logits(folder, ids=(1, 2, 3, 4, 5), **options):
    loaded = Qwen2.load(folder, device="cpu", **options)
    return loaded(torch.tensor(ids), loaded.new_cache(len(ids)), len(ids))


def test_one_file_and_two_shards_are_the_same_model(tmp_path):
    one, two = folders.write(tmp_path / "one"), folders.write(tmp_path / "two", shards=2)
    assert torch.equal(logits(one), logits(two))
    assert logits(one).isfinite().all()


@pytest.mark.parametrize("options, dtype, tolerance", [
    ({"bits": 16}, torch.bfloat16, 0.2),
    ({"dtype": torch.float16}, torch.float16, 0.05),
    ({}, torch.float32, 0.001),  # B70: the default on a CPU
])  # fmt: skip
def test_precisions(tmp_path, options, dtype, tolerance):
    folder = folders.write(tmp_path / "m")
    loaded = Qwen2.load(folder, device="cpu", **options)
    assert loaded.dtype == dtype
    rows = loaded(torch.arange(5), loaded.new_cache(5), 5)
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows, logits(folder, range(5)), atol=tolerance * rows.std().item(), rtol=0.1)


def test_no_network_for_a_folder(tmp_path, monkeypatch):  # B54
    folder = folders.write(tmp_path / "m")
    monkeypatch.setattr(socket, "socket", lambda *_: pytest.fail("opened a socket"))
    logits(folder)


def test_one_file_is_open_at_a_time(tmp_path, monkeypatch):  # B55
    folder, count = folders.write(tmp_path / "m", shards=2), {"open": 0, "most": 0}

    class Counted:
        def __init__(self, *arguments):
            self.file = safe_open(*arguments)

        def __enter__(self):
            count["open"] += 1
            count["most"] = max(count["most"], count["open"])
            return self.file.__enter__()

        def __exit__(self, *error):
            count["open"] -= 1
            return self.file.__exit__(*error)

    monkeypatch.setattr(model, "safe_open", Counted)
    logits(folder)
    assert count == {"open": 0, "most": 1}


def test_a_file_that_cannot_be_mapped(tmp_path, monkeypatch):  # B55
    def fail(*_):
        raise OSError("os error 1455")

    folder = folders.write(tmp_path / "m")
    monkeypatch.setattr(model, "safe_open", fail)
    with pytest.raises(OSError, match=r"model.safetensors.*GB.*1455"):
        logits(folder)


def test_biases_count(tmp_path):  # B53
    weights = folders.tensors()
    full = logits(folders.write(tmp_path / "full", weights))
    silent = {name: torch.zeros_like(w) if name.endswith("bias") else w for name, w in weights.items()}
    assert (full.argmax(-1) != logits(folders.write(tmp_path / "silent", silent)).argmax(-1)).any()


def test_no_weight_is_lost(tmp_path):  # B49, B53: every tensor of the file changes the logits
    weights = folders.tensors()
    before = logits(folders.write(tmp_path / "m", weights))
    for name in weights:
        changed = weights | {name: weights[name] * 1.5}
        assert not torch.equal(logits(folders.write(tmp_path / "m", changed)), before), name


def test_tied_and_untied_heads(tmp_path):  # B52
    weights = folders.tensors()
    embedding = weights["model.embed_tokens.weight"]
    tied = Qwen2.load(folders.write(tmp_path / "a", weights), device="cpu")
    assert tied.head is tied.embed
    equal = Qwen2.load(folders.write(tmp_path / "b", weights | {"lm_head.weight": embedding.clone()}), device="cpu")
    assert equal.head is equal.embed
    other = weights | {"lm_head.weight": embedding * 2}
    untied = folders.write(tmp_path / "c", other, tie_word_embeddings=False)
    torch.testing.assert_close(logits(untied), 2 * logits(str(tmp_path / "a")))
    with pytest.warns(UserWarning, match="ignored"):
        assert torch.equal(logits(folders.write(tmp_path / "d", other)), logits(str(tmp_path / "a")))
    with pytest.raises(ValueError, match=r"lm_head.weight is missing.*tie_word_embeddings"):
        logits(folders.write(tmp_path / "e", weights, tie_word_embeddings=False))


def test_llama_without_biases(tmp_path):
    weights = {name: w for name, w in folders.tensors().items() if not name.endswith("bias")}
    assert logits(folders.write(tmp_path / "m", weights, model_type="llama")).isfinite().all()


@pytest.mark.parametrize(
    "generation, config, eos",
    [
        ({"eos_token_id": [5, 6]}, 7, [5, 6]),
        ({"eos_token_id": 5}, 7, [5]),
        ({}, 7, [7]),
        (None, 7, [7]),
        (None, None, []),
    ],
)
def test_which_ids_end_a_text(tmp_path, generation, config, eos):  # B37
    folders.write(tmp_path / "m", eos_token_id=config)
    path = tmp_path / "m" / "generation_config.json"
    path.unlink() if generation is None else path.write_text(json.dumps(generation))
    assert Config.read(str(tmp_path / "m")).eos == eos


@pytest.mark.parametrize(
    "change, named",
    [
        ({"use_sliding_window": True}, "use_sliding_window"),  # B17
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "llama3"),
        ({"model_type": "mistral"}, "mistral"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"rope_scaling": "yarn"}, "yarn"),
    ],
)
def test_what_cannot_run_is_refused_by_name(tmp_path, change, named):
    with pytest.raises(ValueError, match=named):
        Config.read(folders.write(tmp_path / "m", folders.tensors(), **change))


# One line, exit code 2. Each entry damages a good folder of two shards.
FIRST, SECOND = (f"model-{i:05}-of-00002.safetensors" for i in (1, 2))
DAMAGE = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "no weights": (lambda f: [p.unlink() for p in f.glob("model*")], "model.safetensors.index.json is missing"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "html for a tokenizer": (lambda f: (f / "tokenizer.json").write_text("<!DOCTYPE html>"), "tokenizer.json"),
    "html for an index": (lambda f: (f / "model.safetensors.index.json").write_text("<!DOCTYPE html>"), "is not JSON"),
    "missing shard": (lambda f: (f / SECOND).unlink(), f"{SECOND} is missing"),
    "lfs pointer": (lambda f: (f / SECOND).write_bytes(LFS), "git lfs pull"),
    "empty shard": (lambda f: (f / SECOND).write_bytes(b""), "has 0 bytes"),
    "html for a shard": (lambda f: (f / SECOND).write_bytes(b"<!DOCTYPE html>" * 99), "is no safetensors file"),
    "cut header": (lambda f: (f / SECOND).write_bytes((f / SECOND).read_bytes()[:99]), "has 99 bytes"),
}


def cut(f):
    data = (f / SECOND).read_bytes()
    (f / SECOND).write_bytes(data[:-1])
    return f"has {len(data) - 1} bytes and should have {len(data)}"


def rewrite(change):
    """Damage that needs other weights: write the folder again, with the tensors changed."""
    return lambda f: folders.write(f, change(folders.tensors()), shards=2)


def shard(header):
    """A safetensors file with this header, and no data."""
    return lambda f: (f / SECOND).write_bytes(len(header).to_bytes(8, "little") + header)


DAMAGE |= {
    "a list for a config": (lambda f: (f / "config.json").write_text("[]"), "config.json holds a list"),
    "a list for an index": (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "holds a list"),
    "no weight_map": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
    "a list for a header": (shard(b"[]"), "is no safetensors file"),
    "a header without offsets": (shard(b'{"a": {"dtype": "F32", "shape": [1]}}'), "is no safetensors file"),
    "truncated shard": (cut, "bytes and should have"),
    "wrong shape": (rewrite(lambda w: w | {"model.norm.weight": torch.ones(63)}), "model.norm.weight has shape [63]"),
    "leftover tensor": (rewrite(lambda w: w | {"model.extra": torch.ones(3)}), "model.extra has no place"),
    "missing tensor": (
        rewrite(lambda w: {name: t for name, t in w.items() if name != "model.norm.weight"}),
        "model.norm.weight is missing",
    ),
    "nan weight": (rewrite(lambda w: w | {"model.norm.weight": torch.full((64,), float("nan"))}), "contains NaN"),
    "integers": (rewrite(lambda w: w | {"model.norm.weight": torch.ones(64, dtype=torch.int32)}), "torch.int32"),
    "nan logits": (rewrite(lambda w: w | {"model.norm.weight": torch.full((64,), 3e38)}), "logits contain NaN"),
}


def refusal(capsys, *arguments):
    """The one line that bench.py says, having exited with 2."""
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    err = capsys.readouterr().err.strip().split("\r")[-1]
    assert stopped.value.code == 2 and err.startswith("bench.py: ") and "\n" not in err, err
    return err


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_is_one_line(tmp_path, capsys, name):  # B49, B51
    good, bad = folders.write(tmp_path / "good"), folders.write(tmp_path / "bad", shards=2)
    damage, message = DAMAGE[name]
    more = damage(tmp_path / "bad")
    arguments = ["--device", "cpu", "--target", bad, "--draft", good, "--domain", "code", "--max-new-tokens", 16]
    said = refusal(capsys, *arguments)
    assert message in said and (name != "truncated shard" or more in said)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--target", "/no/such/folder", "--draft", "GOOD"], "/no/such/folder: no such folder"),
        (["--target", "GOOD"], "--draft"),
        (["--target", "GOOD", "--draft", "OTHER"], "id 3 is"),  # B39
        (["--gamma", "-1"], "'-1' is neither 1 to 64"),
        (["--top-p", "0"], "--top-p: 0 is out of range"),
        (["--temperature", "warm"], "--temperature: invalid float"),
        (["--domain", "sports"], "--domain: invalid choice: 'sports'"),
        (["--target", "GOOD", "--draft", "GOOD", "--device", "mps"], "--device mps"),
        (["--bits", "3"], "--bits: invalid choice: 3"),
        (["watch", "", "--target", "GOOD", "--draft", "GOOD"], "the prompt is empty"),
        (["watch", "--target", "GOOD", "--draft", "GOOD"], "watch takes one prompt"),
        (["showdown", "Hello", "--target", "GOOD", "--draft", "GOOD"], "watch takes one prompt"),
        (["watch", "a\udc80", "--target", "GOOD", "--draft", "GOOD"], "surrogate"),
        (["watch", "x" * 159, "--target", "GOOD", "--draft", "GOOD"], "the context only 256"),  # B76
        (["--target", "GOOD", "--draft", "GOOD", "--max-new-tokens", "5"], "--max-new-tokens must be"),
        (["--seed", "99999999999999999999"], "--seed: 99999999999999999999 is out of range"),
        (["--target", "GOOD/model.safetensors", "--draft", "GOOD"], "no such folder"),
        (["watch", "x" * 300, "--target", "GOOD", "--draft", "GOOD"], "and the context only 256"),  # B76
        (["--target", "GOOD", "--draft", "GOOD", "--json", "/no/such/folder/x.json"], "--json /no/such/folder/x.json"),
        (["--target", "GOOD", "--draft", "GOOD", "--json", "GOOD"], "not a file that can be written"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    good, other = folders.write(tmp_path / "good"), folders.write(tmp_path / "other")
    folders.tokenizer(exchange=(3, 4)).save(str(tmp_path / "other" / "tokenizer.json"))
    assert message in refusal(capsys, *[word.replace("GOOD", good).replace("OTHER", other) for word in arguments])
