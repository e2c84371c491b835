"""The sum over choices in moe_runtime._C (csrc/cpu/combine.cpp), and its shape for tracing."""

# T tokens   K top-k   R routed rows   D model width

import torch
from torch import Tensor

from moe_runtime.kernels.select import native_status

DTYPES = (torch.float32, torch.bfloat16)


def gather_sum(y_RD: Tensor, row_TK: Tensor) -> Tensor:
    """One pass over the rows of each token; ValueError for a row past the last."""
    return torch.ops.moe_runtime.gather_sum.default(y_RD, row_TK)


if native_status().available:

    @torch.library.register_fake("moe_runtime::gather_sum")
    def _(y_RD: Tensor, row_TK: Tensor) -> Tensor:
        return y_RD.new_empty(row_TK.shape[0], y_RD.shape[1])
