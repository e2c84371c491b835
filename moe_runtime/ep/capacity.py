"""A bound on the rows of each expert: which slots are dropped, and rows padded to the bound.

    capacity C = max(minimum, ceil(factor * T * K / E))     of each expert, for the T tokens of this rank

With padding every expert gets exactly C rows, so shapes and splits follow from the number of tokens alone. Rows without
a token are zeros, and nothing reads what becomes of them.
"""

# T tokens   K top-k   S slots (= T * K)   C capacity   R padded rows (= E * C)   E experts

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from moe_runtime.kernels.permute import Route, element_offset, route

DropPolicy = Literal["position", "probability"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """How many rows an expert takes, and which are dropped above that (GShard, arXiv:2006.16668).

    factor   multiplies the rows that each expert would get in balance
    minimum  the least capacity, however few tokens there are
    drop     "position": each expert keeps its earliest tokens; "probability": those of the largest routing weight, the
             earlier of equal ones
    pad      every expert gets exactly its capacity of rows
    """

    factor: float
    minimum: int = 0
    drop: DropPolicy = "probability"
    pad: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.factor < float("inf"):
            raise ValueError(f"factor of the capacity must be finite and above 0, got {self.factor}")
        if self.minimum < 0:
            raise ValueError(f"minimum of the capacity must be at least 0, got {self.minimum}")
        if self.drop not in get_args(DropPolicy):
            raise ValueError(f"drop must be one of {', '.join(map(repr, get_args(DropPolicy)))}; got {self.drop!r}")

    def rows(self, num_tokens: int, top_k: int, num_experts: int) -> int:
        """C for that many tokens. Exact: 1.1 times 10 rows are 11."""
        share = Fraction(num_tokens * top_k, num_experts) * Fraction(self.factor).limit_denominator(10**6)
        return max(self.minimum, math.ceil(share))


class PaddedRoute(NamedTuple):
    """A Route in which every expert owns C rows.

    With ids [[1], [1]], 2 experts and C = 3: slot_R = [-1, -1, -1, 0, 1, -1], row_TK = [[3], [4]], ends_E = [3, 6].
    """

    slot_R: Tensor  # [R] int32: the slot of each row, -1 for a row without a token
    row_TK: Tensor  # [T, K] int32: the inverse; -1 for a dropped slot
    ends_E: Tensor  # [E] int32: C, 2 C, ...


def route_within(ids_TK: Tensor, gates_TK: Tensor, num_experts: int, capacity: Capacity | None) -> Route | PaddedRoute:
    """The route of `ids_TK` after `capacity` dropped and padded; with None, all of it."""
    if capacity is None:
        return route(ids_TK, num_experts)
    limit = capacity.rows(ids_TK.shape[0], ids_TK.shape[1], num_experts)
    ids_TK = drop_over_capacity(ids_TK, gates_TK, num_experts, limit=limit, policy=capacity.drop)
    return pad_to_capacity(ids_TK, num_experts, limit) if capacity.pad else route(ids_TK, num_experts)


@torch.no_grad()
def drop_over_capacity(ids_TK: Tensor, gates_TK: Tensor, num_experts: int, *, limit: int, policy: DropPolicy) -> Tensor:
    """ids with -1 for every slot above the `limit` rows of its expert. No host wait."""
    if policy == "position":
        return ids_TK.masked_fill(_rank(ids_TK, num_experts) >= limit, -1)
    order_S = gates_TK.reshape(-1).sort(descending=True, stable=True).indices
    sorted_S1 = ids_TK.reshape(-1)[order_S, None]
    over_S = torch.empty_like(order_S, dtype=torch.bool)
    over_S[order_S] = _rank(sorted_S1, num_experts)[:, 0] >= limit
    return ids_TK.masked_fill(over_S.view(ids_TK.shape), -1)


@torch.no_grad()
def pad_to_capacity(ids_TK: Tensor, num_experts: int, capacity: int) -> PaddedRoute:
    """C rows for each expert, its tokens first and in order; slots past C are dropped."""
    num_rows = num_experts * capacity
    if num_rows >= 2**31:
        raise ValueError(f"experts x capacity must stay below 2^31 rows, got {num_experts} x {capacity}")
    rank_TK = _rank(ids_TK, num_experts)
    dropped_TK = (rank_TK < 0) | (rank_TK >= capacity)
    row_TK = element_offset(ids_TK, rank_TK, width=capacity)
    # One row past the last takes the dropped slots; it is cut off.
    target_S = row_TK.masked_fill(dropped_TK, num_rows).reshape(-1)
    slot_S = torch.arange(ids_TK.numel(), dtype=torch.int32, device=ids_TK.device)
    slot_R = slot_S.new_full((num_rows + 1,), -1).scatter_(0, target_S, slot_S)[:num_rows]
    ends_E = torch.arange(1, num_experts + 1, dtype=torch.int32, device=ids_TK.device) * capacity
    return PaddedRoute(slot_R, row_TK.masked_fill(dropped_TK, -1).to(torch.int32), ends_E)


def _rank(ids_TK: Tensor, num_experts: int) -> Tensor:
    """How many earlier slots chose the same expert, int32 (T, K); -1 for a dropped slot."""
    routed = route(ids_TK, num_experts)
    start_E = torch.nn.functional.pad(routed.ends_E[:-1], (1, 0))
    rank_TK = routed.row_TK - start_E[ids_TK.clamp(0, num_experts - 1).long()]
    return rank_TK.masked_fill(routed.row_TK < 0, -1)
