"""What attention computes, in plain torch: the definition that the twins of the GPU's attention kernels share. Knows no cache."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scoring:
    """How queries weigh keys: softmax(cap(scale * q k)) over the window."""

    scale: float
    window: int = 0  # keys that a query sees, itself included; 0 = all before it
    cap: float = 0.0  # scores are squeezed into (-cap, cap) by tanh; 0 = not


@dataclass(frozen=True, slots=True)
class PromptWork:
    """Of the sequences with several tokens: where each one's queries and keys begin, were they laid one after another."""

    first_queries: Tensor  # [num_seqs + 1] int32
    first_keys: Tensor  # [num_seqs + 1] int32
    num_keys: int
    longest: int  # queries of a sequence (or more)
    longest_context: int


def attend(q: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
    """softmax(cap(scale * q k)) v for one sequence whose queries are its last tokens, in float32; without keys zeros.

    q [q_len, num_heads, head_dim] -> the same; keys and values [context_len, num_kv_heads, head_dim].
    """
    q_len, num_heads, _ = q.shape
    context_len, num_kv_heads, _ = keys.shape
    grouped = q.float().unflatten(1, (num_kv_heads, num_heads // num_kv_heads))  # heads that share a key head lie together
    scores = torch.einsum("qhgd,khd->hgqk", grouped, keys.float()) * scoring.scale
    if scoring.cap:
        scores = scoring.cap * torch.tanh(scores / scoring.cap)
    key = torch.arange(context_len, device=q.device)
    query = torch.arange(context_len - q_len, context_len, device=q.device)[:, None]
    is_hidden = key > query
    if scoring.window:
        is_hidden |= key <= query - scoring.window
    weights = scores.masked_fill_(is_hidden, float("-inf")).softmax(-1)
    return torch.einsum("hgqk,khd->qhgd", weights, values.float()).reshape(q.shape).to(q.dtype)
