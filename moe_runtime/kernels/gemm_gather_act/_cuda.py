"""The up-projection with SwiGLU in its epilogue by hopper.cu: bfloat16. Never waits for the GPU.

The halves of h are concatenated.
"""

# T tokens   R routed rows   D model width   F expert width   H = 2 F   E experts

import torch
from torch import Tensor

from moe_runtime.kernels.grouped_gemm._cuda_engine import (
    GROUP,
    TILE_K,
    TILE_M,
    TILE_N,
    Args,
    Gather,
    Mode,
    Variant,
    address,
    launch,
    tensor_map,
)
from moe_runtime.kernels.grouped_gemm._triton_tiles import dense, row_tiles
from moe_runtime.kernels.tiles import num_blocks


def gemm_gather_act(
    x_TD: Tensor,
    w_EHD: Tensor,
    ends_E: Tensor,
    gate_R: Tensor | None,
    row_index_R: Tensor | None,
    layout: str,
    *,
    group: int = GROUP,
) -> tuple[Tensor, Tensor]:
    """h = x[index] @ w.T, a = gate * swiglu(h)"""
    assert layout == "concatenated", "the table refuses others"
    num_rows = (x_TD if row_index_R is None else row_index_R).shape[0]
    (num_experts, _, depth), width = w_EHD.shape, w_EHD.shape[1] // 2
    h_RH = torch.empty(num_rows, 2 * width, dtype=x_TD.dtype, device=x_TD.device)
    a_RF = torch.empty(num_rows, width, dtype=x_TD.dtype, device=x_TD.device)
    if not h_RH.numel():
        return h_RH, a_RF
    if not num_experts or not depth:
        return h_RH.zero_(), a_RF.zero_()
    x_TD, w_EHD = dense(x_TD), dense(w_EHD)
    gate_R = None if gate_R is None else gate_R.float().contiguous()
    row_index_R = None if row_index_R is None else row_index_R.contiguous()
    table_3N = row_tiles(ends_E.contiguous(), num_rows, TILE_M)
    num_m, num_c = table_3N.shape[1], num_blocks(width, TILE_N // 2)
    launch(
        Variant(mode=Mode.ACT, b_mn=False, gather=Gather.NONE if row_index_R is None else Gather.A),
        tensor_map(x_TD, (num_rows, depth), (TILE_M, TILE_K)) if row_index_R is None else None,
        tensor_map(w_EHD, (2 * num_experts, width, depth), (1, TILE_N // 2, TILE_K)),
        Args(
            table=address(table_3N),
            index=address(row_index_R),
            rows_of=address(x_TD),
            out=address(h_RH),
            act=address(a_RF),
            gate=address(gate_R),
            num_m=num_m,
            num_c=num_c,
            num_tiles=num_m * num_c,
            experts=num_experts,
            rows=num_rows,
            width=width,
            depth=depth,
            group=group,
        ),
    )
    return h_RH, a_RF
