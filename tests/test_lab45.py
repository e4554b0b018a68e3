"""Lab 4 on the real transformers: its checker passes what is right, and names what is wrong. Lab 5 on a real llama.cpp
server with a draft model."""

import linecache
import re
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest

import pairs

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "labs"), str(ROOT / "tiny")]
import check4  # noqa: E402
import serve  # noqa: E402
import to_gguf  # noqa: E402

BLANK = re.compile(r"( *)# >>> your code, blank (\d).*?# <<<", re.DOTALL)
RIGHT = {
    1: "model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()",
    2: "model.generation_config = transformers.GenerationConfig(eos_token_id=model.config.eos_token_id)",
    3: "self.tokens.append(ids.flatten().tolist()); self.times.append(time.perf_counter())",
    4: "how |= {'assistant_model': draft} if draft else {'prompt_lookup_num_tokens': lookup} if lookup else {}",
    5: "target.generate(prompt, do_sample=False, streamer=streamer, **how)",
    6: "tokens = sum(map(len, streamer.tokens[2:])); seconds = streamer.times[-1] - streamer.times[1]",
    7: "drafted = sum(n - 1 for n in rows[1:]); accepted = tokens - len(rows[1:])",
}


def lab4(**changes):
    """The module labs/lab4.py with its blanks filled; changes: of blanks, by number, as _3="pass". None: left empty."""
    code, module = RIGHT | {int(number[1:]): line for number, line in changes.items()}, types.ModuleType("lab4")
    source = (ROOT / "labs" / "lab4.py").read_text(encoding="utf-8")
    assert [int(number) for _, number in BLANK.findall(source)] == [*RIGHT]
    source = BLANK.sub(lambda m: f"{m[1]}# >>> your code, blank {m[2]}\n{m[1]}{code[int(m[2])]}\n{m[1]}# <<<"
                       if code[int(m[2])] else m[0], source)  # fmt: skip
    linecache.cache["lab4.py"] = len(source), None, source.splitlines(keepends=True), "lab4.py"
    exec(compile(source, "lab4.py", "exec"), vars(module))
    return module


def test_the_right_answers_pass(capsys, tmp_path):
    assert check4.findings(lab4()) is None
    assert check4.main(lab4(), ["--target", "tiny", "--max-new-tokens", "12"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "All seven blanks are right."
    assert [line.split()[0] for line in lines[3:]] == [d for d in ("code", "factual", "creative") for _ in range(3)]
    assert all("%" in line for line in lines if "draft model" in line)
    assert check4.main(lab4(), ["--target", "tiny", "--draft", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lab4.py: ") and len(error.splitlines()) == 1


def test_the_skeleton_gets_a_hint():
    done = subprocess.run([sys.executable, "labs/lab4.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.startswith("blank 1 is empty. ") and not done.stderr
    for number in RIGHT:
        assert check4.findings(lab4(**{f"_{number}": None})).startswith(f"blank {number} is empty. ")


PENALTY = "target.generate(prompt, do_sample=False, repetition_penalty=1.0, streamer=streamer, **how)"


@pytest.mark.parametrize("says, changes", [
    ("blank 1: .*float32", {"_1": RIGHT[1].replace("float32", "bfloat16")}),
    ("blank 1: ", {"_1": "model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)"}),
    ("blank 2: without drafts, .*do_sample=False leaves the repetition_penalty of 3.0 on", {"_2": "pass"}),
    ("blank 2: with the draft model, .*heuristic.* carries", {"_2": "pass", "_5": PENALTY}),
    ("blank 2: .*no text would ever end", {"_2": "model.generation_config = transformers.GenerationConfig()"}),
    ("blank 2: model.generation_config must be a GenerationConfig", {"_2": "model.generation_config = {}"}),
    ("blank 3: .*self.tokens is", {"_3": RIGHT[3].replace(".tolist()", ".tolist()[:1]")}),
    ("blank 3: .*self.tokens is", {"_3": RIGHT[3].replace("ids.flatten().tolist()", "ids"), "_5": None}),
    ("blank 3: .*self.tokens is", {"_3": RIGHT[3].replace("append(ids", "extend(ids"), "_4": None}),
    ("blank 3: .*self.times is", {"_3": RIGHT[3].replace("perf_counter()", "perf_counter")}),
    ("blank 4: with lookup, lookup is 7, and prompt_lookup_num_tokens 10", {"_4": RIGHT[4].replace("lookup}", "10}")}),
    ("blank 4: .*not given assistant_model", {"_4": RIGHT[4].replace("assistant_model", "draft_model")}),
    ("blank 4: with the draft model, .*not given assistant_model", {"_4": "pass"}),
    ("blank 4: with lookup, .*not given prompt_lookup", {"_4": "if draft: how['assistant_model'] = draft"}),
    ("blank 5: .*not called", {"_5": "target.generate(prompt, do_sample=False, **how)"}),
    ("blank 5: .*drawn by lot", {"_2": "model.generation_config.repetition_penalty = 1.0",
                                 "_5": "target.generate(prompt, streamer=streamer, **how)"}),
    ("blank 5: .*from token 0 on", {"_5": RIGHT[5].replace("(prompt", "(prompt[:, :-1]")}),
    ("blank 6: .*includes reading the prompt", {"_6": RIGHT[6].replace("times[1]", "times[0]")}),
    ("blank 6: .*seconds is -?\\d+ on the checker's clock", {"_6": RIGHT[6].replace("times[-1]", "times[-2]")}),
    ("blank 6: .*Those before are not timed", {"_6": RIGHT[6].replace("tokens[2:]", "tokens[1:]")}),
    ("blank 7: .*counts rows", {"_7": RIGHT[7].replace("n - 1", "n")}),
    ("blank 7: with the draft model, .*includes the first round", {"_7": RIGHT[7].replace("rows[1:])", "rows)", 1)}),
    ("blank 7: .*counts every token", {"_7": RIGHT[7].replace("tokens - len(rows[1:])", "tokens")}),
    (r"blank 6, labs/lab4.py, line \d+: ZeroDivisionError: ", {"_6": "tokens, seconds = 1, 1 / 0"}),
    (r"blank 5, labs/lab4.py, line \d+: ValueError: .*max", {"_5": "target.generate(streamer=streamer, **how, max=1)"}),
    ("blank 7: .*accepted is ", {"_7": RIGHT[7].replace("tokens - len(rows[1:])", "tokens - len(rows)")}),
])  # fmt: skip
def test_wrong_answers_get_their_diagnosis(says, changes):
    found = check4.findings(lab4(**changes))
    assert found and re.match(says, found) and "\n" not in found


# Lab 5


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    pytest.importorskip("gguf")
    pytest.importorskip("xllamacpp")
    folder = tmp_path_factory.mktemp("gguf")
    files = [str(folder / f"{name}.gguf") for name in ("target", "draft")]
    for model, file in zip(pairs.PAIRS["tiny"], files, strict=True):
        to_gguf.convert(model, file, "f32")
    return files


def called(*command):
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_client_of_lab_5(gguf):
    pytest.importorskip("openai")
    server = serve.serve(*gguf)
    assert server.listening_address.startswith("http://127.0.0.1:")
    done = called("labs/lab5.py", server.listening_address, "def f(x):\n")
    assert done.returncode == 0 and done.stdout.startswith("def f(x):\n"), done.stderr
    told = re.search(r"\n48 tokens, [\d.]+ a second\n(\d+) of (\d+) drafts kept: (\d+)%\n$", done.stdout)
    kept, drafted, share = map(int, told.groups())
    assert 0 < kept <= drafted <= 4 * (48 - kept) and share == round(100 * kept / drafted)
    done = called("labs/lab5.py", "http://127.0.0.1:9")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "http://127.0.0.1:9" in done.stderr


@pytest.fixture
def taken():
    """A port that somebody listens on."""
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        yield busy.getsockname()[1]


def test_serve_runs_a_command(gguf, taken):
    ports = taken - 2, taken - 1  # most likely free
    ask = (
        f"import sys, urllib.request as u; [u.urlopen(f'http://127.0.0.1:{{p}}/health') for p in {ports}]; sys.exit(3)"
    )
    done = called("labs/serve.py", *gguf, "--port", str(ports[0]), "--context", "512", "--", sys.executable, "-c", ask)
    assert done.returncode == 3, done.stderr  # the command's own
    told = [f"http://127.0.0.1:{ports[0]}  the target alone", f"http://127.0.0.1:{ports[1]}  with its draft"]
    assert done.stdout.splitlines() == told


def test_what_cannot_be_served_is_one_line(gguf, taken):
    for says, args in [
        ("nowhere.gguf", ["nowhere.gguf"]),
        ("README.md is no GGUF file", [gguf[0], "README.md"]),
        (f"port {taken} of 127.0.0.1 cannot be had", [gguf[0], "--port", str(taken)]),
    ]:
        done = called("labs/serve.py", *args, "--", "echo")
        assert done.returncode == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1
