"""The grouped products by hopper.cu: bfloat16, compute capability 9.0. Never waits for the GPU."""

# R routed rows   D in features   F out features   E experts   T tokens

import torch
from torch import Tensor

from moe_runtime.kernels.grouped_gemm._cuda_engine import (
    GROUP,
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
    ragged_map,
    tensor_map,
)
from moe_runtime.kernels.grouped_gemm._triton_tiles import ALIGNMENT_BYTES, dense, largest_first, row_tiles
from moe_runtime.kernels.tiles import num_blocks


def ragged_m_gemm_nt(x_RD: Tensor, w_EFD: Tensor, ends_E: Tensor, *, group: int = GROUP) -> Tensor:
    """y[r] = x[r] @ w[e(r)].T"""
    return _ragged_m(x_RD, w_EFD, ends_E, transposed=True, group=group)


def ragged_m_gemm_nn(dy_RF: Tensor, w_EFD: Tensor, ends_E: Tensor, *, group: int = GROUP) -> Tensor:
    """dx[r] = dy[r] @ w[e(r)]"""
    return _ragged_m(dy_RF, w_EFD, ends_E, transposed=False, group=group)


def _ragged_m(a_RK: Tensor, w: Tensor, ends_E: Tensor, *, transposed: bool, group: int) -> Tensor:
    num_rows, depth = a_RK.shape
    num_experts, width = w.shape[0], w.shape[1] if transposed else w.shape[2]
    y_RC = torch.empty(num_rows, width, dtype=a_RK.dtype, device=a_RK.device)
    if not y_RC.numel():
        return y_RC
    if not num_experts or not depth:
        return y_RC.zero_()
    a_RK, w = dense(a_RK), dense(w)
    table_3N = row_tiles(ends_E.contiguous(), num_rows, TILE_M)
    num_m, num_c = table_3N.shape[1], num_blocks(width, TILE_N)
    launch(
        Variant(mode=Mode.STORE, b_mn=not transposed),
        tensor_map(a_RK, (num_rows, depth), (TILE_M, TILE_K)),
        tensor_map(w, tuple(w.shape), (1, TILE_N // 2, TILE_K) if transposed else (1, TILE_K, 64)),
        Args(
            table=address(table_3N),
            out=address(y_RC),
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
    return y_RC


def ragged_k_gemm_tn(
    dy: Tensor,
    x: Tensor,
    ends_E: Tensor,
    *,
    dy_index_R: Tensor | None = None,
    x_index_R: Tensor | None = None,
    into_EFD: Tensor | None = None,
    accumulate: bool = False,
    group: int | None = None,
) -> Tensor:
    """dw[e] = dy[rows of e].T @ x[rows of e], rows of one of the two through an index where given"""
    num_experts, out, width = ends_E.shape[0], dy.shape[1], x.shape[1]
    index_R = dy_index_R if dy_index_R is not None else x_index_R
    num_rows = len(dy) if index_R is None else len(index_R)
    if into_EFD is not None and into_EFD.data_ptr() % ALIGNMENT_BYTES:
        # A view into a flat buffer, at an address that 16-byte stores cannot take.
        dw_EFD = torch.empty_like(into_EFD)
        ragged_k_gemm_tn(dy, x, ends_E, dy_index_R=dy_index_R, x_index_R=x_index_R, into_EFD=dw_EFD, group=group)
        return into_EFD.add_(dw_EFD) if accumulate else into_EFD.copy_(dw_EFD)
    dw_EFD = into_EFD
    if dw_EFD is None:
        dw_EFD = torch.empty(num_experts, out, width, dtype=x.dtype, device=x.device)
    if not dw_EFD.numel():
        return dw_EFD
    if not num_rows:
        return dw_EFD if accumulate else dw_EFD.zero_()
    dy, x, ends_E = dense(dy), dense(x), ends_E.contiguous()
    index_R = None if index_R is None else index_R.contiguous()
    order_E = largest_first(ends_E)
    num_m, num_c = num_blocks(out, TILE_M), num_blocks(width, TILE_N)
    gather = Gather.A if dy_index_R is not None else Gather.B if x_index_R is not None else Gather.NONE
    launch(
        Variant(
            mode=Mode.WGRAD,
            b_mn=True,
            gather=gather,
            out_f32=dw_EFD.dtype == torch.float32,
            accumulate=accumulate,
        ),
        None if gather == Gather.A else ragged_map(dy, (TILE_K, 64)),
        None if gather == Gather.B else ragged_map(x, (TILE_K, 64)),
        Args(
            ends=address(ends_E),
            order=address(order_E),
            index=address(index_R),
            rows_of=address(dy if gather == Gather.A else x),
            out=address(dw_EFD),
            num_m=num_m,
            num_c=num_c,
            num_tiles=num_experts * num_m * num_c,
            experts=num_experts,
            rows=num_rows,
            width=width,
            height=out,
            group=group or (GROUP_OF_EXPERT if gather == Gather.NONE else GROUP),
        ),
    )
    return dw_EFD
