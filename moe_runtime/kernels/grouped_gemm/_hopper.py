"""Which problems the grouped GEMMs in Triton and in CUDA C++ take. Importable where triton is not."""

from collections.abc import Callable
from typing import Any

import torch

from moe_runtime.kernels.grouped_gemm import _cuda_engine
from moe_runtime.kernels.select import Backend, Problem, never_refuses, triton

DTYPES = (torch.bfloat16, torch.float16)

_ALIGNMENT_BYTES = 16
_MAX_ROWS = 2**30  # a ragged descriptor counts rows down from here
_MIN_CAPABILITY = (9, 0)  # the first with a copy engine for tiles
# From an H200: where torch's pairs of blocks, which share what they read of a weight, win by up to 1.16.
_LARGE_WEIGHT_BYTES, _FEW_ROWS = 32_000_000, 4096

_UNTRACEABLE = "describes operands to the copy engine on the host, which cannot be traced"

Widths = Callable[[Problem], tuple[int, ...]]


def on_triton(run: Any | None, widths: Widths) -> Backend:
    """The Triton backend for operands whose rows have these `widths` of columns."""
    base = triton(run, *DTYPES)

    def refuses(problem: Problem) -> str | None:
        if torch.compiler.is_compiling():
            return _UNTRACEABLE
        reason = base.refuses(problem) or _refuses_sizes(problem, widths(problem))
        if reason is not None:
            return reason
        found = torch.cuda.get_device_capability(problem.tensors[0].device)
        return None if found >= _MIN_CAPABILITY else f"needs compute capability 9.0, got {found[0]}.{found[1]}"

    return Backend(base.name, refuses, run, base.device)


def loses_to_torch(problem: Problem) -> str | None:
    """Why a product of rows with these weights is left to torch's grouped_mm, or None."""
    rows, weights = problem.tensors
    if weights.dim() != 3 or not weights.shape[0]:
        return None
    num_bytes = weights.shape[1] * weights.shape[2] * weights.element_size()
    num_rows = rows.shape[0] // weights.shape[0]
    if num_bytes < _LARGE_WEIGHT_BYTES or num_rows >= _FEW_ROWS:
        return None
    # Without the number of rows: it changes, and each text is logged once.
    return f"slower than grouped_mm for under {_FEW_ROWS} rows an expert and {num_bytes / 1e6:.0f} MB of its weight"


def on_cuda(run: Any | None, widths: Widths, loses: Callable[[Problem], str | None] = never_refuses) -> Backend:
    """The backend of hopper.cu, for the same operands in bfloat16, but where it loses."""
    base = triton(run, torch.bfloat16)  # its tables of tiles are Triton's work

    def refuses(problem: Problem) -> str | None:
        if torch.compiler.is_compiling():
            return _UNTRACEABLE
        if problem.layout != "concatenated":
            return f"takes concatenated halves, got {problem.layout} ones"
        reason = base.refuses(problem) or _refuses_sizes(problem, widths(problem))
        return reason or _cuda_engine.missing(problem.tensors[0].device.index) or loses(problem)

    return Backend("cuda", refuses, run, base.device)


def _refuses_sizes(problem: Problem, widths: tuple[int, ...]) -> str | None:
    rows = problem.tensors[0].shape[0]
    if rows > _MAX_ROWS:
        return f"takes at most 2^30 rows, got {rows}"
    itemsize = problem.tensors[0].element_size()
    for width in widths:
        if width * itemsize % _ALIGNMENT_BYTES:
            return f"rows must be whole multiples of 16 bytes, got {width} columns of {itemsize} bytes"
    return None
