"""The down-projection's data gradient with SwiGLU's backward in its epilogue by hopper.cu: bfloat16.

The halves of h are concatenated. Each tile's part of dgate is stored beside the
others; their sum has a fixed order. Never waits for the GPU.
"""

# T tokens   R routed rows   D model width   F expert width   H = 2 F   E experts   N column tiles

import torch
from torch import Tensor

from moe_runtime.kernels.grouped_gemm._cuda_engine import (
    GROUP_OF_EXPERT,
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


def gemm_dact(
    dy_TD: Tensor,
    w_EDF: Tensor,
    saved: tuple[Tensor, Tensor | None, str],
    ends_E: Tensor,
    row_index_R: Tensor | None,
    activations: bool,
    *,
    group: int = GROUP_OF_EXPERT,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """da = dy[index] @ w; dh, dgate = swiglu_backward(da, h); a = gate * swiglu(h)"""
    h_RH, gate_R, layout = saved
    assert layout == "concatenated", "the table refuses others"
    num_rows = h_RH.shape[0]
    num_experts, depth, width = w_EDF.shape
    h_RH = dense(h_RH)
    dh_RH = torch.empty_like(h_RH)
    a_RF = h_RH.new_empty(num_rows, width) if activations else None
    if not h_RH.numel() or not num_experts or not depth:
        dgate_R = None if gate_R is None else h_RH.new_zeros(num_rows, dtype=torch.float32)
        return dh_RH.zero_(), None if a_RF is None else a_RF.zero_(), dgate_R
    dy_TD, w_EDF = dense(dy_TD), dense(w_EDF)
    row_index_R = None if row_index_R is None else row_index_R.contiguous()
    table_3N = row_tiles(ends_E.contiguous(), num_rows, TILE_M)
    num_m, num_c = table_3N.shape[1], num_blocks(width, TILE_N)
    dgate_NR = None
    if gate_R is not None:
        gate_R = gate_R.float().contiguous()
        dgate_NR = h_RH.new_empty(num_c, num_rows, dtype=torch.float32)
    launch(
        Variant(mode=Mode.DACT, b_mn=True, gather=Gather.NONE if row_index_R is None else Gather.A),
        tensor_map(dy_TD, (num_rows, depth), (TILE_M, TILE_K)) if row_index_R is None else None,
        tensor_map(w_EDF, (num_experts, depth, width), (1, TILE_K, 64)),
        Args(
            table=address(table_3N),
            index=address(row_index_R),
            rows_of=address(dy_TD),
            out=address(dh_RH),
            act=address(a_RF),
            gate=address(gate_R),
            dgate=address(dgate_NR),
            num_m=num_m,
            num_c=num_c,
            num_tiles=num_m * num_c,
            experts=num_experts,
            rows=num_rows,
            width=width,
            depth=depth,
            group=group,
        ),
        tensor_map(h_RH, tuple(h_RH.shape), (TILE_M, 64)),
    )
    if dgate_NR is None:
        return dh_RH, a_RF, None
    return dh_RH, a_RF, dgate_NR[0] if num_c == 1 else dgate_NR.sum(0)
