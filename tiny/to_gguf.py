"""Write the tiny pair as GGUF files, the format of llama.cpp, so that its server can be measured on the same weights.

    python tiny/to_gguf.py DIR                         DIR/target.gguf and DIR/draft.gguf
    python tiny/to_gguf.py --model FOLDER --out FILE   any other Qwen2 checkpoint, from a folder as the Hub has it

It needs the package gguf. On a CPU llama.cpp rounds what it multiplies with f16 weights to f16, too, so only f32
computes as bench.py does, with `--cache-type-k f32 --cache-type-v f32`: keys and values are in f16 by default.
"""

import argparse
import os
import pathlib
import sys

import torch

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the library reads and checks the folder

from model import Checkpoint, Config, read_json  # noqa: E402

# Where Qwen2 cuts a text before it merges: llama.cpp has it built in, under the name "qwen2". (It leaves out NFC, so
# that a text with combining accents may get other ids there. Ids it takes as they are.)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokens(folder, size):
    """The tokens of ids 0 to size - 1 and their types, as GGUF has them, and the merges."""
    from gguf import TokenType  # here, for --help without it

    content = read_json(path := os.path.join(folder, "tokenizer.json"))
    model, cut = content.get("model", {}), str(content.get("pre_tokenizer"))
    if model.get("type") != "BPE" or repr(QWEN2) not in cut or "ByteLevel" not in cut:
        raise ValueError(f"{path} is not the byte-level BPE of Qwen2: llama.cpp would cut texts in other places")
    known = {id: (token, TokenType.NORMAL) for token, id in model["vocab"].items()}
    kinds = TokenType.USER_DEFINED, TokenType.CONTROL
    known |= {token["id"]: (token["content"], kinds[token["special"]]) for token in content.get("added_tokens", [])}
    if max(known) >= size:
        raise ValueError(f"{path} has an id {max(known)}, and config.json a vocab_size of {size}: not of one model")
    listed, types = zip(*(known.get(id, (f"[PAD{id}]", TokenType.UNUSED)) for id in range(size)), strict=True)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return listed, types, merges


def convert(folder, file, kind):
    """Write a model folder to one file, kind "f32" or "f16". Raises ValueError or OSError, and then leaves no file."""
    try:
        import gguf
    except ImportError:
        raise ValueError("writing GGUF needs the package gguf: pip install gguf") from None
    c = Config.read(folder)
    if c.quantization_config or read_json(os.path.join(folder, "config.json"))["model_type"] != "qwen2":
        raise ValueError(f"{folder}: not a Qwen2 model in 16 or 32 bits; take another checkpoint")
    listed, types, merges = tokens(folder, c.vocab_size)
    os.makedirs(os.path.dirname(os.path.abspath(file)), exist_ok=True)
    writer = gguf.GGUFWriter(f"{file}.part", "qwen2")
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")  # which is what byte-level BPE is called there
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(listed)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    if c.eos:
        writer.add_eos_token_id(c.eos[0])  # there is room for one; <|endoftext|> and <|im_end|> it knows by their names
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, c.num_hidden_layers)
    weights = Checkpoint(folder, "cpu", torch.float32)
    for name, shape in sorted(weights.shapes.items()):
        if c.tie_word_embeddings and name == "lm_head.weight":
            continue  # a copy of the embedding that some checkpoints have, and nobody reads
        tensor, there = weights.take(name, *shape), names.get_name(name, try_suffixes=(".weight", ".bias"))
        if there is None:
            raise ValueError(f"{folder}: no tensor of a Qwen2 model is called {name}; take another checkpoint")
        if kind == "f16" and len(shape) == 2:  # norms and biases stay in float32: llama.cpp asks for that
            tensor = tensor.half()
            if not tensor.isfinite().all():
                raise ValueError(f"{folder}: {name} is beyond what f16 can hold: --type f32")
        writer.add_tensor(there, tensor.numpy())
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(f"{file}.part", file)
    finally:
        pathlib.Path(f"{file}.part").unlink(missing_ok=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", nargs="?", type=pathlib.Path, metavar="DIR", help="where the pair goes")
    parser.add_argument("--type", default="f32", choices=["f32", "f16"], help="of the matrices. Default: f32")
    parser.add_argument("--model", metavar="FOLDER")
    parser.add_argument("--out", metavar="FILE")
    args = parser.parse_args(argv)
    if bool(args.dir) + bool(args.model) != 1 or bool(args.model) != bool(args.out):
        parser.error("give DIR, or --model and --out")
    pair = [(HERE / name, args.dir / f"{name}.gguf") for name in ("target", "draft")] if args.dir else []
    try:
        for folder, file in pair or [(args.model, args.out)]:
            convert(str(folder), str(file), args.type)
            print(f"{file}: {os.path.getsize(file) / 1e6:.1f} MB")
    except (OSError, ValueError) as error:
        print(f"to_gguf.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
