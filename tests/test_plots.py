"""compare and --plot: the cells of the table, the one-line errors, and pictures in which nothing covers anything."""

import json
from xml.etree import ElementTree

import pytest

from measure import board, plots

MACHINE = {"device": "cpu", "name": "Some(R) CPU 9000 @ 2.9GHz", "threads": 2, "torch": "2.13.0"}
PAIR = {"command": "showdown", "temperature": 0.0, "max_new_tokens": 64, "top_k": 0, "engine": "ours"}
PAIR |= {"target": "Qwen/Qwen2.5-3B", "draft": "Qwen/Qwen2.5-0.5B", "dtype": "float32"}
LONG = {"target": "Qwen/Qwen2.5-Coder-1.5B-Instruct", "draft": "Qwen/Qwen2.5-Coder-0.5B-Instruct"}
DOMAINS = ["code", "factual", "creative", "edit"]


def verify(**pair):
    rows = [{"n": n, "milliseconds": 9 + n, "ratio": (9 + n) / 10, "low": 0.9, "high": n} for n in range(1, 33)]
    return {"machine": MACHINE, "pair": PAIR | {"command": "verify"} | pair, "rows": rows}


def row(domain, mode, speed, speedup, gamma=0, **more):
    default = {"speedup_low": speedup, "speedup_high": speedup, "identical": True}
    return (
        default
        | {"domain": domain, "mode": mode, "gamma": gamma, "tokens_per_second": speed, "speedup": speedup}
        | more
    )


def showdown(*rows, **pair):
    return {"machine": MACHINE, "pair": PAIR | pair, "rows": list(rows)}


def four_by_five():
    """4 domains, 5 modes, the speed-ups all close to the line at 1, and a sweep of gamma."""
    rows = []
    for domain in DOMAINS:
        rows.append(row(domain, "plain", 12.3, 1.0, predicted_by_gamma=[1.0, 1.2, 1.3, 1.2]))
        for gamma, speedup in (1, 1.05), (2, 1.08), (4, 0.97):
            counts = {"judged": [50, 20, 9, 3][:gamma], "kept": [40, 10, 5, 1][:gamma]}
            rows.append(row(domain, "speculative", 12.3, speedup, gamma, **counts))
        rows += [row(domain, mode, 12.3, 0.93, 8) for mode in ("auto", "lookup", "hybrid")]
    return showdown(*rows)


def others(*modes, **pair):
    return showdown(*(row(d, mode, 123.4, None, None) for d in DOMAINS for mode in modes), **pair)


def save(folder, *documents):
    files = [str(folder / f"{i}.json") for i in range(1, len(documents) + 1)]
    for file, document in zip(files, documents, strict=True):
        with open(file, "w") as f:
            json.dump(document, f)
    return files


def table(folder, capsys, *documents):
    assert board.compare(save(folder, *documents)) == list(documents)
    shown = capsys.readouterr().out
    assert board.LEGEND in shown
    return shown.replace(board.LEGEND, "").splitlines()


def test_the_table(tmp_path, capsys):
    ours = showdown(
        row("code", "plain", 5, 1.0), row("code", "speculative", 8.406, 1.681, 4), row("code", "auto", 8, 1.6, 8),
        row("edit", "plain", 4, 1.0), row("edit", "speculative", 3.2, 0.8, 4),
    )  # fmt: skip
    shown = table(tmp_path, capsys, ours, showdown(row("edit", "server", 17.5, None), engine="server"))
    assert shown == [
        f"1  {tmp_path}/1.json: ours, float32, greedy, up to 64 tokens",
        "   Qwen2.5-3B, draft Qwen2.5-0.5B, Some 9000, 2 threads",
        f"2  {tmp_path}/2.json: server, float32, greedy, up to 64 tokens",
        "   Qwen2.5-3B, draft Qwen2.5-0.5B, Some 9000, 2 threads",
        "",
        "tok/s, times its plain          code           edit",
        "1 ours plain            5.00   1.00x   4.00   1.00x",
        "1 ours speculative 4    8.41*  1.68x   3.20   0.80x",
        "1 ours auto             8.00   1.60x",
        "2 server server                       17.50*",
        "",
    ]


def test_the_table_of_verify(tmp_path, capsys):
    short = verify(dtype="4 bits (Int8)")
    short["rows"] = short["rows"][:8]
    shown = table(tmp_path, capsys, verify(), short)
    assert shown[5:8] == [
        "cost of a pass           ms  v(1)  v(2)  v(4)  v(8)  v(16)  v(32)",
        "1 ours float32        10.00  1.00  1.10  1.30  1.70   2.50   4.10",
        "2 ours 4 bits (Int8)  10.00  1.00  1.10  1.30  1.70",
    ]
    assert "greedy" not in "".join(shown)  # nothing is decoded


def test_what_is_no_comparison_is_said(tmp_path, capsys):
    one, other = row("code", "plain", 5, 1.0), {"temperature": 1.0, "top_k": None, "max_new_tokens": 128}
    other |= {"target": "/x/tiny/target", "dtype": "bfloat16", "prompts": "b"}
    files = showdown(one, prompts="a"), showdown(row("code", "lookup", 5, 1.0, identical=False), **other), verify()
    said = table(tmp_path, capsys, *files)
    assert [line for line in said if line.startswith("not")] == [
        "not the same lengths: max_new_tokens 64 (1), 128 (2)",
        "not the same prompts: prompts a (1), b (2)",
        "not the same weights: target Qwen2.5-3B (1 3), tiny/target (2)",
        "not the same weights: dtype float32 (1 3), bfloat16 (2)",
        "not the same sampling: temperature 0 (1), 1 (2)",
        "not the text of plain decoding: lookup on code (2)",
    ]
    assert "not the" not in "".join(table(tmp_path, capsys, files[0], files[0], verify(max_new_tokens=9)))


@pytest.mark.parametrize("text", [
    "", "{", "[]", "7", '{"rows": []}', '{"machine": {}, "pair": {}, "rows": []}', json.dumps(verify() | {"rows": []}),
    json.dumps(verify(command="memory")), json.dumps(verify(command="showdown")), json.dumps(verify(command=[])),
    json.dumps(showdown(row("code", "plain", None, 1.0))), json.dumps(showdown(row("code", "plain", 5, "1.0"))),
    json.dumps(showdown({"part": "weights"})), json.dumps(verify() | {"machine": {"device": "cpu"}}), "\udcff",
])  # fmt: skip
def test_a_file_that_is_not_bench_pys(tmp_path, text):
    good, file = save(tmp_path, verify())[0], tmp_path / "bad.json"
    file.write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=r"bad\.json: cut off, or not what") as error:
        board.compare([good, str(file)])
    assert "\n" not in str(error.value)


def test_a_missing_file_prints_nothing(tmp_path, capsys):
    with pytest.raises(OSError, match=r"none\.json"):
        board.compare([*save(tmp_path, verify()), str(tmp_path / "none.json")])
    assert capsys.readouterr().out == ""


def test_titles_and_labels():
    assert board.words([verify()]) == ("Qwen2.5-3B, draft Qwen2.5-0.5B, float32, Some 9000, 2 threads", [""])
    title, labels = board.words([showdown(), showdown(dtype="4 bits", engine="x"), verify()])
    assert title == "Qwen2.5-3B, draft Qwen2.5-0.5B, Some 9000, 2 threads, greedy, up to 64 tokens"
    assert labels == ["1: ours, float32", "2: x, 4 bits", "3: ours, float32"]
    assert board.words([verify(), showdown(), showdown()])[1] == ["", "file 2", "file 3"]


def test_positions():
    fixed = row("code", "speculative", 1, 1, 2, judged=[50, 20, 9], kept=[40, 10, 9])
    auto = row("code", "auto", 1, 1, 8, judged=[99] * 8, kept=[99] * 8)
    found = plots.by_position([row("edit", "plain", 1, 1), auto, fixed, row("code", "lookup", 1, 1, 10, **{
        "judged": [90] * 10, "kept": [90] * 10})])  # fmt: skip
    assert found == {"edit": [], "code": [(1, 0.8), (2, 0.5)]}
    assert plots.by_position([row("code", "lookup", 1, 1, 1, judged=[90], kept=[9])]) == {"code": []}
    assert plots.by_position([auto])["code"] == [(i, 1.0) for i in range(1, 9)]


@pytest.mark.parametrize("name, message", [("x.pdf", "must end in .png or .svg"), ("no/x.png", "can be written")])
def test_a_file_that_cannot_be_drawn(tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        plots.draw([verify()], str(tmp_path / name))


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--plot needs matplotlib: pip install matplotlib"):
        plots.draw([verify()], str(tmp_path / "x.png"))


@pytest.mark.parametrize("name, start", [("x.png", b"\x89PNG\r\n\x1a\n"), ("x.svg", b"<?xml version")])
def test_the_file(tmp_path, name, start):
    pytest.importorskip("matplotlib")
    plots.draw([verify()], str(tmp_path / name))
    drawn = (tmp_path / name).read_bytes()
    assert drawn.startswith(start)
    assert name == "x.png" or ElementTree.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib.figure")
    file = tmp_path / "x.png"
    file.write_text("old")

    def full(self, name, **_):
        with open(name, "w") as f:
            f.write("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(matplotlib.Figure, "savefig", full)
    with pytest.raises(OSError, match="No space"):
        plots.draw([verify()], str(file))
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"] and file.read_text() == "old"
    with pytest.raises(ValueError, match="nothing to draw"):
        plots.draw([showdown({"part": "weights"}, command="memory")], str(file))


def drawn(*documents):
    """The figure, laid out, and what draws it."""
    agg = pytest.importorskip("matplotlib.backends.backend_agg")
    figure = plots.figure(list(documents))
    canvas = agg.FigureCanvasAgg(figure)
    canvas.draw()
    return figure, canvas.get_renderer()


def names(figure):
    return [panel.get_suptitle().replace("\u00a0", " ") for panel in figure.subfigs]


COST, GAMMA, KEPT = "What a pass over n rows costs", "Speed-up by gamma", "Drafts kept, of those judged"
BARS = "Speed-up of each mode"


def test_panels():
    few = showdown(row("code", "plain", 5, 1.0), row("code", "speculative", 5, 1.0, 2, judged=[9, 5], kept=[9, 5]))
    assert names(drawn(verify())[0]) == [COST]
    assert names(drawn(others("plain", "assisted"))[0]) == ["Speed of each mode"]  # no speed-ups are known
    assert names(drawn(few)[0]) == [GAMMA, BARS]
    assert names(drawn(four_by_five())[0]) == [GAMMA, KEPT, BARS]
    assert names(drawn(four_by_five(), verify())[0]) == [COST, GAMMA, KEPT, BARS]
    assert names(drawn(few, few)[0]) == [f"{GAMMA}\nfile 1", f"{GAMMA}\nfile 2", "Speed of each mode"]


def test_what_is_drawn():
    figure, _ = drawn(verify(), verify(dtype="bfloat16"), four_by_five())
    cost, gamma, kept, bars = (panel.axes[0] for panel in figure.subfigs)
    assert [line.get_label() for line in cost.lines] == [
        "1: float32, 1 row 10 ms", "2: bfloat16, 1 row 10 ms", "free", "proportional: n",
    ]  # fmt: skip
    assert list(cost.lines[0].get_ydata()) == [(9 + n) / 10 for n in range(1, 33)]
    assert list(gamma.lines[0].get_ydata()) == [1.0, 1.2, 1.3, 1.2]
    assert list(gamma.lines[1].get_xdata()) == [1, 2, 4] and list(gamma.lines[1].get_ydata()) == [1.05, 1.08, 0.97]
    assert list(kept.lines[0].get_ydata()) == [0.8, 0.5]
    assert [text.get_text() for text in bars.texts] == ["1.00"] * 4 + ["1.08"] * 4 + ["0.93"] * 12
    assert bars.get_xticklabels()[3].get_text() == "edit\nplain 12.3 tok/s"
    assert "speculative, best of gamma 1, 2, 4" in [text.get_text() for text in figure.subfigs[3].legends[0].texts]


def test_several_showdowns():
    figure, _ = drawn(four_by_five(), others("server", engine="server"))
    panel = figure.subfigs[-1]
    assert names(figure)[-1] == "Speed of each mode\n1: ours\n2: server"
    first = ["1 plain", "1 speculative, best of gamma 1, 2, 4", "1 auto", "1 lookup", "1 hybrid"]
    assert [text.get_text() for text in panel.legends[0].texts] == [*first, "2 server"]
    assert [text.get_text() for text in panel.axes[0].texts] == ["12.3"] * 20 + ["123.4"] * 4


def test_a_spread_that_is_not_known():
    assert plots.spread([{"v": 2, "low": 1, "high": 4}, {"v": 3, "low": None}], "v", "low", "high") == [[1, 3], [4, 3]]


def test_titles_break_behind_commas():
    models = {"target": "x/a-language-model-instruct", "draft": "x/another-smaller-language-model-instruct"}
    figure, _ = drawn(verify(**models))
    assert figure.get_suptitle().replace("\u00a0", " ").split("\n") == [
        "a-language-model-instruct,",
        "draft another-smaller-language-model-instruct, float32,",
        "Some 9000, 2 threads",
    ]


def test_a_domain_has_one_colour():  # even where another one has no points
    domain = four_by_five()
    for one in domain["rows"]:
        if one["domain"] == "code":
            one.pop("judged", None)
    figure, _ = drawn(domain)
    gamma, kept = (panel.axes[0] for panel in figure.subfigs[:2])
    colours = [{line.get_label(): line.get_color() for line in panel.lines} for panel in (gamma, kept)]
    assert all(colours[0][name] == colours[1][name] for name in DOMAINS[1:]) and "code" not in colours[1]


@pytest.mark.parametrize("documents", [
    [four_by_five()], [verify(**LONG)], [verify(**LONG), verify(dtype="4 bits (Int8)", **LONG)],
    [verify(), four_by_five()], [four_by_five(), others("plain", "assisted", "lookup", engine="transformers", **LONG)],
    [four_by_five(), others("server", engine="server", dtype="Q4_K_M", target="qwen2.5-3b-instruct-q4_k_m.gguf")],
])  # fmt: skip
def test_no_text_covers_another_or_is_cut_off(documents):
    figure, renderer = drawn(*documents)
    texts = [figure._suptitle]
    for panel in figure.subfigs:
        axes = panel.axes[0]
        low, high = axes.get_xlim()
        x = [label for at, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True) if low <= at <= high]
        low, high = axes.get_ylim()
        y = [label for at, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True) if low <= at <= high]
        legend = panel.legends[0].texts
        texts += [panel._suptitle, axes.xaxis.label, axes.yaxis.label, *x, *y, *axes.texts, *legend]
        box = axes.get_window_extent(renderer)
        assert not any(text.get_window_extent(renderer).overlaps(box) for text in legend)
        assert box.height > 150  # pixels, at 100 an inch
    texts = [text for text in texts if text.get_text()]
    assert min(text.get_fontsize() for text in texts) >= 14
    boxes = [text.get_window_extent(renderer) for text in texts]
    for i, box in enumerate(boxes):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, texts[i]
        assert not any(box.overlaps(other) for other in boxes[:i]), texts[i]
