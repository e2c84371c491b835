"""Every op's backend table, in one place: what a report about this machine goes through."""

import torch

from moe_runtime.kernels import (
    combine,
    dequantize,
    gemm_dact,
    gemm_dequant,
    gemm_gather_act,
    grouped_gemm,
    permute,
    quantize,
    swiglu,
    topk,
)
from moe_runtime.kernels.select import Selection

TABLES = (
    permute.ROUTE,
    permute.GATHER_ROWS,
    combine.TABLE,
    swiglu.TABLE,
    grouped_gemm.TABLE,
    gemm_gather_act.TABLE,
    gemm_dact.TABLE,
    gemm_dequant.TABLE,
    quantize.TABLE,
    dequantize.TABLE,
    topk.TABLE,
)


def describe(device: torch.device) -> list[Selection]:
    """(op, chosen backend, ["backend: reason", ...] for each one passed over) of every op on `device`."""
    return [table.describe(device) for table in TABLES]
