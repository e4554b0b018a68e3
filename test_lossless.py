"""The proof that speculation changes nothing but the speed. Run it with pytest, or as a script.

Greedy text must be the very tokens of a loop that has no cache and no draft. Sampled text must have exactly the
distribution of the target, computed by walking through every outcome of every random choice. The models are made for
it and a few kilobytes in size, see tests/toys.py. B1, B2, ... number faults that software of this kind has had; each is
here as a small input with its right value. The script draws real tokens and counts them, see tests/lab3.py.
"""

import functools
import math
import sys
from pathlib import Path

import pytest
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent / "tests"))

import folders
import speculative
from dice import distance, distribution, law, outcomes
from kv_cache import KVCache
from model import Qwen2
from speculative import DraftModel, rejection, speculative_decode
from toys import Random, Scripted, Toy, chain, decode, history, one_hot, oracle, qwen2, table
from variants.adaptive_gamma import AdaptiveDraft
from variants.block_verification import block_verification
from variants.coupled_sampling import Coupled
from variants.prompt_lookup import Hybrid, PromptLookup


# Greedy
@pytest.mark.parametrize(
    "start, draft, emitted, accepted",
    [
        (3, [7], [4], 0),  # B1: the first draft is judged too
        (3, [4, 5, 0], [4, 5, 6], 2),  # B2: row i judges draft i
        (3, [5, 6, 7], [4], 0),  # B2: one row late, this would pass
        (5, [6, 7], [6, 7, 0], 2),  # B3, B4: k + 1 tokens, the bonus being id 0
        (3, [4, 5, 6], [4, 5, 6, 7], 3),  # B3, B4: and not 0
    ],
)
def test_one_round(start, draft, emitted, accepted):
    target = chain()
    round = next(speculative_decode(target, Scripted(draft), [start], 9, len(draft)))
    assert round == (emitted, len(draft), accepted)
    assert target.fed == [[start, *draft]]  # B4: one pass, over k + 1 rows


def test_nothing_accepted_in_any_round():  # B6
    tokens, rounds = decode(history(), Scripted([4, 4, 4]), [1, 2], 6, 3)
    assert tokens == [3, 6, 5, 3, 6, 5] and [round.accepted for round in rounds] == [0] * 6


def test_empty_drafts_are_plain_steps():  # B9
    _, rounds = decode(history(), Scripted([], [6, 5, 3], [], [5, 3], [], [0]), [1, 2], 12, 3)
    assert [id for round in rounds for id in round.tokens] == oracle(history(), [1, 2], 12)
    assert all(len(round.tokens) == 1 for round in rounds if not round.drafted)


@pytest.mark.parametrize("gamma", range(1, 9))
def test_random_drafts_never_change_greedy_text(gamma):  # B61
    model, rounds = qwen2(), []
    for seed in range(25):
        prompt = torch.randint(128, (1 + seed % 5,), generator=torch.Generator().manual_seed(seed)).tolist()
        tokens, new = decode(model, Random(128, seed), prompt, 12, gamma)
        rounds += new
        assert tokens == oracle(model, prompt, 12)
    assert sum(round.accepted for round in rounds) < 0.05 * sum(round.drafted for round in rounds)  # about 1 / 128


@pytest.mark.parametrize("gamma", [1, 3, 7])
def test_another_model_as_draft(gamma):
    target, draft = qwen2(0), qwen2(1)
    assert decode(target, DraftModel(draft, 99), [5, 6, 7], 40, gamma)[0] == oracle(target, [5, 6, 7], 40)


@pytest.mark.parametrize("gamma", [1, 2, 4, 7])
def test_the_target_as_its_own_draft_is_always_right(gamma):  # B10, B11
    for model, prompt in ((qwen2(), [1, 2, 3]), (history(), [1, 2])):
        tokens, rounds = decode(model, DraftModel(model, 200), prompt, 64, gamma)
        assert tokens == oracle(model, prompt, 64)
        assert all(round.accepted == round.drafted for round in rounds) and rounds[0].drafted == gamma


def test_ties_go_to_the_lowest_id_everywhere():  # B60
    tied = Toy(lambda seen: [0, 1, 3, 3, 2, 3])
    tokens, rounds = decode(tied, DraftModel(tied, 99), [0], 9, 3)
    assert tokens == [2] * 9 == decode(tied, None, [0], 9, 0)[0]
    assert all(round.accepted == round.drafted for round in rounds)


def test_another_dtype_for_the_draft():  # B72
    target = qwen2()
    assert decode(target, DraftModel(qwen2(dtype=torch.bfloat16), 99), [5, 6], 30)[0] == oracle(target, [5, 6], 30)
    options = {"temperature": 1.0, "generator": torch.Generator().manual_seed(0)}
    tokens, _ = decode(target, DraftModel(qwen2(dtype=torch.bfloat16), 99, **options), [5, 6], 30, **options)
    assert len(tokens) == 30


# Sampling: exact, by walking through every outcome
def emission(p, q, drafted, monkeypatch, row=0):
    """The exact distribution of the token at place `row`, if `drafted`, or else what q may give, meets p and q."""
    total = torch.zeros(p.shape[1], dtype=torch.double)

    def run():
        d = drafted if drafted is not None else speculative.draw(q, None)
        n, token = rejection(p, q, d, None)
        return d[row] if n > row else token if n == row else None

    for probability, token in outcomes(run, monkeypatch):
        if token is not None:
            total[token] += probability
    return total / total.sum()


P, Q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.5, 0.3]])


def test_rejection_gives_p(monkeypatch):  # B20, B23
    close = {"atol": 1e-6, "rtol": 0}
    p = torch.cat([P, P])  # the draft's row, and the bonus row
    torch.testing.assert_close(emission(p, Q, None, monkeypatch), P[0].double(), **close)
    kept = sum(
        prob for prob, n in outcomes(lambda: rejection(p, Q, speculative.draw(Q, None), None)[0], monkeypatch) if n
    )
    assert abs(kept - 0.7) < 1e-6  # the sum of min(p, q). Treating q as one-hot would accept 0.31
    for drafted in range(3):  # one-hot, whatever is drafted: B22
        torch.testing.assert_close(emission(p, None, torch.tensor([drafted]), monkeypatch), P[0].double(), **close)


def test_one_entry_of_each_row(monkeypatch):  # B7
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.3, 0.3, 0.4], [1.0, 0.0, 0.0]])
    q = torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.3, 0.3], [0.2, 0.2, 0.6]])
    results = outcomes(lambda: rejection(p, q, torch.tensor([2, 0, 1]), None)[0].item(), monkeypatch)
    chance = [sum(prob for prob, n in results if n >= place) for place in (1, 2, 3)]
    assert chance == pytest.approx([2 / 3, 2 / 3 * 0.25, 2 / 3 * 0.25 * 1.0])


def test_q_is_what_was_drawn_from(monkeypatch):  # B21
    target, draft = table([[0.375, 0.625, 0.0]]), table([[0.5, 0.3, 0.2]])
    warping = {"temperature": 1.0, "top_k": 2}

    def run():
        return decode(target, DraftModel(draft, 9, **warping), [0], 2, 1, generator=True, **warping)[0]

    first = torch.zeros(3, dtype=torch.double)
    for probability, tokens in outcomes(run, monkeypatch):
        first[tokens[0]] += probability
    torch.testing.assert_close(first, torch.tensor([0.375, 0.625, 0.0]).double(), atol=1e-6, rtol=0)


@functools.cache
def row(seed, seen):
    """The logits behind `seen` of a Qwen2 of two layers that knows three tokens."""
    return qwen2(seed, vocab=3)(torch.tensor(seen), KVCache(2, 2, 16, 99), 1)[0].tolist()


def remembered(seed):
    """That model with a real cache, in which a wrong row changes what it sees, and computed once for each text."""
    return Toy(lambda seen: row(seed, tuple(seen)))


WARPINGS = [
    {"temperature": 1.0},
    {"temperature": 0.5, "top_k": 2},
    {"temperature": 1.7, "top_p": 0.7},
    {"temperature": 0.8, "top_k": 2, "top_p": 0.6},
]
HOW = {  # what is proved of each: the rule, and a drafter of its own for each text
    "rejection": (rejection, lambda draft, **how: DraftModel(draft, 99, **how)),
    "one-hot": (rejection, lambda draft, **how: Scripted([1, 2, 0], [0, 2])),
    "block": (block_verification, lambda draft, **how: DraftModel(draft, 99, **how)),
    "block, one-hot": (block_verification, lambda draft, **how: Scripted([1, 2, 0], [0, 2])),
    "lookup": (rejection, lambda draft, **how: PromptLookup(shortest=1)),
    "hybrid": (rejection, lambda draft, **how: Hybrid(PromptLookup(), DraftModel(draft, 99, **how), most=2)),
    "adaptive": (rejection, lambda draft, **how: AdaptiveDraft(draft, 99, 0.1, [1, 1.1, 1.2, 1.3], **how)),
}


@pytest.mark.parametrize("warping", WARPINGS, ids=lambda warping: " ".join(f"{k} {v}" for k, v in warping.items()))
@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("how", HOW)
def test_the_distribution_of_the_text_is_exactly_the_targets(how, gamma, warping, monkeypatch):
    """All texts of 4 tokens, by all ways to get there; of 3 where these would be many thousands."""
    target, draft = (remembered(seed) for seed in (0, 1))
    rule, drafter = HOW[how]
    length = 4 if gamma == 1 or "top_k" in warping else 3

    def run():
        options = {"generator": True, "rule": rule, **warping}
        return tuple(decode(target, drafter(draft, **warping), [1, 2, 0, 1], length, gamma, **options)[0])

    found = distribution(run, monkeypatch)
    assert distance(found, law(target, [1, 2, 0, 1], length, **warping)) < 1e-6


@pytest.mark.parametrize("warping", WARPINGS, ids=lambda warping: " ".join(f"{k} {v}" for k, v in warping.items()))
@pytest.mark.parametrize("gamma", [0, 1, 2, 3])
def test_coupled_sampling_has_exactly_the_targets_distribution(gamma, warping, monkeypatch):
    def run():
        target, draft = (Coupled(remembered(seed), 0, 3, **warping) for seed in (0, 1))
        return tuple(decode(target, DraftModel(draft, 99), [1, 2, 0, 1], 4, gamma)[0])

    assert distance(distribution(run, monkeypatch), law(remembered(0), [1, 2, 0, 1], 4, **warping)) < 1e-6


def test_real_dice():  # B28
    p, g, tokens = [0.4, 0.3, 0.15, 0.1, 0.05], torch.Generator().manual_seed(0), []
    target, draft = table([p]), table([[0.1, 0.3, 0.2, 0.1, 0.3]])
    for _ in range(100):
        drafter = DraftModel(draft, 201, 1.0, generator=g)
        tokens += decode(target, drafter, [0], 200, 3, temperature=1.0, generator=g)[0]
    expected = torch.tensor(p) * len(tokens)
    chi2 = ((torch.tensor(tokens).bincount(minlength=5) - expected) ** 2 / expected).sum().item()
    assert math.exp(-chi2 / 2) * (1 + chi2 / 2) > 1e-6  # the chance of so much or more, with 4 degrees of freedom


def test_what_is_impossible_is_not_drawn(monkeypatch):
    probs = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]])
    for u, id in ((0.0, 1), (1 - 2**-53, 3)):  # the smallest and the largest number that torch.rand gives
        monkeypatch.setattr(torch, "rand", lambda *_, u=u, **__: torch.tensor([[u]], dtype=torch.double))
        assert speculative.draw(probs, torch.Generator()).tolist() == [id]


def test_a_draft_that_is_the_target_is_kept_when_sampling():  # B23: both are warped, and alike
    model = Toy(lambda seen: [0.5 * (sum(seen) * i % 5) for i in range(7)])
    options = {"temperature": 0.8, "top_k": 4, "top_p": 0.9, "generator": torch.Generator().manual_seed(0)}
    _, rounds = decode(model, DraftModel(model, 200, **options), [1, 2], 150, **options)
    assert all(round.accepted == round.drafted for round in rounds) and rounds[0].drafted == 4


def test_a_draft_of_nan_is_not_believed(monkeypatch):
    p, q = P.repeat(3, 1), torch.full((2, 3), math.nan)
    torch.testing.assert_close(emission(p, q, torch.tensor([2, 2]), monkeypatch), P[0].double(), atol=1e-6, rtol=0)
    target, g = table([[0.5, 0.3, 0.2, 0.0]]), torch.Generator().manual_seed(0)
    drafter = DraftModel(Toy(lambda seen: [math.nan] * 4), 99, 1.0, generator=g)
    tokens, rounds = decode(target, drafter, [0], 60, temperature=1.0, generator=g)
    assert set(tokens) == {0, 1, 2} and not any(round.accepted for round in rounds)


def test_p_equal_to_q(monkeypatch):  # B24
    p = torch.tensor([[1.0, 0.0, 0.0]]).expand(4, 3)
    n, token = rejection(p, p[:3], torch.tensor([0, 0, 0]), torch.Generator())
    assert (n.item(), token.item()) == (3, 0)
    rolled = iter([torch.tensor([0])])  # the coin that cannot fall this way does: nothing is left of p - q
    monkeypatch.setattr(speculative, "draw", lambda probs, _: next(rolled, probs))
    n, token = rejection(P.repeat(2, 1), P, torch.tensor([1]), None)
    assert n == 0 and torch.equal(token, P)


# Vocabularies padded to different widths


def test_a_narrower_draft(monkeypatch):  # B38
    target, draft = (
        Toy(lambda seen: one_hot((seen[-1] + 1) % 6, 12)),
        Toy(lambda seen: one_hot((seen[-1] + 1) % 6, 8), vocab=8),
    )
    tokens, rounds = decode(target, DraftModel(draft, 99, vocab=8), [0], 20)
    assert tokens == oracle(target, [0], 20) and rounds[0].accepted == 4
    p = torch.nn.functional.pad(P, (0, 9)).repeat(2, 1)
    torch.testing.assert_close(emission(p, Q, None, monkeypatch), p[0].double(), atol=1e-6, rtol=0)
    wide = Toy(lambda seen: one_hot(9, 12))
    tokens, rounds = decode(wide, DraftModel(draft, 99, vocab=8), [0], 6, 2)
    assert tokens == [9] * 6 and [round.drafted for round in rounds] == [2, 0, 0, 0, 0, 0]


# Four bits on a CPU, where greedy text is not only equal but for near ties


@pytest.mark.parametrize(("threads", "head_bits"), [(1, 4), (2, 4), (2, 8), (3, 4)])
def test_a_row_has_the_same_bits_in_any_company(tmp_path, threads, head_bits):
    """The MLP is so wide that threads share its rows, and that with 3 of them one begins in the middle of a row."""
    weights = {name: weight.bfloat16() for name, weight in folders.tensors(intermediate_size=8960).items()}
    folder = folders.write(tmp_path / "m", weights, intermediate_size=8960)
    model = Qwen2.load(folder, bits=4, device="cpu", head_bits=head_bits)
    ids, cache, before, inside = torch.arange(96) * 37 % 256, model.new_cache(96), torch.get_num_threads(), []
    down = model.layers[1].down
    alone = None
    model.layers[1].down = lambda x: inside.append(x) or down(x)  # behind it, 8-bit rounding hides most differences
    torch.set_num_threads(threads)
    try:
        model(ids[:80], cache, 0)
        for rows in (1, 2, 3, 5, 8, 16):
            inside.clear()
            cache.rollback(80)
            found = torch.cat([model(some, cache, len(some)) for some in ids[80:].split(rows)]), torch.cat(inside)
            alone = alone or found
            assert torch.equal(found[0], alone[0]) and torch.equal(found[1], alone[1])
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    import lab3

    lab3.main()
