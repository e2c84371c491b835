"""The k best of each row, with one answer on every device; their values carry a gradient, their ids do not."""

# T tokens   E experts   K top-k

from typing import NamedTuple

from torch import Tensor

from moe_runtime.kernels.topk import topk_ids


class TopK(NamedTuple):
    """Values (T, K) of the scores' dtype, the largest first, and their ids (T, K) int64."""

    values_TK: Tensor
    ids_TK: Tensor


def topk(scores_TE: Tensor, k: int) -> TopK:
    """values = scores[ids], where ids are those of the k largest scores; of equal ones the lowest ids, in order."""
    ids_TK = topk_ids(scores_TE.detach(), k)
    return TopK(scores_TE.gather(1, ids_TK), ids_TK)
