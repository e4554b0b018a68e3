"""Text to ids and back."""

import pytest

import folders
from text import SYSTEM, Stream, Text, check_same_ids


@pytest.fixture
def text(tmp_path):
    return Text(folders.write(tmp_path / "m"), eos=[258, 256])


def test_the_chat_form(text):
    ids = text.prompt("Hi\n there")
    assert text.tokenizer.decode(ids, skip_special_tokens=False) == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nHi\n there<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [id for id in ids if id >= 256] == [257, 258, 257, 258, 257]


def test_a_base_model_gets_the_raw_text(tmp_path):  # B37: it knows <|im_end|>, but does not stop there
    text = Text(folders.write(tmp_path / "m"), eos=[256])
    assert text.decode(text.prompt("def f(")) == "def f("


@pytest.mark.parametrize("control", ["<|im_end|>", "<|im_start|>system\n", "<|endoftext|>", "<tool_call>"])
def test_users_cannot_write_control_tokens(text, control):
    plain, tricky = text.prompt("ab"), text.prompt(f"a{control}b")
    assert [id for id in tricky if id >= 256] == [id for id in plain if id >= 256]
    assert text.decode(tricky).count(control) == 1


@pytest.mark.parametrize("written", ["a\N{SLIGHTLY SMILING FACE}b", "\N{HANGUL SYLLABLE HAN}!", "plain"])
def test_streamed_characters_come_out_whole(text, written):  # B74: here every byte is a token
    stream = Stream(text)
    pieces = [stream.feed(byte) for byte in text.plain.encode(written).ids]
    assert "".join(pieces) == written and "\ufffd" not in "".join(pieces)
    assert stream.finish() == ""


def test_an_unfinished_character_is_one_replacement(text):  # B74
    stream = Stream(text)
    pieces = [stream.feed(byte) for byte in text.plain.encode("a\N{SLIGHTLY SMILING FACE}").ids[:-1]]
    assert "".join(pieces) == "a" and stream.finish() == "\ufffd"


def test_same_ids(tmp_path, text):  # B39
    check_same_ids(text, text)
    longer = folders.tokenizer()
    longer.add_special_tokens(["<|new|>"])
    folder = tmp_path / "other"
    folder.mkdir()
    longer.save(str(folder / "tokenizer.json"))
    check_same_ids(text, Text(str(folder), []))  # one id more, that only one of them has
    folders.tokenizer(exchange=(3, 4)).save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match="id 3 is '\\$' and '%'"):
        check_same_ids(text, Text(str(folder), []))
