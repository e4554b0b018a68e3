"""Lab 4: speculative decoding that others wrote. Hugging Face transformers calls it assisted generation.

    python labs/lab4.py                    says what is wrong: with blanks 1 to 3 as soon as they are filled, and with
                                           4 to 7 when all of them are
    python labs/lab4.py --target tiny      and your code on a prompt of each domain: speed, speed-up, acceptance rate

Fill the blanks in their order. The page to this is labs/lab4.md.
"""

import sys
import time

import torch
import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def blank(number, *given):
    raise NotImplementedError(number)  # labs/check4.py makes a hint of it


def load(folder):
    """A model of transformers from a folder, in float32, ready to decode greedily."""
    # >>> your code, blank 1: load
    model = blank(1, folder)
    # <<<

    # The folder's generation_config.json says how its makers would have you decode: those of Qwen2.5 ask for sampling
    # and for a repetition penalty. `model.generation_config` is what was read. Put a fresh one in its place, with
    # nothing in it but the id that ends a text: `model.config.eos_token_id`.
    # >>> your code, blank 2: decode greedily
    blank(2, model)
    # <<<
    return model


class Streamer:
    """generate() calls put() with the ids of the prompt, before it has read them, and then with those of each round."""

    def __init__(self):
        self.tokens, self.times = [], []  # a list of ids for each call, and when it was

    def put(self, ids):
        # >>> your code, blank 3: note the ids, as a flat list, and the time
        blank(3, ids, time.perf_counter)
        # <<<

    def end(self):
        pass


def write(target, ids, limit, draft=None, lookup=0):
    """Write up to `limit` tokens behind the prompt ids, a list. With `draft`, a model, generate() is to speculate, and
    with `lookup`, too: that is how many tokens may be copied from the text so far.

    Returns the new ids; how many of them came behind the first round, and in how many seconds; and behind the first
    round how many were drafted and how many of these were accepted.
    """
    how, prompt = {"max_new_tokens": limit, "pad_token_id": 0}, torch.tensor([ids])
    # generate() needs one more argument to speculate. Which, for the draft model, and which for lookup?
    # >>> your code, blank 4: if there is a draft, or a lookup, add the argument to `how`
    blank(4, how, draft, lookup)
    # <<<

    streamer, rows = Streamer(), []  # rows: of logits, of each pass of the target. The first also reads the prompt
    with target.register_forward_hook(lambda module, args, output: rows.append(output.logits.shape[1])):
        # >>> your code, blank 5: call generate() of the target: the prompt, greedily, with the streamer, and `how`
        blank(5, target, prompt, streamer, how)
        # <<<

    new = [id for ids in streamer.tokens[1:] for id in ids]
    # Reading the prompt is another matter than decoding. At which time has it been read, and a first round been made?
    # >>> your code, blank 6: the number of tokens that came after that, and the seconds from then to the end
    tokens, seconds = blank(6, streamer)
    # <<<

    # A round is a pass of the target. How many rows has it for k drafts, and how many tokens does it bring if a of
    # them are accepted? Leave out the first round here, too.
    # >>> your code, blank 7: count
    drafted, accepted = blank(7, rows, streamer)
    # <<<
    return new, tokens, seconds, drafted, accepted


if __name__ == "__main__":
    import check4

    sys.exit(check4.main(sys.modules[__name__]))
