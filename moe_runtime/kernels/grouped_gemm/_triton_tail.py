"""Zeros below the last expert's rows, in Triton: work in proportion to the tail, not to the tensor."""

# Triton compiles what is below, so its types are not Python's.
# pyright: reportArgumentType=false, reportIndexIssue=false

# R routed rows   F out features   E local experts

import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels.tiles import row_tile

_MAX_PROGRAMS = 1024  # a few for each multiprocessor, however long the tail turns out to be


def zero_tail(y_RF: Tensor, ends_E: Tensor) -> Tensor:
    """y[r] = 0 for r >= ends[-1], in place; returns y. The rows before are neither read nor written.

    y (R, F) on a GPU, columns one element apart; ends (E >= 1,) int32. Does not wait for the GPU.
    """
    num_rows, width = y_RF.shape
    if y_RF.stride(1) != 1 and width > 1:
        raise ValueError(f"y must have its columns one element apart, got strides {y_RF.stride()}")
    if y_RF.numel():
        _zero_tail_kernel[(min(num_rows, _MAX_PROGRAMS),)](
            y_RF,
            ends_E,
            num_rows,
            y_RF.stride(0),
            (ends_E.shape[0] - 1) * ends_E.stride(0),
            WIDTH=width,
            COLUMNS=row_tile(width, 1).columns,
        )
    return y_RF


@triton.jit(do_not_specialize=["num_rows", "last_end"])
def _zero_tail_kernel(y_ptr, ends_ptr, num_rows, row_stride, last_end, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Program p zeros rows ends[-1] + p, ends[-1] + p + programs, ..."""
    zero_C = tl.zeros((COLUMNS,), y_ptr.dtype.element_ty)
    row = tl.load(ends_ptr + last_end).to(tl.int64) + tl.program_id(0)
    while row < num_rows:
        for start in range(0, WIDTH, COLUMNS):
            column_C = start + tl.arange(0, COLUMNS)
            tl.store(y_ptr + row * row_stride + column_C, zero_C, mask=column_C < WIDTH)
        row += tl.num_programs(0)
