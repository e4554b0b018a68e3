"""Drafting without a draft model: what followed the last few tokens when they were there before?

An answer often repeats its question: code that is edited, a text that is summarised or quoted. There the tokens that
followed the same n-gram earlier on are a guess that costs nothing, and long ones pay, so give it a large gamma. In a
poem it finds little and loses little: an empty draft is a plain step. Saxena 2023, "Prompt Lookup Decoding"
(github.com/apoorvumang/prompt-lookup-decoding); as n-gram assisted decoding Yang et al. 2023, arXiv 2304.04487.

    speculative_decode(target, PromptLookup(), prompt, 200, gamma=8)
    speculative_decode(target, Hybrid(PromptLookup(), DraftModel(draft, 500)), prompt, 200, gamma=8)
"""


class PromptLookup:
    """The drafter that copies from the text so far. longest, shortest: of the n-grams that it looks for, in tokens.

    A longer one is surer; a single token would be found nearly everywhere, and the guess would mostly be wrong.
    """

    def __init__(self, longest=3, shortest=2):
        self.longest, self.shortest, self.seen = longest, shortest, None

    def propose(self, tokens, gamma):
        """Up to gamma ids that followed the latest place like this one. Nothing was drawn, so q is None."""
        if tokens is not self.seen:  # another list is another text
            self.seen, self.known, self.after = tokens, 0, {}
        # after[n-gram]: where what follows it begins. Not for the end of the text, which nothing has followed yet.
        for end in range(self.known, len(tokens)):
            for n in range(self.shortest, min(self.longest, end) + 1):
                self.after[tuple(tokens[end - n : end])] = end
        self.known = len(tokens)
        for n in range(self.longest, self.shortest - 1, -1):
            start = self.after.get(tuple(tokens[-n:])) if n <= len(tokens) else None
            if start is not None:
                return tokens[start : start + gamma], None
        return [], None


class Hybrid:
    """Ask one drafter, and another one where the first has no idea. most: how many tokens to ask of the second.

    A draft model's tokens have a price, and the later ones are seldom kept: gamma is for the first, `most` for it.
    """

    def __init__(self, first, second, most=4):
        self.first, self.second, self.most, self.seen = first, second, most, None

    def propose(self, tokens, gamma):
        drafted, q = self.first.propose(tokens, gamma)
        # Ask the second for nothing, too: it must hear of each round, to forget the drafts that the target refused. But
        # in the first let it draft in any case, and so read the prompt while the target does.
        fresh, self.seen = tokens is not self.seen, tokens
        other = self.second.propose(tokens, 0 if len(drafted) and not fresh else min(gamma, self.most))
        return (drafted, q) if len(drafted) else other
