"""The sum over choices in torch ops: the ground truth, and what runs where no kernel does. Never waits for a GPU."""

# T tokens   K top-k   R routed rows   D model width

import torch
from torch import Tensor


def gather_sum(y_RD: Tensor, row_TK: Tensor) -> Tensor:
    """out[t] = sum_k y[row[t, k]], one k after the other."""
    sum_dtype = torch.float64 if y_RD.dtype == torch.float64 else torch.float32
    out_TD = y_RD.new_zeros(row_TK.shape[0], y_RD.shape[1], dtype=sum_dtype)
    if not y_RD.shape[0]:
        return out_TD.to(y_RD.dtype)
    for row_T in row_TK.unbind(1):
        rows_TD = y_RD.index_select(0, row_T.clamp(min=0)).to(sum_dtype)
        out_TD += rows_TD.masked_fill_((row_T < 0)[:, None], 0)
    return out_TD.to(y_RD.dtype)
