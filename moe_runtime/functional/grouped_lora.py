"""A low-rank update of a grouped linear layer, as two more grouped products. It is never made as a matrix.

    z[r]      = scale * dropout(x[r]) @ a[e(r)].T        (R, rank)
    update[r] = z[r] @ b[e(r)].T                         (R, F)

Saved for backward: x (or what dropout left of it) and z.
"""

# R routed rows   D in features   F out features   r rank   E local experts

from torch import Tensor
from torch.nn import functional as F

from moe_runtime.functional.grouped_linear import HeldAdapter, HeldWeight, grouped_linear


def add_lora_update(y_RF: Tensor, x_RD: Tensor, adapter: HeldAdapter, ends_E: Tensor) -> Tensor:
    """y[r] + update[r], shape (R, F).

    x_RD    what the layer multiplies, of the factors' dtype; rows from ends[-1] on are not read, and get no update
    ends_E  int32 cumulative rows per expert, on x's device
    An expert without rows gives its factors exactly zero gradients.
    """
    if adapter.dropout:
        x_RD = F.dropout(x_RD, adapter.dropout)
    # The narrow product is scaled, not the wide one.
    z_Rr = _multiply(x_RD, adapter.a, ends_E) * adapter.scale
    return y_RF + _multiply(z_Rr, adapter.b, ends_E)


def _multiply(rows: Tensor, factor: HeldWeight, ends_E: Tensor) -> Tensor:
    if factor.value.shape[0] == 1:
        # One factor for all experts: all their rows are those of one.
        ends_E = ends_E[-1:]
    return grouped_linear(rows, factor.value, ends_E, factor.slot, factor.recipe)
