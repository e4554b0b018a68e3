"""What stays in the cache after a round, and where a text ends."""

import math

import pytest
import torch

from kv_cache import KVCache
from speculative import DraftModel, speculative_decode
from toys import Scripted, Toy, chain, decode, history, one_hot, oracle, qwen2, table


def test_the_draft_is_fed_its_last_token_after_full_acceptance():  # B10
    draft = history()
    decode(history(), DraftModel(draft, 99), [1, 2], 9, 3)
    assert draft.fed == [[1, 2], [3], [6], [5, 3], [6], [5]]  # drafts 3 6 5, then the bonus 3: 5 was never fed


@pytest.mark.parametrize("gamma", [1, 3, 5])
def test_the_drafts_are_those_of_a_draft_without_a_cache(gamma):  # B10, B13, on the draft's side
    def often_right(seen):
        return one_hot((sum(seen) + (seen[-1] in (3, 4))) % 7, 7)

    class Afresh:
        def propose(self, tokens, gamma):
            return oracle(Toy(often_right), tokens, gamma), None

    _, rounds = decode(history(), DraftModel(Toy(often_right), 99), [1, 2], 40, gamma)
    _, expected = decode(history(), Afresh(), [1, 2], 40, gamma)
    assert rounds == expected and 0 < sum(round.accepted for round in rounds) < sum(round.drafted for round in rounds)


def test_one_synchronisation_a_round(monkeypatch):
    ways = ["tolist", "item", "cpu", "__bool__", "__int__", "__index__", "__float__"]
    model, counts = qwen2(), dict.fromkeys(ways, 0)
    for name in counts:
        original = getattr(torch.Tensor, name)

        def counted(self, *arguments, name=name, original=original):
            counts[name] += 1
            return original(self, *arguments)

        monkeypatch.setattr(torch.Tensor, name, counted)
    for temperature in (0.0, 1.0):
        g = torch.Generator().manual_seed(0)
        drafter = DraftModel(model, 99, temperature, generator=g)
        _, rounds = decode(model, drafter, [5, 6], 30, temperature=temperature, generator=g)
        assert counts.pop("tolist") == len(rounds) and not any(counts.values())
        counts["tolist"] = 0


def test_a_drafter_starts_over_with_another_text():
    model = history()
    drafter = DraftModel(model, 99)
    for prompt in ([1, 2], [4, 4, 4, 1], [5]):
        tokens, rounds = decode(history(), drafter, prompt, 9, 3)
        assert tokens == oracle(history(), prompt, 9)
        assert all(round.accepted == round.drafted for round in rounds)


def test_rejected_rows_are_forgotten():  # B12, B13
    target = history()
    rounds = speculative_decode(target, Scripted([3, 4, 1], []), [1, 2], 9, 3)
    assert next(rounds) == ([3, 6], 3, 1) and target.caches[0].length == 3  # 1 2 3, while 6 is not fed yet
    assert next(rounds).tokens == [5] and target.caches[0].length == 4


def test_rows_fed_do_not_depend_on_the_length_of_the_text():  # B16
    for length in (16, 200):
        target = chain()
        decode(target, Scripted([3, 3, 3]), [3] * length, 5, 3)
        assert [len(rows) for rows in target.fed] == [length - 1, 4, 4, 3, 2, 1]


def test_a_cache_that_cannot_roll_back_is_an_error():  # B13
    class Stuck(KVCache):
        rollback = property()  # reading it raises AttributeError, as where there is none

    target = chain()
    target.new_cache = lambda max_length: Stuck(1, 1, 1, max_length)
    with pytest.raises(AttributeError, match="rollback"):
        decode(target, Scripted([0]), [3], 4)
    assert target.fed == [[3, 0]]


def test_rollback_moves_nothing_but_the_length():  # B15
    cache = KVCache(layers=3, kv_heads=2, head_dim=16, max_length=9)
    k = torch.randn(2, 5, 16)
    cache.append(1, k, -k)
    cache.advance(5)
    cache.rollback(3)
    keys, values = cache.append(1, k[:, :1], k[:, 1:2])
    assert torch.equal(keys, torch.cat([k[:, :3], k[:, :1]], 1)) and torch.equal(values[:, :3], -k[:, :3])
    assert keys.shape == (2, 4, 16) and cache.keys[0].count_nonzero() == 0
    for illegal in (
        lambda: cache.rollback(4),
        lambda: cache.rollback(-1),
        lambda: cache.append(0, *[torch.zeros(2, 7, 16)] * 2),
    ):
        with pytest.raises(ValueError):
            illegal()


@pytest.mark.parametrize(
    "draft, emitted", [([4, 5, 6, 7], [4, 5, 6]), ([6, 7], [4]), ([4, 5], [4, 5, 6]), ([4, 5, 6], [4, 5, 6])]
)
def test_eos_ends_the_text_wherever_it_stands(draft, emitted):  # B31
    target = chain()
    tokens, rounds = decode(target, Scripted(draft, [7]), [3], 20, 4, eos=[6])
    assert tokens == [4, 5, 6] and rounds[0].tokens == emitted
    assert rounds[0].accepted == sum(a == b for a, b in zip(draft, emitted, strict=False))  # none behind the end
    assert target.caches[0].length == 1 + len(tokens) - 1  # B18: all but the last token, and nothing after the end


def test_a_second_turn_may_continue_from_the_cache():  # B18
    target = history()
    tokens, _ = decode(target, Scripted([3, 6, 5, 3]), [1, 2], 20, 4, eos=[6])
    more = tokens[-1:] + [4, 4]
    continued = target(torch.tensor(more), target.caches[0], 1)
    assert torch.equal(continued, target(torch.tensor([1, 2] + tokens[:-1] + more), target.new_cache(9), 1))


def test_an_accepted_eos_is_not_replaced():  # B32
    target = table([[0.0, 0.0, 1.0]])
    tokens, rounds = decode(target, Scripted([2, 1]), [0], 9, 2, temperature=1.0, eos=[2], generator=torch.Generator())
    assert tokens == [2] and rounds == [([2], 2, 1)]


@pytest.mark.parametrize("count", range(4))
def test_exactly_max_new_tokens(count):  # B33
    drafter = Scripted([4, 5, 6, 7, 0])
    assert decode(chain(), drafter, [3], count, 5)[0] == [4, 5, 6][:count]
    assert drafter.asked == ([count - 1] if count > 1 else [])  # with one token to go, nothing is drafted


@pytest.mark.parametrize("gamma", [0, 5])
def test_the_end_of_the_context(gamma):  # B76
    prompt = [3] * 10

    def model():
        return Toy(lambda seen: one_hot((seen[-1] + 1) % 8, 8), context=16)

    assert decode(model(), DraftModel(chain(), 99), prompt, 100, gamma)[0] == [4, 5, 6, 7, 0, 1]
    assert decode(chain(), DraftModel(model(), 99), prompt, 20, gamma)[0] == oracle(
        chain(), prompt, 20
    )  # a shorter draft
    assert decode(model(), None, [3] * 16, 100, gamma)[0] == []
    target = model()
    with pytest.raises(ValueError, match="17"):
        decode(target, None, [3] * 17, 100, gamma)
    assert target.fed == []


WRONG = [
    {"gamma": -1},
    {"temperature": -1},
    {"temperature": math.nan},
    {"temperature": 1e-40},
    {"temperature": 1.0},  # without a generator
    {"top_k": -1},
    {"top_p": 0},
    {"top_p": 1.1},
    {"count": -1},
    {"prompt": []},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_arguments_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError):
        decode(chain(), None, **({"prompt": [3], "count": 4, "gamma": 0} | wrong))


def test_drafting_without_dice_is_refused():
    with pytest.raises(ValueError, match="Generator"):
        DraftModel(chain(), 99, 1.0).propose([3], 2)


def test_more_drafts_than_asked_for_are_refused():
    class Eager:
        def propose(self, tokens, gamma):
            return [0] * (gamma + 1), None

    with pytest.raises(AssertionError, match="asked for 2 tokens and gave 3"):
        decode(chain(), Eager(), [3], 9, 2)


@pytest.mark.parametrize("unknown", ["repetition_penalty", "stop"])
def test_what_is_not_supported_is_refused(unknown):  # B29, B35
    with pytest.raises(TypeError):
        decode(chain(), None, [3], 4, 0, **{unknown: 1.2})
    with pytest.raises(NotImplementedError, match="batch"):  # B78
        qwen2()(torch.zeros(2, 3, dtype=torch.long), None, 1)
