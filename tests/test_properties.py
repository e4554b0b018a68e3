"""Whatever the model, the drafts, gamma, the EOS and the length: what holds of every text."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative import DraftModel, speculative_decode
from toys import Random, Toy, oracle
from variants.adaptive_gamma import AdaptiveDraft
from variants.block_verification import block_verification
from variants.prompt_lookup import Hybrid, PromptLookup

VOCAB = 5
seeds = st.integers(0, 10**6)


def model(seed, ties):
    """A Toy with a row of its own for each sum of the tokens in sight and each last token. With ties, few values."""
    g = torch.Generator().manual_seed(seed)
    shape = (11, VOCAB, VOCAB)
    rows = (torch.randint(3, shape, generator=g).float() if ties else torch.randn(shape, generator=g)).tolist()
    return Toy(lambda seen: rows[(sum(seen) + len(seen)) % 11][seen[-1]])


class Adversary:
    """Drafts the second choice of the target, and then its first."""

    def __init__(self, target):
        self.target = target

    def propose(self, tokens, gamma):
        cache = self.target.new_cache(len(tokens))
        second = self.target(torch.tensor(tokens), cache, 1)[0].topk(2).indices[1].item()
        return [second, *oracle(self.target, [*tokens, second], gamma - 1)], None


class Moody:
    """One drafter or another from round to round, and none in some."""

    def __init__(self, drafters, seed):
        self.drafters, self.generator = drafters, torch.Generator().manual_seed(seed)

    def propose(self, tokens, gamma):
        choice = torch.randint(len(self.drafters) + 1, (1,), generator=self.generator).item()
        return self.drafters[choice].propose(tokens, gamma) if choice < len(self.drafters) else ([], None)


def drafters(target, other, seed, **options):
    """One of every kind, fresh."""
    names = {
        "another model": DraftModel(other, 99, **options),
        "the target": DraftModel(target, 99, **options),
        "adaptive": AdaptiveDraft(other, 99, 0.2, [1 + 0.1 * i for i in range(10)], **options),
        "a short cache": DraftModel(other, 7, **options),
        "random": Random(VOCAB, seed),
        "lookup": PromptLookup(shortest=1),
        "hybrid": Hybrid(PromptLookup(), DraftModel(other, 99, **options)),
        "adversary": Adversary(target),
    }
    return names | {"moody": Moody([*names.values()], seed)}


names = st.sampled_from([*drafters(None, None, 0)])
ids, gammas = st.integers(0, VOCAB - 1), st.integers(0, 9)
prompts = st.lists(ids, min_size=1, max_size=6)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(seeds, st.booleans(), names, prompts, gammas, st.integers(0, 30), st.sets(ids, max_size=2))
def test_greedy_text_is_that_of_a_loop_without_a_cache(seed, ties, name, prompt, gamma, count, eos):
    target, other = model(seed, ties), model(seed + 1, ties)
    drafter = drafters(target, other, seed + 1)[name]
    target.caches.clear()
    expected, tokens = oracle(model(seed, ties), prompt, count), []
    end = next((i + 1 for i, id in enumerate(expected) if id in eos), count)
    for round in speculative_decode(target, drafter, prompt, count, gamma, eos=eos):
        tokens += round.tokens
        assert 0 <= round.accepted <= round.drafted <= gamma
        assert len(round.tokens) in (round.accepted, round.accepted + 1)  # an accepted EOS is the last
        assert target.caches[0].length == len(prompt) + len(tokens) - 1
    assert tokens == expected[:end]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seeds, names, prompts, gammas, st.integers(1, 30), st.floats(0.2, 3), st.integers(0, 4), st.floats(0.1, 1))
def test_sampled_text_is_possible_and_the_same_again(seed, name, prompt, gamma, count, temperature, top_k, top_p):
    before, texts = torch.random.get_rng_state(), []
    for _ in range(2):
        target, other, g = model(seed, False), model(seed + 1, False), torch.Generator().manual_seed(seed)
        how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "generator": g}
        drafter = drafters(target, other, seed + 1, **how)[name]
        rule = {"rule": block_verification} if seed % 2 else {}
        rounds = speculative_decode(target, drafter, prompt, count, gamma, **how, **rule)
        texts.append([id for round in rounds for id in round.tokens])
    assert texts[0] == texts[1] and len(texts[0]) == count
    assert torch.equal(before, torch.random.get_rng_state())
    if top_k == 1:
        assert texts[0] == oracle(model(seed, False), prompt, count)
