"""Text to ids and back: the tokenizer of a model folder, the chat form, and text that streams.

text = Text("path/to/Qwen2.5-0.5B-Instruct", eos=[151645, 151643])
ids = text.prompt("Why is the sky blue?")
"""

import json
import os

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

SYSTEM = (
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."  # what Qwen2.5's own template puts there
)


class Text:
    """The tokenizer of a model folder. eos: the ids that end a text, as the model's config has them."""

    def __init__(self, folder, eos):
        path = os.path.join(folder, "tokenizer.json")
        if not os.path.exists(path):
            raise FileNotFoundError(f"{path} is missing: the download is incomplete")
        with open(path, "rb") as f:
            content = f.read()
        try:
            self.tokenizer = Tokenizer.from_buffer(content)
        except Exception as error:  # the tokenizers library raises plain Exception
            raise ValueError(f"{path} is no tokenizer ({error}): download it again") from None
        # What a user types must never become a control token, be it "<|im_end|>" or "<tool_call>". So user text goes
        # through a copy of the tokenizer that has never heard of them.
        self.plain = Tokenizer.from_str(json.dumps(json.loads(content) | {"added_tokens": []}))
        self.im_start, self.im_end = (self.tokenizer.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
        # A base model may know these tokens too, and even ship a chat template, but it does not stop at <|im_end|>.
        self.is_chat = self.im_end is not None and self.im_end in eos

    def prompt(self, text):
        """Ids to start from: for an instruct model the chat form of a user's message, for a base model the raw text.

        Raises ValueError if there is nothing in it, or nothing that is text.
        """
        if not text:
            raise ValueError("the prompt is empty: write something")
        text.encode()  # a UnicodeEncodeError, which is a ValueError, says where half a surrogate pair stands
        if not self.is_chat:
            return self.plain.encode(text).ids
        ids = []
        for role, content in (("system", SYSTEM), ("user", text)):  # <|im_start|>role \n content <|im_end|> \n
            ids += [self.im_start, *self._ids(f"{role}\n{content}"), self.im_end, *self._ids("\n")]
        return [*ids, self.im_start, *self._ids("assistant\n")]

    def decode(self, ids):
        """The text of ids, without control tokens."""
        return self.tokenizer.decode(ids)

    def _ids(self, text):
        return self.plain.encode(text, add_special_tokens=False).ids


class Stream:
    """Turns ids that arrive a few at a time into text, whole characters only.

    A character may be spread over several tokens; it is held back until its last byte is there.
    """

    def __init__(self, text):
        self.text, self.ids, self.sent = text, [], 0
        self.decoder = DecodeStream(skip_special_tokens=True)

    def feed(self, id):
        """The text that has become certain with this id; often the id's own piece, sometimes nothing."""
        self.ids.append(id)
        piece = self.decoder.step(self.text.tokenizer, id) or ""
        self.sent += len(piece)
        return piece

    def finish(self):
        """What is still held back. An unfinished character comes out as U+FFFD."""
        return self.text.decode(self.ids)[self.sent :]


def check_same_ids(target, draft):
    """Raise ValueError, naming the first id that differs, unless two Texts give each id that both have one meaning.

    An id that only one of them has does no harm: the target judges whatever is drafted, and emits what it likes.
    """
    a, b = ({id: token for token, id in text.tokenizer.get_vocab().items()} for text in (target, draft))
    for id in sorted(a.keys() & b.keys()):
        if a[id] != b[id]:
            raise ValueError(f"target and draft have different tokenizers: id {id} is {a[id]!r} and {b[id]!r}")
