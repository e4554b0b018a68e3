"""The proof that speculation changes nothing but the speed. Run it with pytest.

Greedy text must be the very tokens of a loop that has no cache and no draft. Sampled text must have exactly the
distribution of the target, computed by walking through every outcome of every random choice. The models are made for
it and a few kilobytes in size, see tests/toys.py. B1, B2, ... number faults that software of this kind has had; each is
here as a small input with its right value.
"""

import itertools
import math

import pytest
import torch

import folders
import speculative
from model import Qwen2
from speculative import DraftModel, rejection, speculative_decode
from toys import Random, Scripted, Toy, chain, decode, history, one_hot, oracle, qwen2, table

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

class Dice:
    """Stands in for `draw`: shows what `path` says, then always the first that is possible, noting what else was."""

    def __init__(self, path):
        self.path, self.probability, self.shown, self.others = path, 1.0, 0, []

    def __call__(self, probs, generator):
        for row in probs.double():
            if self.shown == len(self.path):
                first, *rest = row.nonzero().flatten().tolist()
                self.others += [[*self.path, id] for id in rest]
                self.path = [*self.path, first]
            self.probability *= (row[self.path[self.shown]] / row.sum()).item()
            self.shown += 1
        return torch.tensor(self.path[self.shown - len(probs) : self.shown], dtype=torch.long)


def outcomes(run, monkeypatch):
    """Call run() once for every way in which its calls of `draw` can turn out. Returns [(probability, result)].

    It is the real algorithm that runs. Only the dice are replaced.
    """
    results, paths = [], [[]]
    while paths:
        dice = Dice(paths.pop())
        with monkeypatch.context() as patch:
            patch.setattr(speculative, "draw", dice)
            result = run()
        results.append((dice.probability, result))
        paths += dice.others
    assert abs(sum(probability for probability, _ in results) - 1) < 1e-6
    return results


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
    target = table([[0.375, 0.625, 0.0]])
    draft = table([[0.5, 0.3, 0.2]])
    warping = {"temperature": 1.0, "top_k": 2}

    def run():
        return decode(target, DraftModel(draft, 9, **warping), [0], 2, 1, generator=True, **warping)[0]

    first = torch.zeros(3, dtype=torch.double)
    for probability, tokens in outcomes(run, monkeypatch):
        first[tokens[0]] += probability
    torch.testing.assert_close(first, torch.tensor([0.375, 0.625, 0.0]).double(), atol=1e-6, rtol=0)


def expected_warp(row, temperature, top_k, top_p):
    """Temperature, top-k and top-p once more, in plain Python and from their definitions. No two entries are equal."""
    weights = [math.exp(x / temperature) for x in row]
    order = sorted(range(len(row)), key=lambda id: -weights[id])[: top_k or None]
    inside, mass = [], 0.0
    for id in order:  # the smallest set of likeliest tokens that reaches top_p of what top-k has left
        if not inside or mass < top_p:
            inside.append(id)
        mass += weights[id] / sum(weights[id] for id in order)
    return [weights[id] / sum(weights[id] for id in inside) if id in inside else 0.0 for id in range(len(row))]


@pytest.mark.parametrize("one_hot_draft", [False, True])
@pytest.mark.parametrize("top_p", [1.0, 0.7])
@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("gamma", [1, 2])
def test_the_distribution_of_the_text_is_exactly_the_targets(
    gamma, temperature, top_k, top_p, one_hot_draft, monkeypatch
):
    rows = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(7)).tolist()
    target, draft = (Toy(lambda seen, rows=rows: rows[sum(seen) % 3]) for rows in rows)
    warping = {"temperature": temperature, "top_k": top_k, "top_p": top_p}

    def run():
        drafter = Scripted([1, 2]) if one_hot_draft else DraftModel(draft, 99, **warping)
        return tuple(decode(target, drafter, [1, 2], 3, gamma, generator=True, **warping)[0])

    found = {}
    for probability, tokens in outcomes(run, monkeypatch):
        found[tokens] = found.get(tokens, 0.0) + probability
    for tokens in itertools.product(range(3), repeat=3):
        expected = 1.0
        for i, token in enumerate(tokens):
            expected *= expected_warp(rows[0][(3 + sum(tokens[:i])) % 3], temperature, top_k, top_p)[token]
        assert abs(found.get(tokens, 0.0) - expected) < 1e-6


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


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_has_the_same_bits_in_any_company(tmp_path, threads):
    """The MLP is so wide that threads share its rows, and that with 3 of them one begins in the middle of a row."""
    weights = {name: weight.bfloat16() for name, weight in folders.tensors(intermediate_size=8960).items()}
    model = Qwen2.load(folders.write(tmp_path / "m", weights, intermediate_size=8960), bits=4, device="cpu")
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
