"""The k largest of each row in torch ops: the ground truth on every device. Never waits for a GPU."""

# T tokens   E experts   K top-k

from torch import Tensor


def topk_ids(scores_TE: Tensor, k: int) -> Tensor:
    """The first k of a stable descending sort: equal scores keep their order, which is that of ids."""
    # Adding 0 makes +0 of -0, which a sort by bits would tell apart.
    return (scores_TE + 0.0).sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()
