"""Rows laid out so that each expert's begin at a multiple: what a format needs whose blocks run along the rows.

    splits 44, 20   multiple 32   ->   padded 64, 32   first rows 0, 64, 96 = end

The contraction of wgrad runs over rows, so a block that straddled two experts would mix their scales. An expert without
rows gets none. Nothing waits for a GPU: there is room for the most that E experts can need.
"""

# R routed rows   P rows with padding   D columns   E local experts

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Where padded rows come from. `row_P` is R, one past the last row, for padding; `ends_E` are the padded ends."""

    row_P: Tensor
    ends_E: Tensor

    def gather(self, x_RD: Tensor) -> Tensor:
        """(P, D): the rows in their new places, padding 0. Rows past the last expert are not read."""
        num_rows = x_RD.shape[0]
        if not num_rows:
            return x_RD.new_zeros(self.row_P.shape[0], x_RD.shape[1])
        gathered_PD = x_RD.index_select(0, self.row_P.clamp(max=num_rows - 1))
        # Selected, not multiplied: a row that is not read may hold anything.
        return torch.where((self.row_P < num_rows)[:, None], gathered_PD, 0)


def padded_rows(ends_E: Tensor, num_rows: int, multiple: int) -> PaddedRows:
    """Each expert's rows moved to begin at, and padded to, a multiple of `multiple`.

    ends_E  int32 cumulative rows per expert
    """
    num_experts = ends_E.shape[0]
    starts_E = torch.nn.functional.pad(ends_E, (1, -1))
    splits_E = ends_E - starts_E
    padded_E = (splits_E + multiple - 1) // multiple * multiple
    padded_ends_E = padded_E.cumsum(0)
    most = num_rows + num_experts * (multiple - 1)
    place_P = torch.arange(-(-most // multiple) * multiple, device=ends_E.device)
    owner_P = torch.searchsorted(padded_ends_E, place_P, right=True).clamp(max=num_experts - 1)
    within_P = place_P - (padded_ends_E - padded_E)[owner_P]
    row_P = torch.where(within_P < splits_E[owner_P], starts_E[owner_P] + within_P, num_rows)
    return PaddedRows(row_P, padded_ends_E.to(torch.int32))
