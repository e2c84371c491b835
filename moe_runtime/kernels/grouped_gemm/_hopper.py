"""Which problems the grouped GEMMs in Triton and in CUDA C++ take. Importable where triton is not."""

from collections.abc import Callable
from typing import Any

import torch

from moe_runtime.kernels.grouped_gemm import _cuda_engine
from moe_runtime.kernels.select import Backend, Problem, triton

DTYPES = (torch.bfloat16, torch.float16)

_ALIGNMENT_BYTES = 16
_MAX_ROWS = 2**30  # a ragged descriptor counts rows down from here
_MIN_CAPABILITY = (9, 0)  # the first with a copy engine for tiles

Widths = Callable[[Problem], tuple[int, ...]]


def on_triton(run: Any | None, widths: Widths) -> Backend:
    """The Triton backend for operands whose rows have these `widths` of columns."""
    base = triton(run, *DTYPES)

    def refuses(problem: Problem) -> str | None:
        reason = base.refuses(problem) or _refuses_sizes(problem, widths(problem))
        if reason is not None:
            return reason
        found = torch.cuda.get_device_capability(problem.tensors[0].device)
        return None if found >= _MIN_CAPABILITY else f"needs compute capability 9.0, got {found[0]}.{found[1]}"

    return Backend(base.name, refuses, run, base.device)


def on_cuda(run: Any | None, widths: Widths) -> Backend:
    """The backend of hopper.cu, for the same operands in bfloat16."""
    base = triton(run, torch.bfloat16)  # its tables of tiles are Triton's work

    def refuses(problem: Problem) -> str | None:
        if torch.compiler.is_compiling():
            return "cannot be traced"
        reason = base.refuses(problem) or _refuses_sizes(problem, widths(problem))
        return reason or _cuda_engine.missing(problem.tensors[0].device.index)

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
