"""The variants: what each promises beyond the right distribution, which test_lossless.py proves of all of them."""

import itertools
import math
from collections import Counter

import pytest
import torch

import speculative
from dice import outcomes
from model import Qwen2
from pairs import PAIRS, prompts
from speculative import DraftModel, rejection, speculative_decode
from text import Text
from toys import Scripted, Toy, decode, exact_only, history, one_hot, oracle
from variants.adaptive_gamma import AdaptiveDraft
from variants.block_verification import block_verification
from variants.coupled_sampling import Coupled, gumbel, noisy
from variants.prompt_lookup import Hybrid, PromptLookup

# Block verification


def kept(rule, p, q, monkeypatch):
    """How many drafts a rule keeps on average, exactly. p [vocab] and q [vocab] at every place, or [k + 1, vocab]."""
    results = outcomes(lambda: rule(p, q, speculative.draw(q, None), None)[0].item(), monkeypatch)
    return sum(probability * n for probability, n in results)


def test_the_example_of_the_paper(monkeypatch):
    """Sun et al., section 2: two tokens, drafted with chances 2/3 and 1/3 where the target has 1/3 and 2/3."""
    p, q = torch.tensor([[1 / 3, 2 / 3]] * 3), torch.tensor([[2 / 3, 1 / 3]] * 2)
    assert kept(rejection, p, q, monkeypatch) == pytest.approx(10 / 9, abs=1e-6)
    assert kept(block_verification, p, q, monkeypatch) == pytest.approx(11 / 9, abs=1e-6)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_never_fewer_than_rejection(k, monkeypatch):
    gains = []
    for seed in range(6):
        g = torch.Generator().manual_seed(seed)
        p, q = (torch.randn(rows, 3, generator=g).mul(1.5).softmax(-1) for rows in (k + 1, k))
        gains.append(kept(block_verification, p, q, monkeypatch) - kept(rejection, p, q, monkeypatch))
    assert min(gains) > -1e-6
    assert max(gains) < 1e-6 if k == 1 else max(gains) > 0.01


def test_block_where_p_is_q_and_where_q_is_nan(monkeypatch):
    p = torch.tensor([[0.5, 0.3, 0.2]] * 4)
    assert kept(block_verification, p, p[:3], monkeypatch) == pytest.approx(3)
    n, token = block_verification(p, torch.full((3, 3), math.nan), torch.tensor([0, 1, 2]), torch.Generator())
    assert n.tolist() == [0] and token.item() in range(3)
    q, total = torch.tensor([[0.2, 0.5, 0.3], [math.nan] * 3]), torch.zeros(3, dtype=torch.double)

    def first():
        drafted = torch.cat([speculative.draw(q[:1], None), torch.tensor([1])])
        n, token = block_verification(p[:3], q, drafted, None)
        return drafted[0].item() if n > 0 else token.item()

    for probability, id in outcomes(first, monkeypatch):
        total[id] += probability
    torch.testing.assert_close(total, p[0].double(), atol=1e-6, rtol=0)
    n, token = block_verification(p[:1], None, torch.tensor([], dtype=torch.long), torch.Generator())  # nothing drafted
    assert n.tolist() == [0] and n.dtype == torch.long and token.shape == (1,)


# Coupled sampling


P, Q = torch.tensor([0.5, 0.3, 0.15, 0.049, 0.001]), torch.tensor([0.3, 0.4, 0.1, 0.1, 0.1])


def test_noise_makes_draws_from_p():
    """Of 40,000 places, one after the other: the right shares, and no place is like the one before it."""
    drawn = [noisy(P, 7, place, 5).argmax().item() for place in range(40000)]
    for counts, p in ((torch.tensor(drawn).bincount(minlength=5), P), (pairs_of(drawn), torch.outer(P, P).flatten())):
        expected = p.double() * counts.sum()
        chi2, df = ((counts - expected) ** 2 / expected).sum(), len(p) - 1
        assert torch.special.gammaincc(torch.tensor(df / 2).double(), chi2 / 2) > 1e-6
    assert not torch.equal(gumbel(0, 1, 5), gumbel(1, 0, 5)) and not torch.equal(gumbel(2**33, 1, 5), gumbel(0, 1, 5))


def pairs_of(drawn):
    return torch.tensor([5 * a + b for a, b in itertools.pairwise(drawn)]).bincount(minlength=25)


def test_how_often_the_coupled_draws_agree():
    """For id j the chance is 1 / sum_i max(p_i / p_j, q_i / q_j), as for the first of several clocks to ring."""
    chance = sum(1 / torch.maximum(P / P[j], Q / Q[j]).sum().item() for j in range(5))
    apart = (P - Q).abs().sum().item() / 2
    assert (1 - apart) / (1 + apart) <= chance <= 1 - apart
    agree = sum(noisy(P, 3, i, 5).argmax() == noisy(Q, 3, i, 5).argmax() for i in range(8000)) / 8000
    assert abs(agree - chance) < 4 * (chance * (1 - chance) / 8000) ** 0.5


@exact_only
@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
def test_the_same_seed_gives_the_same_text_with_and_without_speculation(temperature):
    """100 seeds, in 4 bits, 16 tokens each. At temperature 1 and above no two seeds give the same text."""
    target, draft = (Qwen2.load(folder, 4, "cpu") for folder in PAIRS["tiny"])
    ids = Text(PAIRS["tiny"][0], []).prompt(prompts(False, "code")["code"][0])[:40]
    texts = set()
    for seed in range(100):
        noise = [Coupled(model, seed, 4096, temperature) for model in (target, draft)]
        plain, _ = decode(noise[0], None, ids, 16, 0)
        found, rounds = decode(noise[0], DraftModel(noise[1], 99), ids, 16, 1 + seed % 5)
        assert found == plain and any(round.drafted for round in rounds)
        texts.add(tuple(plain))
    assert len(texts) > 30 if temperature < 1 else len(texts) == 100


# Prompt lookup


def test_lookup():
    ask = PromptLookup().propose
    assert ask([1, 2, 3, 4, 1, 2], 9) == ([3, 4, 1, 2], None)
    assert ask([1, 2, 3, 4, 1, 2], 2) == ([3, 4], None)
    assert ask([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 1) == ([9], None)  # three that match before two that match later
    assert ask([2, 3, 9, 2, 3, 8, 1, 2, 3], 1) == ([8], None)  # the later one of two
    for nothing in ([], [5], [5, 5], [1, 2, 3, 4], [4, 1, 2, 3, 4]):  # one token alone says little: B78b, B78c
        assert ask(nothing, 4) == ([], None)
    assert PromptLookup(shortest=1).propose([4, 1, 2, 4], 4) == ([1, 2, 4], None)


def test_lookup_follows_a_text_that_grows():
    g, lookup, tokens = torch.Generator().manual_seed(0), PromptLookup(longest=4, shortest=1), []
    for _ in range(300):
        tokens += torch.randint(3, (1 + len(tokens) % 3,), generator=g).tolist()
        expected = []
        for n in (4, 3, 2, 1):
            places = [i for i in range(n, len(tokens)) if tokens[i - n : i] == tokens[-n:]]
            if places:
                expected = tokens[places[-1] : places[-1] + 5]
                break
        assert lookup.propose(tokens, 5) == (expected, None)
    assert lookup.propose([0, 1], 5) == ([], None)  # another text


def test_hybrid_asks_the_second_where_the_first_has_nothing():
    second, text = Scripted([6, 6, 6], [], [6, 6, 6, 6, 6, 6], [6, 6, 6, 6, 6, 6]), [1, 2, 3, 1, 2]
    hybrid = Hybrid(PromptLookup(), second, most=3)
    # In the first round of a text in any case: there a draft model reads the prompt, while the target does.
    assert hybrid.propose(text, 8) == ([3, 1, 2], None) and second.asked == [3]
    text += [3]
    assert hybrid.propose(text, 8) == ([1, 2, 3], None) and second.asked == [3, 0]
    text += [9]
    assert hybrid.propose(text, 8) == ([6, 6, 6], None) and second.asked == [3, 0, 3]
    assert hybrid.propose([1, 2, 3, 4], 8) == ([6, 6, 6], None) and second.asked == [3, 0, 3, 3]
    repeats = Toy(lambda seen: one_hot((seen[-1] + 1) % 5, 5))
    tokens, rounds = decode(repeats, Hybrid(PromptLookup(), DraftModel(repeats, 99)), [0], 40, 8)
    assert tokens == [(1 + i) % 5 for i in range(40)] and max(round.accepted for round in rounds) > 4


def test_the_second_of_a_hybrid_forgets_what_was_refused():
    """Its drafts are those of a draft without a cache, also after rounds in which lookup answered."""

    def often_right(seen):
        return one_hot((sum(seen) + (seen[-1] in (3, 4))) % 7, 7)

    class Afresh:
        def propose(self, tokens, gamma):
            return oracle(Toy(often_right), tokens, gamma), None

    texts = [decode(history(), Hybrid(PromptLookup(), second), [1, 2], 60, 5) for second in
             (DraftModel(Toy(often_right), 99), Afresh())]  # fmt: skip
    assert texts[0] == texts[1]
    assert any(round.accepted < round.drafted for round in texts[0][1])


# Adaptive gamma: what it costs, in passes of the target over one row, counted and not timed


V = [1, 1.06, 1.12, 1.18, 1.25, 1.35, 1.45, 1.55, 1.65]


def cost(gamma, tokens, wrong, c, v=V, adaptive=True, first=None, told=True):
    """Of a text, without its first round, over that of plain decoding. wrong(place): is the draft wrong there? told:
    does the drafter know of `first`?"""
    target, fed = history(), []
    draft = Toy(lambda seen: one_hot((sum(seen) + wrong(len(seen))) % 7, 7))
    drafter = AdaptiveDraft(draft, 999, c, v, first if told else c) if adaptive else DraftModel(draft, 999)
    for round in speculative_decode(target, drafter, [1, 2], tokens, gamma):
        fed.append((len(target.fed), len(draft.fed), len(round.tokens), round.drafted > 0))
    target_fed, draft_fed = target.fed[fed[0][0] :], draft.fed[fed[0][1] :]
    spent = sum(v[len(rows) - 1] for rows in target_fed) + c * sum(
        v[min(len(rows), 9) - 1] * max(1, len(rows) / 9) for rows in draft_fed
    )
    spent += ((first or c) - c) * sum(drafted for *_, drafted in fed[1:])
    return spent / sum(count for _, _, count, _ in fed[1:])


def test_the_first_draft_of_a_round_may_be_dearer():
    """As it is in the tiny pair: told so, it keeps the promise on a text where every draft is wrong."""
    assert cost(8, 100, lambda place: True, 0.14, first=0.9) < 1.03
    assert cost(8, 100, lambda place: True, 0.14, first=0.9, told=False) > 1.03


@pytest.mark.parametrize("tokens", [64, 128, 400])
@pytest.mark.parametrize("c", [0.1, 0.2, 0.45, 0.8, 1.0])
def test_never_slower_than_plain_by_more_than_3_percent(c, tokens):
    """Where every draft is wrong, though the draft is sure of it; or where it is right, but as dear as the target."""
    assert cost(8, tokens, lambda place: True, c) < 1.03
    assert cost(8, tokens, lambda place: place % 2, c) < 1.03
    assert cost(8, tokens, lambda place: place > tokens // 2, c) < 1.03
    assert cost(8, tokens, lambda place: False, 1.0) < 1.03
    assert cost(4, tokens, lambda place: True, c, adaptive=False) > 1.6  # which is no small thing


@pytest.mark.parametrize("c", [0.1, 0.2, 0.45])
def test_near_the_best_fixed_gamma(c):
    """A draft that is always right, one that is right three times of four, and one that becomes better and worse."""
    g = torch.Generator().manual_seed(0)
    chance = torch.rand(500, generator=g).tolist()
    texts = {
        "always": lambda place: False,
        "often": lambda place: chance[place] > 0.75,
        "in parts": lambda place: place // 100 % 2 == 1,
    }
    for name, wrong in texts.items():
        best = min(cost(gamma, 400, wrong, c, adaptive=False) for gamma in range(9))
        assert cost(8, 400, wrong, c) < (1.0 if name == "in parts" else 1.06) * best, name


def test_adaptive_is_deterministic_and_stays_in_its_cache():
    logits = [[0.3 * (i * j % 5) for i in range(7)] for j in range(7)]
    for vocab in (None, 5):
        runs = []
        for _ in range(2):
            g = torch.Generator().manual_seed(0)
            options = {"temperature": 1.0, "generator": g}
            draft = Toy(lambda seen, width=vocab or 7: logits[seen[-1]][:width], vocab=vocab)
            drafter = AdaptiveDraft(draft, 20, 0.2, V, vocab=vocab, **options)
            runs.append(decode(Toy(lambda seen: logits[seen[-1]]), drafter, [1, 2], 60, 8, **options))
        assert runs[0] == runs[1] and len(runs[0][0]) == 60
        assert Counter(round.drafted > 0 for round in runs[0][1])[True] > 1


def test_auto_weighs_a_dear_first_draft_with_those_behind_it():
    """It costs 0.95 of a target step and is kept with a chance of 0.7 or so; the next cost 0.05 each."""
    model = history()
    drafts = [len(AdaptiveDraft(model, 99, 0.05, [1.0] * 9, 0.95).propose([1, 2], gamma)[0]) for gamma in (1, 8)]
    assert drafts[0] == 0 < drafts[1]
