"""Routing and gathering in torch ops: the ground truth, and what runs where no kernel does. Never waits for a GPU."""

# T tokens   K top-k   S slots (= T * K)   R routed rows (= S)   E experts   D model width

from typing import NamedTuple

import torch
from torch import Tensor


class Route(NamedTuple):
    """Where every slot's row stands once slots are sorted by expert.

    With ids [[1, 0], [1, -1]] and 2 experts: slot_R = [1, 0, 2, 3], row_TK = [[1, 0], [2, -1]], ends_E = [1, 3].
    """

    slot_R: Tensor  # [R] int32: the slot of routed row r; dropped slots last, in slot order
    row_TK: Tensor  # [T, K] int32: the inverse; -1 for a dropped slot
    ends_E: Tensor  # [E] int32: expert e owns rows ends[e-1] <= r < ends[e]; the rest were dropped


def route(ids_TK: Tensor, num_experts: int) -> Route:
    """The stable sort of slots by expert id."""
    if ids_TK.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_ids(ids_TK, num_experts)
    ids_S = ids_TK.reshape(-1)
    key_S = torch.where((ids_S < 0) | (ids_S >= num_experts), num_experts, ids_S)
    sorted_R, slot_R = torch.sort(key_S, stable=True)
    experts_E = torch.arange(num_experts, dtype=sorted_R.dtype, device=ids_S.device)
    ends_E = torch.searchsorted(sorted_R, experts_E, right=True, out_int32=True)
    rows_R = torch.arange(slot_R.shape[0], dtype=torch.int32, device=ids_S.device)
    row_S = torch.empty_like(rows_R).scatter_(0, slot_R, rows_R)
    row_TK = row_S.masked_fill_(key_S == num_experts, -1).view(ids_TK.shape)
    return Route(slot_R.to(torch.int32), row_TK, ends_E)


def _check_ids(ids_TK: Tensor, num_experts: int) -> None:
    bad_TK = ids_TK >= num_experts
    if bad_TK.any():
        t, k = bad_TK.nonzero()[0].tolist()
        raise ValueError(
            f"ids must lie in [-1, num_experts={num_experts}), got {int(ids_TK[t, k])} for token {t}, choice {k}"
        )


def gather_rows(x_TD: Tensor, slot_R: Tensor, ends_E: Tensor, top_k: int) -> Tensor:
    """y[r] = x[slot[r] // top_k] for r < ends[-1], else 0; selecting, not multiplying, as x may hold NaN."""
    token_R = torch.div(slot_R, top_k, rounding_mode="floor")
    past_R = torch.arange(slot_R.shape[0], device=slot_R.device) >= ends_E[-1]
    return x_TD.index_select(0, token_R).masked_fill_(past_R[:, None], 0)
