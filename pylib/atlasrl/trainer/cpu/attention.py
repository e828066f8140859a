"""KV cache and attention for decoding many answers at once on a CPU.

transformers' DynamicCache copies all keys and values for every new token, and its attention repeats them once per query
head on top: for 64 answers of a 135 M parameter model that is some 2 GB of traffic per token. Here the room is
allocated once, and one new token per row attends to keys and values where they lie.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION = "atlasrl_decode"


def decode_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """One new token per row: grouped-query attention without repeating keys and values. Longer queries: SDPA.

    Args:
        query: [rows, heads, new tokens, width].
        key, value: [rows, key heads, tokens, width]; views into the cache are fine.
        attention_mask: additive, [rows, 1, new tokens, tokens].
    """
    rows, heads, new_tokens, width = query.shape
    if new_tokens > 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    key_heads = key.shape[1]
    grouped = query.view(rows, key_heads, heads // key_heads, width)
    scores = grouped @ key.transpose(-1, -2) * (scaling if scaling is not None else width**-0.5)
    weights = torch.softmax(scores + attention_mask, dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).view(rows, 1, heads, -1), None


AttentionInterface.register(ATTENTION, decode_attention)


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer: filled once by the prompts, then spread to rows with room for all new tokens."""

    def update(self, key_states, value_states, cache_kwargs=None):
        if not self.is_initialized:
            self.keys, self.values = key_states, value_states
            self.length, self.is_initialized = key_states.shape[-2], True
            return key_states, value_states
        end = self.length + key_states.shape[-2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def take(self, rows: torch.Tensor, room: int) -> None:
        """Keep `rows` (a row may occur several times), with room for `room` tokens in total."""
        self.keys = self._spread(self.keys, rows, room)
        self.values = self._spread(self.values, rows, room)

    def get_seq_length(self) -> int:
        return self.length if self.is_initialized else 0

    def _spread(self, old: torch.Tensor, rows: torch.Tensor, room: int) -> torch.Tensor:
        new = old.new_empty(len(rows), old.shape[1], room, old.shape[3])
        new[:, :, : self.length] = old[:, :, : self.length][rows]
        return new


class RoomyCache(Cache):
    """One `RoomyLayer` per layer of the model."""

    def __init__(self, layers: int):
        super().__init__(layers=[RoomyLayer() for _ in range(layers)])

    def take(self, rows: torch.Tensor, room: int) -> None:
        for layer in self.layers:
            layer.take(rows, room)
