"""tiny/to_gguf.py as a command: what the files hold, and what it refuses. test_engines.py has llama.cpp read them."""

import shutil
import sys
from pathlib import Path

import pytest

import folders
import pairs
from quantize import save

TARGET = pairs.PAIRS["tiny"][0]
sys.path.insert(0, str(Path(__file__).parent.parent / "tiny"))
import to_gguf  # noqa: E402


def test_to_gguf_as_a_command(tmp_path):
    gguf = pytest.importorskip("gguf")
    to_gguf.main([str(tmp_path / "new"), "--type", "f16"])
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == ["draft.gguf", "target.gguf"]
    tensors = gguf.GGUFReader(tmp_path / "new" / "target.gguf").tensors
    kinds = {tensor.name: tensor.tensor_type.name for tensor in tensors}
    assert len(kinds) == 2 + 12 * 12  # tied: the head is the embedding
    assert kinds["token_embd.weight"] == "F16" and kinds["blk.11.attn_q.bias"] == kinds["output_norm.weight"] == "F32"


def test_to_gguf_pads_and_leaves_nothing_half_written(tmp_path, capsys, monkeypatch):
    gguf = pytest.importorskip("gguf")
    weights = folders.tensors(vocab_size=4100)
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = 1e5
    large, other = folders.write(tmp_path / "large", weights, vocab_size=4100), folders.write(tmp_path / "other")
    shutil.copy(f"{TARGET}/tokenizer.json", large)
    save(other, str(tmp_path / "four"))
    out = tmp_path / "x.gguf"

    def refused(model, *options):
        with pytest.raises(SystemExit) as stopped:
            to_gguf.main(["--model", str(model), "--out", str(out), *options])
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and len(error.splitlines()) == 1 and not list(tmp_path.glob("x.*"))
        return error

    assert "--type f32" in refused(large, "--type", "f16")
    assert f"{other}/tokenizer.json is not the byte-level BPE of Qwen2" in refused(other)
    assert "16 or 32 bits" in refused(tmp_path / "four")
    assert "config.json is missing" in refused(tmp_path / "none")
    with monkeypatch.context() as broken:
        broken.setattr(gguf.GGUFWriter, "write_tensors_to_file", lambda self: (_ for _ in ()).throw(OSError("full")))
        assert "full" in refused(large)
    to_gguf.main(["--model", large, "--out", str(out)])
    fields = gguf.GGUFReader(out).fields
    assert fields["tokenizer.ggml.tokens"].contents()[4094:4097] == ["<|im_start|>", "<|im_end|>", "[PAD4096]"]
    assert fields["tokenizer.ggml.token_type"].contents()[4092:4097] == [1, 3, 3, 3, 5]  # normal, control, unused
    monkeypatch.setitem(sys.modules, "gguf", None)
    out.unlink()
    assert "pip install gguf" in refused(large)
