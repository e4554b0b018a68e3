"""The keys and values of every token so far, in one block that is allocated once and addressed by position.

Speculative decoding writes rows that it may have to take back. Here that costs nothing: `length` says how many rows
count, and a rejected row is simply overwritten by the next token that comes to stand at its position.

There is no batch axis, in the whole project: one text at a time is what a person waiting for an answer has, and what
speculative decoding is for.
"""

import torch


class KVCache:
    """Room for `max_length` tokens.

    keys, values: [layers, kv_heads, max_length, head_dim]
    length: how many positions are valid. Rows at and after it are leftovers that nobody may look at.
    """

    def __init__(self, layers, kv_heads, head_dim, max_length, dtype=torch.float32, device="cpu"):
        self.keys = torch.zeros(layers, kv_heads, max_length, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.max_length = max_length
        self.length = 0

    def append(self, layer, k, v):
        """Write the rows of T new tokens behind the valid ones, and return all of them up to there.

        k, v: [kv_heads, T, head_dim]. Returns two views [kv_heads, length + T, head_dim].
        `length` itself stays: every layer writes at the same positions, and `advance` moves on when all have.
        Raises ValueError, before anything is written, if there is no room.
        """
        end = self.length + k.shape[1]
        if end > self.max_length:
            raise ValueError(f"the cache holds {self.max_length} tokens and is asked for {end}: make it longer")
        self.keys[layer, :, self.length : end] = k
        self.values[layer, :, self.length : end] = v
        return self.keys[layer, :, :end], self.values[layer, :, :end]

    def advance(self, count):
        """Count the `count` rows as valid that every layer has just appended."""
        if not 0 <= count <= self.max_length - self.length:
            raise ValueError(f"cannot advance by {count}: {self.length} of {self.max_length} rows are in use")
        self.length += count

    def rollback(self, length):
        """Forget every token from position `length` on. Raises ValueError if there are not that many to begin with."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back to {length}: only {self.length} rows are valid")
        self.length = length
