"""Other engines: transformers and a real llama.cpp server write what ours writes, and are counted and timed as ours."""

import functools
import json
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY

import pytest
import transformers

import folders
import pairs
from labs import engines
from labs.serve import serve
from model import Qwen2
from quantize import save
from text import Text
from toys import decode

ROOT = Path(__file__).parent.parent
TARGET, DRAFT = pairs.PAIRS["tiny"]
END, LIMIT = 4093, 40
sys.path.insert(0, str(ROOT / "tiny"))
import to_gguf  # noqa: E402


@pytest.fixture(scope="module")
def text():
    return Text(TARGET, [END])


@pytest.fixture(scope="module")
def wanted(text):
    """[(ids, what our plain decoding writes behind them)] for a prompt of each domain."""
    model, prompts = Qwen2.load(TARGET, bits=32, device="cpu"), pairs.prompts(False, "all").values()
    return [(ids, decode(model, None, ids, LIMIT, 0)[0]) for ids in (text.prompt(some[0]) for some in prompts)]


def copy(folder, to, **generation):
    """A model folder with another generation_config.json."""
    shutil.copytree(folder, to)
    (to / "generation_config.json").write_text(json.dumps(generation))
    return str(to)


# transformers


@pytest.fixture(scope="module")
def modes():
    return engines.transformers_modes(TARGET, DRAFT, "cpu", 32)


def test_transformers_writes_the_same(modes, wanted):
    for ids, expected in wanted:
        plain, assisted, lookup = (modes[mode](ids, LIMIT, [END]) for mode in ("plain", "assisted", "lookup"))
        assert plain.ids == assisted.ids == lookup.ids == expected
        assert (plain.tokens, plain.drafted, plain.accepted) == (LIMIT - 1, 0, 0)
        assert 0 < assisted.accepted <= assisted.drafted and lookup.accepted < lookup.drafted
    again = modes["assisted"](ids, LIMIT, [END])
    assert (again.drafted, again.accepted) == (assisted.drafted, assisted.accepted)  # nothing is carried over


def test_the_end_of_text_and_of_the_context(modes, wanted):
    ids, expected = wanted[0]
    for write in modes.values():
        written = write(ids, LIMIT, [expected[9]])
        assert written.ids == expected[: expected.index(expected[9]) + 1]
        assert len(write((ids * 9)[:509], LIMIT, []).ids) == 3  # of 512


def test_all_drafts_of_the_target_itself_are_kept(wanted):
    write = engines.transformers_modes(TARGET, TARGET, "cpu", 32)["assisted"]
    written = write(wanted[0][0], LIMIT, [])
    assert written.drafted == written.accepted > 0
    assert written.ids == wanted[0][1] and written.tokens < LIMIT - 1  # the first round has drafts, too


def test_what_is_timed(modes, wanted, monkeypatch):
    """A clock that moves by the rows that the target is fed: reading the prompt must not count."""
    clock, forward = [0.0], transformers.Qwen2ForCausalLM.forward

    @functools.wraps(forward)  # generate() looks at its arguments' names
    def slow(self, input_ids=None, **rest):
        clock[0] += input_ids.shape[1]
        return forward(self, input_ids=input_ids, **rest)

    monkeypatch.setattr(transformers.Qwen2ForCausalLM, "forward", slow)
    monkeypatch.setattr(engines, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    for ids, _ in wanted:
        plain, lookup = modes["plain"](ids, LIMIT, []), modes["lookup"](ids, LIMIT, [])
        assert plain.seconds == plain.tokens
        assert lookup.seconds == lookup.drafted + lookup.tokens - lookup.accepted  # each round feeds a token more


def test_a_generation_config_changes_nothing(modes, wanted, tmp_path):
    asks = {"do_sample": True, "temperature": 1.5, "top_k": 5, "repetition_penalty": 3.0, "num_assistant_tokens": 2}
    asks |= {"num_assistant_tokens_schedule": "heuristic", "eos_token_id": [wanted[0][1][5], END]}
    folder = [copy(folder, tmp_path / str(i), **asks) for i, folder in enumerate((TARGET, DRAFT))]
    other, (ids, expected) = engines.transformers_modes(*folder, "cpu", 32), wanted[0]
    for mode in modes:
        a, b = modes[mode](ids, LIMIT, [END]), other[mode](ids, LIMIT, [END])
        assert a.ids == b.ids == expected and a[4:] == b[4:]


def test_what_transformers_cannot_read(tmp_path, monkeypatch):
    source = folders.write(tmp_path / "source")
    save(source, str(tmp_path / "four"))
    for folder, bits in ((TARGET, 4), (str(tmp_path / "four"), 32)):
        with pytest.raises(ValueError, match="--bits 32 or 16") as refused:
            engines.transformers_modes(folder, folder, "cpu", bits)
        assert folder in str(refused.value) and "\n" not in str(refused.value)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="pip install transformers"):
        engines.transformers_modes(TARGET, DRAFT, "cpu", 32)


# Servers


def convert(folder, file):
    pytest.importorskip("gguf")
    to_gguf.convert(folder, str(file), "f32")
    return str(file)


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    pytest.importorskip("xllamacpp")
    folder = tmp_path_factory.mktemp("gguf")
    target, draft = (convert(path, folder / f"{i}.gguf") for i, path in enumerate((TARGET, DRAFT)))
    return serve(target), serve(target, draft)


def post(server, path, **body):
    return json.loads(b"".join(engines.ask(server.listening_address + path, body)))


def test_llama_cpp_writes_the_same(servers, wanted, text):
    modes = engines.server_modes([servers[0].listening_address, servers[1].listening_address + "/v1/"])
    assert list(modes) == ["server 1", "server 2"]
    for ids, expected in wanted:
        plain, drafted = (write(ids, LIMIT, [END]) for write in modes.values())
        assert plain.text == drafted.text == text.decode(expected) and plain.ids is None
        assert plain.tokens == drafted.tokens == LIMIT - 1 and plain.seconds > 0 < drafted.seconds
        assert plain.drafted is None and plain.accepted is None
        # Each round adds a token of the target's, and drafts at most 4.
        assert 0 < drafted.accepted <= drafted.drafted <= 4 * (drafted.tokens - drafted.accepted)


def test_llama_cpp_cuts_texts_as_we_do(servers, text):
    for prompt in ["def f(x):\n    return x ** 2  # na\u00efve\n\n\nKING JOHN\n\t1984 \u00a3", "I'll\r\n  go"]:
        ids = post(servers[0], "/tokenize", content=prompt)["tokens"]
        assert ids == text.prompt(prompt)
        assert post(servers[0], "/detokenize", tokens=ids)["content"] == prompt


def test_llama_cpp_stops_at_the_models_end_of_text(tmp_path, servers, wanted, text):
    ids, expected = wanted[0]
    last = expected.index(expected[9])
    other = serve(convert(copy(TARGET, tmp_path / "m", eos_token_id=expected[9]), tmp_path / "m.gguf"))
    written = engines.server_modes([other.listening_address])["server"](ids, LIMIT, [expected[9]])
    assert written.text == text.decode(expected[: last + 1])  # with the end, which is no control token here
    assert written.tokens == last  # the end counts, the first does not


@pytest.fixture
def fake():
    """Answers as it is told: .answers[path] = status, body. Keeps what it was asked in .asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            size = int(self.headers.get("Content-Length", 0))
            server.asked.append(json.loads(self.rfile.read(size) or "null"))
            status, body = server.answers.get(self.path, (404, "not here"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.answers = [], {"/v1/models": (200, '{"data": [{"id": "big"}]}')}
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def chunks(*of):
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in of) + "data: [DONE]\n\n"


def piece(text, count, reason=None):
    return {"choices": [{"text": text, "finish_reason": reason}], "usage": count and {"completion_tokens": count}}


def test_a_server_that_counts_as_vllm_does(fake):
    total = {"choices": [], "usage": {"completion_tokens": 9}}
    fake.answers["/v1/completions"] = 200, chunks(piece("ab", 3), piece("c", 4), piece("d", 9, "stop"), total)
    written = engines.server_modes([fake.url])["server"]([5, 6], 20, [7])
    assert (written.text, written.tokens, written.drafted) == ("abcd", 6, None)  # the first chunk had 3
    fake.answers["/v1/completions"] = 200, chunks(piece("a", None), piece("bc", None, "stop"), total)
    assert engines.server_modes([fake.url], "other")["server"]([5, 6], 20, [7]).tokens == 8
    first, second = filter(None, fake.asked)
    assert (first["model"], second["model"]) == ("big", "other")
    assert first["prompt"] == [5, 6] and first["temperature"] == 0 and first["repetition_penalty"] == 1
    assert first["stop_token_ids"] == [7] and first["max_tokens"] == 20


def test_the_drafts_of_vllm_are_what_its_sums_grow_by(fake, monkeypatch):
    sums, real = iter([(100, 40), (112, 48), (112, 48), (124, 59)]), engines.drafts_of_vllm
    page = "# HELP vllm:spec_decode_num_{0}_tokens_total\nvllm:spec_decode_num_{0}_tokens_total{{engine=\"0\"}} {1}.0\n"

    def grown(url):
        fake.answers["/metrics"] = 200, "".join(map(page.format, ("draft", "accepted"), next(sums)))
        return real(url)

    monkeypatch.setattr(engines, "drafts_of_vllm", grown)
    fake.answers["/v1/completions"] = 200, chunks(piece("a", 1), piece("bc", 12, "stop"))  # several rounds in a chunk
    write = engines.server_modes([fake.url + "/v1"])["server"]
    assert write([5, 6], 20, [7])[2:] == (11, ANY, 12, 8)
    fake.answers["/v1/completions"] = 200, chunks(piece("a", 1), piece("b", 6), piece("c", 11), piece("d", 12, "stop"))
    assert write([5, 6], 12, [7])[2:] == (11, ANY, 12, 8)  # of four kept in the last round three were cut off
    fake.answers["/metrics"] = 200, "vllm:num_requests_running 1.0\n"  # one that does not speculate
    assert real(fake.url) == [None, None] == real(fake.url + "/other")


@pytest.mark.parametrize("status, body, says", [
    (404, '{"error": {"message": "no model big"}}\n', "404 Not Found: .*no model big"),
    (200, chunks({"error": {"message": "out of memory"}}), "out of memory"),
    (200, chunks(piece("a", 1), piece("b", 2)), "broke off"),
    (200, chunks(piece("a", None, "stop")), "how many tokens"),
])  # fmt: skip
def test_what_goes_wrong_is_one_line(fake, status, body, says):
    fake.answers["/v1/completions"] = status, body
    with pytest.raises(OSError, match=f"^{fake.url}/v1/completions.*{says}") as wrong:
        engines.server_modes([fake.url])["server"]([5], 4, [])
    assert "\n" not in str(wrong.value)


def test_an_address_without_a_server_is_one_line(fake):
    fake.answers["/page/v1/models"] = 200, "<html>Hello</html>"
    fake.answers["/two/v1/models"] = 200, '{"data": [{"id": "big"}, {"id": "small"}]}'
    for url, says in [
        ("http://127.0.0.1:9", "no answer .*refused"),
        ("127.0.0.1:8080", "no answer .*unknown url type"),
        (f"{fake.url}/wrong", "404 Not Found: not here"),
        (f"{fake.url}/page", "not such a server"),
        (f"{fake.url}/two", "name the one to measure: big, small"),
    ]:
        with pytest.raises((OSError, ValueError), match=says) as wrong:
            engines.server_modes([url])
        assert str(wrong.value).startswith(url) and "\n" not in str(wrong.value)
