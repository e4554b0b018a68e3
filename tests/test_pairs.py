"""Which pair bench.py takes if it is not told. That a download counts is tested in test_hub.py."""

import pytest
from huggingface_hub import constants

import bench
import folders
import pairs
from measure.machine import free_memory


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(pairs, "free_memory", lambda device: 1e11)

    def add(id):
        repository = tmp_path / f"models--{id.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "snapshots").mkdir()
        (repository / "refs" / "main").write_text("0" * 40)
        return folders.write(repository / "snapshots" / ("0" * 40), shards=2)

    return add


def test_the_default_is_tiny_until_the_other_is_on_disk(hub_cache):
    target, draft = pairs.PAIRS["qwen2.5"]
    tiny = pairs.PAIRS["tiny"]
    for missing in (target, draft):
        *pair, why = pairs.choose(None, None, "cpu", None)
        assert tuple(pair) == tiny and f"{missing} is not on this machine" in why
        assert "python bench.py --target qwen2.5" in why
        hub_cache(missing)
    *pair, why = pairs.choose(None, None, "cpu", None)
    assert tuple(pair) == (target, draft) and "python bench.py --target tiny" in why


def test_the_default_must_be_whole_and_fit(hub_cache, monkeypatch):
    folder, _ = (hub_cache(id) for id in pairs.PAIRS["qwen2.5"])
    monkeypatch.setattr(pairs, "free_memory", lambda device: 1000)
    *pair, why = pairs.choose(None, None, "cpu", None)
    assert tuple(pair) == pairs.PAIRS["tiny"] and "in 32 bits" in why and "free" in why
    monkeypatch.setattr(pairs, "free_memory", lambda device: 1e11)
    with open(f"{folder}/model-00002-of-00002.safetensors", "ab") as f:
        f.truncate(1000)
    *pair, why = pairs.choose(None, None, "cpu", None)
    assert tuple(pair) == pairs.PAIRS["tiny"] and "not all of it" in why


def test_what_is_named_is_taken():
    assert pairs.choose("coder", None, "cpu", None) == (*pairs.PAIRS["coder"], None)
    assert pairs.choose("coder", "x", "cpu", None) == (pairs.PAIRS["coder"][0], "x", None)
    assert pairs.choose("a", "b", "cpu", None) == ("a", "b", None)


@pytest.mark.parametrize("arguments, word", [
    (["--target", "x/y"], "--draft"),
    (["--draft", "x/y"], "--target"),
    (["--target", "tiny", "--domain", "edit"], "--domain edit"),
])  # fmt: skip
def test_half_a_pair_is_one_line(arguments, word, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main([*arguments, "--device", "cpu"])
    lines = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and len(lines) == 1 and word in lines[0]


def test_free_memory():
    assert 1e6 < free_memory("cpu") < 1e14
