"""The proof that speculation changes nothing but the speed. Run it with pytest.

Greedy text must be the very tokens of a loop that has no cache and no draft; sampled text must have exactly the target's
distribution, computed by walking through every outcome of every random choice. The models are a few kilobytes and made
here: they are built so that a mistake in the row, the cache or the rule changes the answer. The numbers B1, B2, ... are
faults that software of this kind has had; each has its small input and its right value here.
"""

import itertools
import math

import pytest
import torch

import speculative
from kv_cache import KVCache
from model import Config, Layer, Linear, Qwen2
from speculative import DraftModel, greedy, rejection, speculative_decode, warp

# ---------------------------------------------------------------------------------------------------------------------
# Models and drafters


class Toy:
    """A model that is a function: logits(tokens seen so far) -> one number per id. It keeps its tokens in a real KVCache,
    as keys, and sees what the cache shows it: stale and missing rows change what it says.
    """

    def __init__(self, logits, context=10**6, vocab=None):
        self.logits, self.context, self.vocab, self.fed, self.caches = logits, context, vocab, [], []

    def new_cache(self, max_length):
        self.caches.append(KVCache(1, 1, 1, min(max_length, self.context)))
        return self.caches[-1]

    def __call__(self, ids, cache, last):
        assert self.vocab is None or ids.max() < self.vocab, "an id that this model has no embedding for"
        self.fed.append(ids.tolist())
        seen, _ = cache.append(0, ids.float().view(1, -1, 1), ids.float().view(1, -1, 1))
        cache.advance(len(ids))
        seen = seen.flatten().long().tolist()
        rows = [self.logits(seen[: len(seen) - last + 1 + i]) for i in range(last)]
        return torch.tensor(rows, dtype=torch.float32)  # [last, vocab]


def one_hot(id, vocab):
    return [10.0 * (i == id) for i in range(vocab)]


def chain():
    """F1: after id comes (id + 1) mod 8."""
    return Toy(lambda seen: one_hot((seen[-1] + 1) % 8, 8))


def history():
    """F2: the sum of all tokens in sight, mod 7. From [1, 2] comes 3, 6, 5, 3, 6, 5."""
    return Toy(lambda seen: one_hot(sum(seen) % 7, 7))


def table(rows):
    """F3: log-probabilities by the last token; one row for all, if there is only one."""
    rows = [[math.log(p) if p else -math.inf for p in row] for row in rows]
    return Toy(lambda seen: rows[seen[-1] % len(rows)])


def qwen2(seed=0, dtype=torch.float32):
    """F4: a random Qwen2. The biases are large enough to be missed if they were."""
    c = Config(2, 64, 96, 4, 2, 16, 128, 256, 1e-6, 10000.0, True, True, [])
    g = torch.Generator().manual_seed(seed)

    def weight(*shape):
        return (torch.randn(shape, generator=g) * (shape[-1] ** -0.5)).to(dtype)

    def layer():
        qkv = Linear(weight(128, 64), weight(128) * 8)
        return Layer(c, weight(64).exp(), qkv, Linear(weight(64, 64)), weight(64).exp(), Linear(weight(192, 64)),
                     Linear(weight(64, 96)))  # fmt: skip

    embed = Linear(weight(128, 64) * 3, rows_readable=True)
    return Qwen2(c, embed, [layer(), layer()], weight(64).exp(), embed)


class Scripted:
    """F5: drafts what the test says, list after list, and the last one for ever."""

    def __init__(self, *drafts):
        self.drafts, self.asked = list(drafts), []

    def propose(self, tokens, gamma):
        self.asked.append(gamma)
        draft = self.drafts.pop(0) if len(self.drafts) > 1 else self.drafts[0]
        return draft[:gamma], None


class Random:
    def __init__(self, vocab, seed=0):
        self.vocab, self.generator = vocab, torch.Generator().manual_seed(seed)

    def propose(self, tokens, gamma):
        return torch.randint(self.vocab, (gamma,), generator=self.generator), None


def oracle(model, prompt, count):
    """Greedy decoding with nothing that could go wrong: no cache, no draft, the whole text in every step."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(model(torch.tensor(tokens), model.new_cache(len(tokens)), 1)[0].argmax().item())
    return tokens[len(prompt) :]


def decode(target, drafter, prompt, count, gamma=4, **options):
    rounds = list(speculative_decode(target, drafter, prompt, count, gamma, **options))
    return [id for round in rounds for id in round.tokens], rounds


# ---------------------------------------------------------------------------------------------------------------------
# Greedy: rows, bonus, empty drafts


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
        assert all(round.accepted == round.drafted for round in rounds)


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


# ---------------------------------------------------------------------------------------------------------------------
# Rolling back


def test_the_draft_is_fed_its_last_token_after_full_acceptance():  # B10
    draft = history()
    decode(history(), DraftModel(draft, 99), [1, 2], 9, 3)
    assert draft.fed == [[1, 2], [3], [6], [5, 3], [6], [5]]  # drafts 3 6 5, then the bonus 3: 5 was never fed


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
    target = chain()
    target.new_cache = lambda max_length: type("Stuck", (), {"length": 0, "max_length": 9, "append": KVCache.append})()
    with pytest.raises(AttributeError):
        decode(target, Scripted([0]), [3], 4)


def test_rollback_moves_nothing_but_the_length():  # B15
    cache = KVCache(layers=3, kv_heads=2, head_dim=16, max_length=9)
    k = torch.randn(2, 5, 16)
    cache.append(1, k, -k)
    cache.advance(5)
    cache.rollback(3)
    keys, values = cache.append(1, k[:, :1], k[:, 1:2])
    assert torch.equal(keys, torch.cat([k[:, :3], k[:, :1]], 1)) and torch.equal(values[:, :3], -k[:, :3])
    assert keys.shape == (2, 4, 16) and cache.keys[0].count_nonzero() == 0
    for illegal in (lambda: cache.rollback(4), lambda: cache.rollback(-1), lambda: cache.append(0, *[torch.zeros(2, 7, 16)] * 2)):
        with pytest.raises(ValueError):
            illegal()


# ---------------------------------------------------------------------------------------------------------------------
# Sampling: exact, by walking through every outcome


def outcomes(run, monkeypatch):
    """Call run() once for every sequence of outcomes that its calls of `draw` can have. Returns [(probability, result)].

    It is the real algorithm that runs. Only the dice are replaced: by a list of what they are to show.
    """
    results, paths = [], [[]]
    while paths:
        path, probability, shown = paths.pop(), 1.0, 0

        def draw(probs, generator):
            nonlocal probability, shown
            ids = []
            for row in probs.double():
                row = row / row.sum()
                if shown == len(path):
                    possible = row.nonzero().flatten().tolist()
                    paths.extend(path + [id] for id in possible[1:])
                    path.append(possible[0])
                probability *= row[path[shown]].item()
                ids.append(path[shown])
                shown += 1
            return torch.tensor(ids, dtype=torch.long)

        monkeypatch.setattr(speculative, "draw", draw)
        result = run()
        results.append((probability, result))
    assert abs(sum(probability for probability, _ in results) - 1) < 1e-6
    return results


def emission(p, q, drafted, monkeypatch, row=0):
    """The exact distribution of the token at place `row`, when drafted (or each draft that q may give) meets p and q."""
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
    kept = sum(prob for prob, n in outcomes(lambda: rejection(p, Q, speculative.draw(Q, None), None)[0], monkeypatch) if n)
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
    run = lambda: decode(target, DraftModel(draft, 9, 1.0, top_k=2), [0], 2, 1, temperature=1.0, top_k=2, generator=True)[0]
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
def test_the_distribution_of_the_text_is_exactly_the_targets(gamma, temperature, top_k, top_p, one_hot_draft, monkeypatch):
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


def test_p_equal_to_q(monkeypatch):  # B24
    p = torch.tensor([[1.0, 0.0, 0.0]]).expand(4, 3)
    n, token = rejection(p, p[:3], torch.tensor([0, 0, 0]), torch.Generator())
    assert (n.item(), token.item()) == (3, 0)
    rolled = iter([torch.tensor([0])])  # the coin that cannot fall this way does: nothing is left of p - q
    monkeypatch.setattr(speculative, "draw", lambda probs, _: next(rolled, probs))
    n, token = rejection(P.repeat(2, 1), P, torch.tensor([1]), None)
    assert n == 0 and torch.equal(token, P)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e6])
def test_extreme_temperatures(temperature):  # B26
    probs = warp(torch.tensor([[2.0, 1.0, -50.0]]), temperature, 0, 1.0)
    assert torch.isfinite(probs).all() and abs(probs.sum() - 1) < 1e-6


def test_warp_keeps_ties():
    tied = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    assert warp(tied, 1.0, 2, 1.0).tolist()[0] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert warp(tied, 1.0, 0, 0.1).tolist()[0] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert warp(tied, 1.0, 9, 1.0).sum() == pytest.approx(1)  # top_k beyond the vocabulary


def test_seeds():  # B26, B27
    model, before = qwen2(), torch.get_rng_state()

    def sample(seed, temperature):
        g = torch.Generator().manual_seed(seed)
        return decode(model, DraftModel(model, 99, temperature, generator=g), [5], 20, temperature=temperature, generator=g)[0]

    assert sample(1, 1.0) == sample(1, 1.0) != sample(2, 1.0)
    assert sample(1, 0.0) == sample(2, 0.0) == oracle(model, [5], 20)
    assert torch.equal(before, torch.get_rng_state())


# ---------------------------------------------------------------------------------------------------------------------
# Where a text ends


@pytest.mark.parametrize("draft, emitted", [([4, 5, 6, 7], [4, 5, 6]), ([6, 7], [4]), ([4, 5], [4, 5, 6]), ([4, 5, 6], [4, 5, 6])])
def test_eos_ends_the_text_wherever_it_stands(draft, emitted):  # B31
    target = chain()
    tokens, rounds = decode(target, Scripted(draft, [7]), [3], 20, 4, eos=[6])
    assert tokens == [4, 5, 6] and rounds[0].tokens == emitted
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
    model = lambda: Toy(lambda seen: one_hot((seen[-1] + 1) % 8, 8), context=16)
    assert decode(model(), DraftModel(chain(), 99), prompt, 100, gamma)[0] == [4, 5, 6, 7, 0, 1]
    assert decode(chain(), DraftModel(model(), 99), prompt, 20, gamma)[0] == oracle(chain(), prompt, 20)  # a shorter draft
    assert decode(model(), None, [3] * 16, 100, gamma)[0] == []
    target = model()
    with pytest.raises(ValueError, match="17"):
        decode(target, None, [3] * 17, 100, gamma)
    assert target.fed == []


@pytest.mark.parametrize("wrong", [{"gamma": -1}, {"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1},
                                   {"count": -1}, {"prompt": []}, {"temperature": 1.0}, {"temperature": math.nan}])  # fmt: skip
def test_arguments_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError):
        decode(chain(), None, **({"prompt": [3], "count": 4, "gamma": 0} | wrong))


@pytest.mark.parametrize("unknown", ["repetition_penalty", "stop"])
def test_what_is_not_supported_is_refused(unknown):  # B29, B35
    with pytest.raises(TypeError):
        decode(chain(), None, [3], 4, 0, **{unknown: 1.2})
    with pytest.raises(NotImplementedError, match="batch"):  # B78
        qwen2()(torch.zeros(2, 3, dtype=torch.long), None, 1)


# ---------------------------------------------------------------------------------------------------------------------
# Vocabularies of different widths


def test_a_narrower_draft(monkeypatch):  # B38
    target, draft = Toy(lambda seen: one_hot((seen[-1] + 1) % 6, 12)), Toy(lambda seen: one_hot((seen[-1] + 1) % 6, 8), vocab=8)
    tokens, rounds = decode(target, DraftModel(draft, 99, vocab=8), [0], 20)
    assert tokens == oracle(target, [0], 20) and rounds[0].accepted == 4
    p = torch.nn.functional.pad(P, (0, 9)).repeat(2, 1)
    torch.testing.assert_close(emission(p, Q, None, monkeypatch), p[0].double(), atol=1e-6, rtol=0)
    wide = Toy(lambda seen: one_hot(9, 12))
    tokens, rounds = decode(wide, DraftModel(draft, 99, vocab=8), [0], 6, 2)
    assert tokens == [9] * 6 and [round.drafted for round in rounds] == [2, 0, 0, 0, 0, 0]


def test_a_wider_draft():  # B38, the other way round
    target, draft = Toy(lambda seen: one_hot(3, 8), vocab=8), Toy(lambda seen: one_hot(11, 12))
    g = torch.Generator().manual_seed(0)
    for temperature in (0.0, 1.0):
        drafter = DraftModel(draft, 99, temperature, generator=g, vocab=8)
        assert max(decode(target, drafter, [0], 30, temperature=temperature, generator=g)[0]) < 8


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


def test_cached_rows_are_the_rows_of_one_pass():  # B56, B59
    model, ids = qwen2(), torch.arange(7)
    whole = model(ids, model.new_cache(9), 7)
    cache = model.new_cache(9)
    model(ids[:3], cache, 0)
    torch.testing.assert_close(model(ids[3:], cache, 4), whole[3:], atol=1e-5, rtol=0)
    cache.rollback(3)
    ids[5] = 100
    changed = model(ids[3:], cache, 4)  # the future is out of sight, and nothing else is
    torch.testing.assert_close(changed[:2], whole[3:5], atol=1e-5, rtol=0)
    assert (changed[2:] - whole[5:]).abs().amax(-1).min() > 1e-3


def test_a_long_prompt_in_pieces():
    model, ids = qwen2(), torch.arange(700) % 128
    model.config.max_position_embeddings = 1024
    cache = model.new_cache(700)
    for id in ids[:-2].split(1):
        model(id, cache, 0)
    torch.testing.assert_close(model(ids[-2:], cache, 2), model(ids, model.new_cache(700), 2), atol=1e-4, rtol=0)


def test_float16_attention_does_not_overflow():  # B58: 128 channels of 40 x 40 are 204,800, and float16 ends at 65,504
    c = Config(1, 128, 96, 1, 1, 128, 128, 64, 1e-6, 10000.0, True, True, [])
    ones = torch.ones(128, dtype=torch.float16)
    qkv = Linear(torch.full((384, 128), 40 / 128, dtype=torch.float16))
    zero = Linear(torch.zeros(192, 128, dtype=torch.float16)), Linear(torch.zeros(128, 96, dtype=torch.float16))
    layer = Layer(c, ones, qkv, Linear(torch.eye(128, dtype=torch.float16)), ones, *zero)
    cache, rope = KVCache(1, 1, 128, 4, torch.float16), (torch.ones(2, 128).half(), torch.zeros(2, 128).half())
    out = layer(torch.ones(2, 128).half(), 0, cache, rope, torch.ones(2, 2, dtype=torch.bool).tril())
    torch.testing.assert_close(out, torch.full((2, 128), 41.0).half(), atol=0.1, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_is_never_a_token(temperature):  # B58
    broken = Toy(lambda seen: [math.nan] * 8)
    with pytest.raises(FloatingPointError, match="NaN"):
        decode(broken, Scripted([1, 2]), [3], 4, 2, temperature=temperature, generator=torch.Generator())
