"""Is this machine ready for the workshop? One line a thing: ok, or what is wrong and what to do. Downloads nothing.

    python labs/check_setup.py

Without the lines marked with a * nothing runs, and then the exit code is 1. All others are for single labs, or for
more speed: labs/setup.md says for which. It needs no package to say which ones are missing.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the library

Line = namedtuple("Line", "must what status said")  # must: True if nothing runs without it
PYTHON = (3, 11)  # numpy asks for it
CAPABILITY = (8, 0)  # of the GPU, which torch's kernel for 4 bits needs: Ampere, RTX 30 and newer
DISK = 12e9  # bytes that all downloads and the 4-bit folders take together
BUILD = ROOT / "build"  # where labs/setup.md puts what is made or fetched for the labs
FOUR_BITS = {"Qwen/Qwen2.5-3B-Instruct": "qwen2.5-3b-4bit", "Qwen/Qwen2.5-0.5B-Instruct": "qwen2.5-0.5b-4bit"}
GGUF = {
    "qwen2.5-3b-instruct-q4_k_m.gguf": "Qwen/Qwen2.5-3B-Instruct-GGUF",
    "qwen2.5-0.5b-instruct-q4_k_m.gguf": "Qwen/Qwen2.5-0.5B-Instruct-GGUF",
}
TOOLS = ("llama-server", "llama-speculative", "llama-speculative-simple", "llama-lookup")


def numbers(version):
    """(2, 13, 0) of "2.13.0+cpu"."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"\+|a|b|rc|\.dev", version)[0]))


def outside(version, ranges):
    """ "too old", "too new", or None. ranges: as in ">=2.4,<3" or "==2.13.0"."""
    for sign, limit in re.findall(r"(==|>=|<)([\d.]+)", ranges):
        length = max(len(numbers(version)), len(numbers(limit)))
        here, there = (numbers(text) + (0,) * (length - len(numbers(text))) for text in (version, limit))
        if sign in ("==", ">=") and here < there:
            return "too old"
        if (sign == "==" and here > there) or (sign == "<" and here >= there):
            return "too new"
    return None


def short(path):
    """A path, or a message with paths in it, as it is seen from the repository or the home directory."""
    return str(path).replace(f"{ROOT}{os.sep}", "").replace(str(Path.home()), "~")


def python():
    found = platform.python_version()
    if sys.version_info[:2] >= PYTHON:
        return [Line(True, "Python", "ok", found)]
    said = f"{found}: install {'.'.join(map(str, PYTHON))} or newer, and make the virtual environment anew with it"
    return [Line(True, "Python", "too old", said)]


def packages(file, must):
    """A line for each package of a requirements file, without those that it includes."""
    lines = []
    for requirement in (ROOT / file).read_text(encoding="utf-8").splitlines():
        if not requirement or requirement[0] in "#-":
            continue
        name, ranges = re.fullmatch(r"([\w-]+)([^;]*).*", requirement).groups()
        fix = f"pip install -r {file}" + " (without a GPU: labs/setup.md, step 2)" * (name == "torch")
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            lines.append(Line(must, name, "missing", fix))
            continue
        wrong = outside(version, ranges)
        said = f"{version}, needs {ranges}: {fix}" if wrong else version
        lines.append(Line(must and wrong != "too new", name, wrong or "ok", said))  # a newer one may do
    return lines


def gpu():
    """What torch finds, and whether it can do 4 bits."""
    import torch

    if torch.cuda.is_available():
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        said = f"{name}, compute capability {'.'.join(map(str, capability))}"
        if capability < CAPABILITY:
            need = ".".join(map(str, CAPABILITY))
            return [Line(False, "GPU", "too old", f"{said}: 4 bits need {need}. Give --device cpu, or --bits 16")]
        return [Line(False, "GPU", "ok", said)]
    if shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi"], capture_output=True).returncode == 0:
        if torch.version.cuda is None:
            said = f"there is one, but torch {torch.__version__} was built without CUDA: labs/setup.md, step 2"
        else:
            said = f"there is one, but its driver is too old for CUDA {torch.version.cuda}: update it, or labs/setup.md"
        return [Line(False, "GPU", "missing", said)]
    if torch.backends.mps.is_available():
        return [Line(False, "GPU", "ok", "Apple's: --device mps, 16 or 32 bits, never tried here")]
    return [Line(False, "GPU", "missing", "no NVIDIA GPU: take the CPU-only track of labs/setup.md")]


def memory():
    """Free memory, and what of the workshop fits."""
    import torch

    from measure.machine import free_memory
    from measure.memory import plan
    from model import Config

    lines = []
    configs = [Config.read(str(ROOT / "tests" / "configs" / name.split("/")[1])) for name in FOUR_BITS]
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        what, free = {"cpu": "free memory", "cuda": "free GPU memory"}[device], free_memory(device)
        need = sum(plan(configs, 4, device, 4096, 4).values())
        if free is None:
            lines.append(Line(False, what, "unknown", f"qwen2.5 in 4 bits needs {need / 1e9:.1f} GB"))
            continue
        said = f"{free / 1e9:.1f} GB; qwen2.5 in 4 bits needs {need / 1e9:.1f}"
        fix = ": close other programs, or take --target tiny"
        lines.append(Line(False, what, *(("ok", said) if free >= need else ("too small", said + fix))))
    return lines


def disk():
    """Free disk where the Hub client puts models."""
    from huggingface_hub import constants

    place = Path(constants.HF_HUB_CACHE)
    there = next(folder for folder in [place, *place.parents] if folder.exists())
    free = shutil.disk_usage(there).free
    said = f"{free / 1e9:.0f} GB for {short(place)}"
    if free >= DISK:
        return [Line(False, "free disk", "ok", said)]
    return [Line(False, "free disk", "too small", f"{said}; all of it takes {DISK / 1e9:.0f}: set HF_HOME elsewhere")]


def whole(path):
    """The folder of a model of which all files are here. Raises OSError or ValueError."""
    from model import Checkpoint, find

    folder = find(path, download=False)
    Checkpoint(folder, None, None)  # reads the header of each file and compares its length
    return folder


def models():
    """The models, as the Hub has them, in 4 bits, and as GGUF files."""
    lines = []
    for name, folder in FOUR_BITS.items():
        fixes = {name: f"hf download {name}", str(BUILD / folder): f"python quantize.py {name} --out build/{folder}"}
        for path, fix in fixes.items():
            what = name.split("/")[1] + (" 4-bit" if path != name else "")
            try:
                lines.append(Line(False, what, "ok", short(whole(path))))
            except FileNotFoundError:
                lines.append(Line(False, what, "missing", fix))
            except (OSError, ValueError) as error:
                status = "missing" if "not whole" in str(error) else "damaged"
                lines.append(Line(False, what, status, fix if status == "missing" else f"{short(error)}; {fix}"))
    for file, repository in GGUF.items():
        there, fix = BUILD / "gguf" / file, f"hf download {repository} {file} --local-dir build/gguf"
        if not there.exists():
            lines.append(Line(False, file, "missing", fix))
            continue
        with open(there, "rb") as f:
            lines.append(Line(False, file, *(("ok", short(there)) if f.read(4) == b"GGUF" else ("damaged", fix))))
    return lines


def tools():
    """llama.cpp's programs on the PATH."""
    found = [(tool, shutil.which(tool)) for tool in TOOLS]
    return [Line(False, t, *(("ok", "on the PATH") if at else ("missing", "labs/setup.md, step 4"))) for t, at in found]


def generation():
    """Decode with the pair in tiny/, plainly and speculatively, and compare."""
    import torch

    from model import Config, Qwen2
    from pairs import PAIRS, prompts
    from speculative import DraftModel, speculative_decode
    from text import Text

    lines, folders = [], PAIRS["tiny"]
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        what, must = f"a generation ({device})", device == "cpu"
        try:
            pair = [Qwen2.load(folder, 32, device) for folder in folders]
            text = Text(folders[0], Config.read(folders[0]).eos)
            ids, texts, kept, drafted = text.prompt(prompts(text.is_chat, "code")["code"][0]), [], 0, 0
            for gamma in (0, 4):
                drafter = DraftModel(pair[1], len(ids) + 24)
                rounds = list(speculative_decode(pair[0], drafter, ids, 24, gamma))
                texts.append([id for round in rounds for id in round.tokens])
                kept, drafted = kept + sum(r.accepted for r in rounds), drafted + sum(r.drafted for r in rounds)
        except (OSError, ValueError, RuntimeError, FloatingPointError) as error:
            lines.append(Line(must, what, "broken", " ".join(str(error).split())[:300]))
            continue
        same = texts[0] == texts[1]
        said = f"{len(texts[0])} tokens, {'the same' if same else 'NOT the same'} plainly and speculatively; "
        said += f"{kept} of {drafted} drafts kept"
        lines.append(Line(must, what, "ok" if same else "broken", said))
    return lines


def show(lines):
    for must, what, status, said in lines:
        print(f"{status:<10}{'*' if must else ' '} {what:<34}{said}", flush=True)
    return lines


def main():
    lines = show(python() + packages("requirements.txt", True))
    if any(line.must and line.status != "ok" for line in lines):
        print(f"\nThe rest can be tested when these lines are ok. This is {sys.executable}: that of the environment?")
        return 1
    lines += show(packages("labs/requirements-labs.txt", False))
    for part in (gpu, memory, disk, models, tools, generation):
        lines += show(part())
    bad = [line for line in lines if line.status != "ok"]
    if any(line.must for line in bad):
        print("\nNot ready: repair the lines with a *.")
        return 1
    print(f"\nReady. {len(bad)} of {len(lines)} lines are not ok; labs/setup.md says what each is for." if bad else
          "\nReady for everything.")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
