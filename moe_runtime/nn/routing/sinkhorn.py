"""Balanced selection: the K largest of an assignment whose rows and columns were made to have equal sums.

    A[t, e] = exp(z[t, e]) r[t] c[e]      sum over e of A = 1/T for each token, sum over t of A = 1/E for each expert

Sinkhorn's iteration (BASE layers, arXiv:2103.16716, solve the same problem exactly; S-BASE, arXiv:2202.01169, by this
iteration). In logarithms, so that no exponential overflows, and a fixed number of times, so that nothing waits for the
device and recomputation ends where the forward did.
"""

# T tokens   E experts

import torch
from torch import Tensor


@torch.no_grad()
def sinkhorn(logits_TE: Tensor, iterations: int, keep_T: Tensor | None = None) -> Tensor:
    """log A (T, E) up to a constant of each row; rows where `keep_T` is False take no part in the columns' sums."""
    if not logits_TE.shape[0]:
        return logits_TE
    column_E = logits_TE.new_zeros(logits_TE.shape[1])
    for _ in range(iterations):
        row_T = -(logits_TE + column_E).logsumexp(1)
        if keep_T is not None:
            row_T = row_T.masked_fill(~keep_T, -torch.inf)
        column_E = -(logits_TE + row_T[:, None]).logsumexp(0)
        # Of the mean only: A does not change when rows gain what columns lose.
        column_E = column_E - column_E.mean()
    return logits_TE + column_E
