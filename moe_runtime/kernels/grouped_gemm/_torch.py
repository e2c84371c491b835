"""The grouped products through `torch.nn.functional.grouped_mm`, which takes `ends` on the device and does not wait.

It leaves rows past the last end unwritten, and refuses stride-0 operands and row strides that are not whole multiples
of 16 bytes; the first is mended here, the second made contiguous, the third refused.
"""

# R routed rows   D in features   F out features   E local experts

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from moe_runtime.kernels.grouped_gemm._operands import ALIGNMENT_BYTES, dense
from moe_runtime.kernels.select import Problem, triton_missing

if triton_missing() is None:
    from moe_runtime.kernels.grouped_gemm import _triton_tail

    _zero_tail_on_gpu = _triton_tail.zero_tail
else:
    _zero_tail_on_gpu = None

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refuses(problem: Problem) -> str | None:
    """Why grouped_mm cannot multiply these operands, or None."""
    a, b = problem.tensors
    if a.dtype not in _DTYPES:
        return f"grouped_mm takes float32, bfloat16 or float16, got {a.dtype}"
    if a.device.type == "cuda" and a.dtype != torch.bfloat16:
        return f"grouped_mm on CUDA takes bfloat16, got {a.dtype}"
    for columns in (a.shape[-1], b.shape[-1]):
        if columns * a.element_size() % ALIGNMENT_BYTES:
            return f"rows must be whole multiples of 16 bytes, got {columns} columns of {a.dtype}"
    return None


def ragged_m_gemm_nt(x_RD: Tensor, w_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """y[r] = x[r] @ w[e(r)].T"""
    return _zero_tail(grouped_mm(dense(x_RD), dense(w_EFD).transpose(1, 2), offs=ends_E), ends_E)


def ragged_m_gemm_nn(dy_RF: Tensor, w_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """dx[r] = dy[r] @ w[e(r)]"""
    return _zero_tail(grouped_mm(dense(dy_RF), dense(w_EFD), offs=ends_E), ends_E)


def ragged_k_gemm_tn(dy_RF: Tensor, x_RD: Tensor, ends_E: Tensor) -> Tensor:
    """dw[e] = dy[rows of e].T @ x[rows of e]"""
    return grouped_mm(dense(dy_RF).T, dense(x_RD), offs=ends_E)


def _zero_tail(y_RF: Tensor, ends_E: Tensor) -> Tensor:
    if not ends_E.shape[0]:
        return y_RF.zero_()
    if y_RF.device.type == "cpu":
        y_RF[int(ends_E[-1]) :].zero_()
        return y_RF
    on_gpu = y_RF.device.type == "cuda"
    if on_gpu and _zero_tail_on_gpu is not None and y_RF.device.index == torch.cuda.current_device():
        return _zero_tail_on_gpu(y_RF, ends_E)
    # Selecting, not multiplying: what stands in an unwritten row may be NaN. No host wait.
    past_R = torch.arange(y_RF.shape[0], device=y_RF.device) >= ends_E[-1]
    return y_RF.masked_fill_(past_R[:, None], 0)
