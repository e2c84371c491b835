"""Quantization in Triton: launches. One read of x for both directions; a scale for the member reads x once before.

Nothing waits for the GPU, and a captured graph follows new values. The amax of a member is a maximum of bits, which
comes out the same in any order. Sizes of tiles are for bfloat16, where a thread loads eight adjacent columns.
"""

# Launching a compiled kernel takes options of its own.
# pyright: reportCallIssue=false

# E members   R rows   C columns

from typing import Any

import torch
from torch import Tensor

from moe_runtime.formats import E2M1, HADAMARD_SIGNS, MXFP4, MXFP8, NVFP4, Encoding, Float8, Format, FP8Block
from moe_runtime.kernels.quantize import _triton_kernels as kernels
from moe_runtime.kernels.quantize._reference import Stored
from moe_runtime.kernels.tiles import num_blocks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_ROWS = 8  # of a group: what a thread holds of one column
_GROUPS, _COLUMNS = 16, 64  # of a tile: 128 bytes of bfloat16 across, and of its fp8 bytes down
_STEP, _STEPS = 8192, 4  # of a program that looks for an amax
_ALIGNMENT_BYTES = 16
_SIGN_BITS = sum(1 << i for i, sign in enumerate(HADAMARD_SIGNS) if sign < 0)


def quantize_into(
    x_ERC: Tensor, fmt: Format, row: Stored | None, column: Stored | None, seed: int | None, amax_E: Tensor | None
) -> None:
    """Both directions from one read of x; a format with a scale for the member reads x once more, for its amax."""
    if not x_ERC.shape[0]:
        return
    x_ERC = x_ERC.contiguous()
    outputs = [_Output(row), _Output(column)]
    if isinstance(fmt, MXFP8 | MXFP4):
        _quantize_mx(x_ERC, fmt, *outputs)
    elif isinstance(fmt, FP8Block):
        _quantize_fp8_block(x_ERC, fmt, *outputs)
    elif isinstance(fmt, Float8):
        _quantize_float8(x_ERC, fmt, *outputs, amax_E)
    elif isinstance(fmt, NVFP4):
        _quantize_nvfp4(x_ERC, fmt, *outputs, seed, amax_E)
    else:
        raise TypeError(f"expected a quantized format, got {fmt!r}")
    for output in outputs:
        output.finish()


class _Output:
    """Where a direction is written: its tensors, but for a payload that stands at an odd address aligned memory."""

    def __init__(self, stored: Stored | None) -> None:
        self.payload, self.scale, self.tensor_scale = stored or (None, None, None)
        self._final = None
        if self.payload is not None and self.payload.data_ptr() % _ALIGNMENT_BYTES:
            self._final, self.payload = self.payload, torch.empty_like(self.payload)

    def words(self) -> Tensor | None:
        """The payload as int32."""
        return None if self.payload is None else self.payload.view(-1).view(torch.int32)

    def finish(self) -> None:
        if self._final is not None and self.payload is not None:
            self._final.copy_(self.payload)


def _num_tiles(x_ERC: Tensor, rows: int, columns: int) -> int:
    num_members, num_rows, num_columns = x_ERC.shape
    return num_members * max(num_blocks(num_rows, rows), 1) * max(num_blocks(num_columns, columns), 1)


def _element(encoding: Encoding) -> dict[str, Any]:
    return {"E5M2": encoding.name == "e5m2", "MAX": encoding.max}


def _quantize_mx(x_ERC: Tensor, fmt: MXFP8 | MXFP4, row: _Output, column: _Output) -> None:
    if not x_ERC.numel():
        return
    four_bits = fmt.encoding is E2M1
    kernels.mx_kernel[(_num_tiles(x_ERC, _ROWS * _GROUPS, _COLUMNS),)](
        x_ERC,
        row.words() if four_bits else row.payload,
        row.scale,
        column.payload,
        column.scale,
        *x_ERC.shape[1:],
        FOUR_BITS=four_bits,
        E5M2=fmt.encoding.name == "e5m2",
        RECIPROCAL=1 / fmt.encoding.max,
        H=_ROWS,
        G=_GROUPS,
        C=_COLUMNS,
        num_warps=4,
        enable_fp_fusion=False,
    )


def _quantize_fp8_block(x_ERC: Tensor, fmt: FP8Block, row: _Output, column: _Output) -> None:
    if not x_ERC.numel():
        return
    whole = fmt.two_dimensional or column.payload is not None
    groups = 128 // _ROWS if whole else 4
    kernel = kernels.fp8_tile_kernel if fmt.two_dimensional else kernels.fp8_block_kernel
    kernel[(_num_tiles(x_ERC, groups * _ROWS, 128),)](
        x_ERC,
        row.payload,
        row.scale,
        column.payload,
        column.scale,
        *x_ERC.shape[1:],
        **_element(fmt.encoding),
        POWER_OF_TWO=fmt.power_of_two,
        H=_ROWS,
        G=groups,
        num_warps=8 if whole else 4,
        enable_fp_fusion=False,
    )


def _quantize_float8(x_ERC: Tensor, fmt: Float8, row: _Output, column: _Output, amax_E: Tensor | None) -> None:
    kernels.float8_kernel[(_num_tiles(x_ERC, _ROWS * _GROUPS, _COLUMNS),)](
        x_ERC,
        row.payload,
        column.payload,
        column.scale if row.scale is None else row.scale,
        _finite_amax(x_ERC) if amax_E is None else amax_E,
        *x_ERC.shape[1:],
        **_element(fmt.encoding),
        POWER_OF_TWO=fmt.power_of_two,
        H=_ROWS,
        G=_GROUPS,
        C=_COLUMNS,
        num_warps=4,
        enable_fp_fusion=False,
    )


def _quantize_nvfp4(
    x_ERC: Tensor, fmt: NVFP4, row: _Output, column: _Output, seed: int | None, amax_E: Tensor | None
) -> None:
    rotated = fmt.random_hadamard and column.payload is not None
    if amax_E is None and (row.payload is not None or not rotated):
        amax_E = _finite_amax(x_ERC)
    rows = 16 if rotated else _ROWS
    tile: dict[str, Any] = {"H": rows, "G": _ROWS * _GROUPS // rows, "C": _COLUMNS}
    num_programs = _num_tiles(x_ERC, _ROWS * _GROUPS, _COLUMNS)
    options: dict[str, Any] = {**tile, "num_warps": 4, "enable_fp_fusion": False}
    to_row = (row.words(), row.scale, row.tensor_scale)
    to_column = (column.words(), column.scale, column.tensor_scale)
    if fmt.two_dimensional:
        kernels.nvfp4_tile_kernel[(num_programs,)](
            x_ERC, *to_row, *to_column, amax_E, *x_ERC.shape[1:], num_programs, **options
        )
        return
    kernels.nvfp4_kernel[(num_programs,)](
        x_ERC,
        *to_row,
        amax_E,
        *to_column,
        _rotated_amax(x_ERC) if rotated else amax_E,
        *x_ERC.shape[1:],
        0 if seed is None else seed,
        num_programs,
        STOCHASTIC=seed is not None,
        SIGNS=_SIGN_BITS if rotated else None,
        **options,
    )


def _finite_amax(x_ERC: Tensor) -> Tensor:
    """(E,) the largest magnitude of each member's finite elements, 0 where there are none."""
    amax_E = torch.zeros(x_ERC.shape[0], dtype=torch.float32, device=x_ERC.device)
    num_elements = x_ERC.shape[1] * x_ERC.shape[2]
    if num_elements:
        num_steps = num_blocks(num_elements, _STEP * _STEPS)
        kernels.amax_kernel[(x_ERC.shape[0] * num_steps,)](
            amax_E.view(torch.int32), x_ERC, num_elements, num_steps, S=_STEP, STEPS=_STEPS, num_warps=4
        )
    return amax_E


def _rotated_amax(x_ERC: Tensor) -> Tensor:
    """As `_finite_amax`, of each 16 adjacent rows rotated."""
    amax_E = torch.zeros(x_ERC.shape[0], dtype=torch.float32, device=x_ERC.device)
    if x_ERC.numel():
        groups = _ROWS * _GROUPS // 16
        kernels.rotated_amax_kernel[(_num_tiles(x_ERC, 16 * groups, _COLUMNS),)](
            amax_E.view(torch.int32),
            x_ERC,
            *x_ERC.shape[1:],
            SIGNS=_SIGN_BITS,
            G=groups,
            C=_COLUMNS,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return amax_E
