"""watch.py: the text, its colours, the status line, the numbers, and how it ends. Much of it on a pseudo-terminal."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import folders
from measure import watch
from model import Qwen2
from text import Text
from toys import Scripted, Toy, oracle

ROOT = Path(__file__).parent.parent
STATUS = re.compile(r"\0337\033\[\d+H.*?\0338")
KEPT, CORRECTION, OWN = watch.COLOURS.values()


@pytest.fixture
def text(tmp_path):
    return Text(folders.write(tmp_path / "m"), eos=[256])  # each byte is a token


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    yield
    assert signal.getsignal(signal.SIGINT) is handler  # not ignored for ever


def options(**given):
    default = {"max_new_tokens": 20, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0}
    return SimpleNamespace(**default | given)


def writer(text, written, before=lambda position: None, context=10**6):
    """A target that writes this behind a prompt of one token. before: called with the position that it is to fill."""
    ids = text.plain.encode(written).ids

    def logits(seen):
        before(len(seen) - 1)
        return [10.0 * (id == ids[(len(seen) - 1) % len(ids)]) for id in range(320)]

    model = Toy(logits)
    model.config, model.device = SimpleNamespace(vocab_size=320, eos=[], max_position_embeddings=context), "cpu"
    return model


def show(target, text, drafter=None, prompt="?", gamma=4, **given):
    watch.watch((target, target), text, prompt, gamma, options(**given), drafter)


def scripted(text, *drafts):
    return Scripted(*(text.plain.encode(draft).ids for draft in drafts))


def on_terminal(monkeypatch, run, *args, size=(24, 80), seen=None, **given):
    """What run(*args, **given) writes to a terminal of this size. seen: a list that fills with it meanwhile."""
    pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, size)
    seen = [] if seen is None else seen

    def read():
        while True:
            try:
                seen.append(os.read(master, 4096))
            except OSError:  # the other end is closed
                return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with open(slave, "w", encoding="utf-8") as out, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            run(*args, **given)
    finally:
        reader.join()
        os.close(master)
    return b"".join(seen).decode().replace("\r\n", "\n")


def pieces(shown):
    """[(style, text)] of what was decoded, as it stands between the legend and the end of the scroll region."""
    return re.findall(r"\033\[([\d;]+)m(.*?)\033\[0m", STATUS.sub("", shown.split("\n\n", 1)[1].split("\033[r")[1]))


def test_elsewhere_the_text_is_that_of_plain_decoding_and_nothing_else(capsys):
    pair = [Qwen2.load(str(ROOT / "tiny" / name), 32, "cpu") for name in ("target", "draft")]
    text = Text(str(ROOT / "tiny" / "target"), pair[0].config.eos)
    ids = oracle(pair[0], text.prompt("The king"), 40)
    watch.watch(pair, text, "The king", 4, options(max_new_tokens=40))
    assert capsys.readouterr().out.startswith(text.decode(ids) + "\n\n40 tokens in ")


def test_it_comes_live(text, monkeypatch):
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    came = []

    def before(position):
        if position and len(came) < 2:
            came.append(os.read(reading, 99))  # raises if there is nothing to read

    with open(writing, "w") as out, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        watch.watch((writer(text, "abc", before),) * 2, text, "?", 0, options(max_new_tokens=3))
    os.close(reading)
    assert came == [b"a", b"b"]


def test_each_token_has_the_colour_of_who_wrote_it(text, monkeypatch):
    target, drafts = writer(text, "abcdefghij"), scripted(text, "abXd", "defg", "")
    shown = on_terminal(monkeypatch, show, target, text, drafts, max_new_tokens=10)
    expected = [(KEPT, "a"), (KEPT, "b"), (CORRECTION, "c"), *((KEPT, letter) for letter in "defg"), (OWN, "h")]
    assert pieces(shown) == [*expected, (OWN, "i"), (OWN, "j")]
    legend, summary = shown.split("\n\n")[0], shown.split("\033[r")[-1]
    assert all(f"\033[{style}m{kind}" in legend for kind, style in watch.COLOURS.items())
    for kind, style, count in zip(watch.COLOURS, watch.COLOURS.values(), (6, 1, 3), strict=True):
        assert f"\033[{style}m{kind}: {count}\033[0m" in summary
    assert "10 tokens in 4 rounds" in summary and "75% of 8 drafts kept, 2.50 tokens a round" in summary


def test_a_character_of_several_tokens_is_whole_and_has_the_last_ones_colour(text, monkeypatch, capsys):
    written = "\N{SLIGHTLY SMILING FACE}\N{LATIN SMALL LETTER E WITH ACUTE}"
    target, face = writer(text, written), text.plain.encode(written).ids

    def drafts():
        return Scripted([*face[:3], 0], [*face[4:], 0])

    shown = on_terminal(monkeypatch, show, target, text, drafts(), max_new_tokens=6)
    assert pieces(shown) == [(CORRECTION, written[0]), (OWN, written[1])]
    show(target, text, drafts(), max_new_tokens=6)
    assert capsys.readouterr().out.startswith(written + "\n\n6 tokens in 2 rounds")
    show(target, text, max_new_tokens=5)  # it ends within the second one
    assert capsys.readouterr().out.startswith(written[0] + "\ufffd\n\n5 tokens")


@pytest.mark.parametrize("name, value, colours, escapes", [
    ("NO_COLOR", "0", False, True), ("NO_COLOR", "", True, True), ("TERM", "dumb", False, False),
])  # fmt: skip
def test_without_colours(text, monkeypatch, name, value, colours, escapes):
    monkeypatch.setenv(name, value)
    target = writer(text, "abc")
    shown = on_terminal(monkeypatch, show, target, text, max_new_tokens=12, gamma=2)
    assert bool(re.search(r"\033\[[\d;]*m", shown)) == colours and ("\033" in shown) == escapes
    assert colours or "abcabcabcabc\n\n12 tokens" in re.sub(r"\033[78DA]|\033\[[\d;]*[rJA]", "", STATUS.sub("", shown))


@pytest.mark.parametrize("rows, columns", [(9, 20), (3, 20), (0, 0)])
@pytest.mark.parametrize("written", ["abcdefghijklmnopqrstuvwxyz" * 9, "\u6f22\u5b57\u4eee\u540d\u8a9e" * 39])
def test_the_text_is_whole_above_the_status_line(text, monkeypatch, rows, columns, written):
    pyte = pytest.importorskip("pyte")  # like the Linux console it forgets that the cursor waits to wrap
    target, count = writer(text, written), len(text.plain.encode(written).ids)
    monkeypatch.setenv("NO_COLOR", "1")
    shown = on_terminal(monkeypatch, show, target, text, size=(rows, columns), max_new_tokens=count, gamma=1)
    screen = pyte.HistoryScreen(columns or 80, rows or 24)
    pyte.Stream(screen).feed("\n" * rows + shown.rsplit("\0337\033[r", 1)[0].replace("\n", "\r\n"))
    status = [line for line in screen.display if "plainly" in line]
    assert len(status) == (rows > 3) and (not status or screen.display[-1] == status[0])
    above = ["".join(line[x].data for x in range(screen.columns)) for line in screen.history.top]  # scrolled away
    assert "".join([*above, *screen.display[: len(screen.display) - len(status)]]).replace(" ", "") == written


def test_the_last_row_is_made_free_by_scrolling(text, monkeypatch):
    pyte = pytest.importorskip("pyte")
    target = writer(text, "abc")
    target.config.eos = text.plain.encode("c").ids
    monkeypatch.setenv("NO_COLOR", "1")
    shown = on_terminal(monkeypatch, show, target, text, size=(9, 20))
    screen = pyte.Screen(20, 9)
    pyte.Stream(screen).feed("\n" * 9 + "above\r\n" + shown.rsplit("\0337\033[r", 1)[0])
    assert [line.strip() for line in screen.display[-3:-1]] == ["above", "abc"]


def test_the_window_changes_its_size(text, monkeypatch):
    sizes = [(80, 24)] * 3 + [(60, 12)] * 3 + [(60, 3)] * 3 + [(100, 30)] * 99
    monkeypatch.setattr(os, "get_terminal_size", lambda file: os.terminal_size(sizes.pop(0)))
    target = writer(text, "a")
    shown = on_terminal(monkeypatch, show, target, text, gamma=0)
    assert re.findall(r"\033\[(?:1;(\d+))?r", shown) == ["", "23", "", "11", "", "", "29", ""]
    assert [int(row) for row in re.findall(r"\033\[(\d+)H", shown)][:9] == [24] * 3 + [12] * 3 + [30] * 3


def test_escapes_in_the_text_do_not_reach_a_terminal(text, monkeypatch, capsys):
    target = writer(text, "a\033[2Jb\tc\r\nd")
    shown = on_terminal(monkeypatch, show, target, text, gamma=0, max_new_tokens=11)
    assert "\033[2J" not in shown and "\ufffd" in shown and "\t" in shown
    show(target, text, gamma=0, max_new_tokens=11)
    assert capsys.readouterr().out.startswith("a\033[2Jb\tc\r\nd\n\n")


@pytest.mark.parametrize("call, tokens, plain", [(0, 0, "not timed"), (8, 8, "not timed"), (25, 20, "(4 timed)")])
def test_ctrl_c_before_the_first_token_in_the_text_and_in_the_plain_one(text, monkeypatch, call, tokens, plain):
    calls = iter(range(99))
    target = writer(text, "abc", lambda _: signal.raise_signal(signal.SIGINT) if next(calls) == call else None)

    def run():
        with pytest.raises(KeyboardInterrupt):  # for which bench.py ends with 130
            show(target, text, gamma=0)

    shown = on_terminal(monkeypatch, run)
    assert re.findall(r"\033\[(?:1;\d+)?r", shown)[-1] == "\033[r"
    end = shown.split("\033[r")[-1]
    assert end.startswith(f"\0338\n\033[J\n{tokens} tokens in {tokens} rounds\n") and not STATUS.search(end)
    assert re.search(rf"plain decoding, afterwards: .*{re.escape(plain)}", end)


def test_a_second_ctrl_c_stops_nothing(text, monkeypatch, capsys):
    rates, target = watch.rates, writer(text, "abc")

    def impatient(seen):
        signal.raise_signal(signal.SIGINT)
        return rates(seen)

    monkeypatch.setattr(watch, "rates", impatient)
    with pytest.raises(KeyboardInterrupt):
        show(target, text, gamma=0)
    assert capsys.readouterr().out.startswith("a\n\n1 tokens in 1 rounds")


def test_the_first_round_and_printing_are_not_timed(text, monkeypatch, capsys):
    clock = [0.0]

    def wait(seconds):
        clock[0] += seconds

    target = writer(text, "a", lambda position: wait(100.0 if position == 0 else 0.2))
    monkeypatch.setattr(watch.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(watch.Screen, "paint", lambda *_: wait(50.0) or "")
    show(target, text, scripted(text, "aaaa"), gamma=4)
    shown = capsys.readouterr().out
    assert "speculative: 100% of 16 drafts kept, 5.00 tokens a round, 5.00 tokens/s (15 timed)" in shown
    assert "plain decoding, afterwards: 5.00 tokens/s (16 timed)" in shown and "ratio: 1.00" in shown


def test_gamma_auto_leaves_it_to_the_drafter(text, capsys):
    drafter = scripted(text, "ab")
    show(writer(text, "ab"), text, drafter, gamma="auto", max_new_tokens=90)
    assert drafter.asked[0] == 64 and capsys.readouterr().out.startswith("ab" * 45 + "\n\n90 tokens")


def test_a_prompt_without_room_is_refused_before_anything_is_shown(text, capsys):
    target = writer(text, "ab", context=3)
    for prompt in ("abc", "abcd"):
        with pytest.raises(ValueError, match=f"the prompt has {len(prompt)} tokens and the context only 3"):
            show(target, text, prompt=prompt)
    assert capsys.readouterr().out == ""


def test_sampling_is_that_of_the_seed(text, capsys):
    flat, shown = writer(text, "ab"), []
    flat.logits = lambda seen: [0.0] * 320
    for seed in (1, 1, 2):
        show(flat, text, temperature=1.0, seed=seed)
        shown.append(capsys.readouterr().out.split("\n20 tokens")[0])
    assert shown[0] == shown[1] != shown[2]


def bench(**how):
    command = [sys.executable, "bench.py", "watch", "The king", "--target", "tiny", "--max-new-tokens", "400"]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, **how)


def test_ctrl_c_ends_bench_with_130(monkeypatch):
    seen = []

    def run():
        process = bench(stdout=sys.stdout, stderr=subprocess.PIPE, text=True)
        while process.poll() is None and b"drafts kept" not in b"".join(seen):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert (process.wait(60), process.stderr.read()) == (130, "")

    shown = on_terminal(monkeypatch, run, seen=seen)
    assert re.search(r" tokens in \d+ rounds\n", shown.split("\033[r")[-1])


def test_bench_ends_quietly_when_nobody_reads_on():
    process = bench(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    assert (process.wait(60), process.stderr.read()) == (141, "")
