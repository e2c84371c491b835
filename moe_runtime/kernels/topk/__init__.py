"""The k largest of each row with an order that no device may choose: descending, equal values by ascending id.

`torch.topk` promises nothing about equal values, and its CPU and CUDA answers differ. No autograd here.
"""

# T tokens   E experts   K top-k

from torch import Tensor

from moe_runtime.kernels.select import Problem, Table, reference
from moe_runtime.kernels.topk import _reference

__all__ = ["TABLE", "topk_ids"]

TABLE = Table("topk", (reference(_reference.topk_ids),))


def topk_ids(scores_TE: Tensor, k: int, *, backend: str | None = None) -> Tensor:
    """ids (T, k) int64 of the k largest scores of each row, the largest first; of equal ones the lowest id first.

    +0 and -0 are equal. NaN counts as larger than any number, so a score that is NaN is chosen, seen, and not hidden.
    """
    if scores_TE.dim() != 2 or not 1 <= k <= scores_TE.shape[1]:
        raise ValueError(f"expected scores (T, E) and k in [1, E], got {tuple(scores_TE.shape)} and {k}")
    return TABLE.choose(Problem((scores_TE,)), backend)(scores_TE, k)
