"""Turn what users hold (rows per expert) into what kernels read (end row of each expert)."""

# E local experts

from collections.abc import Sequence

import torch
from torch import Tensor


def ends_from_splits(
    splits: Tensor | Sequence[int], *, num_experts: int, num_rows: int, device: torch.device
) -> Tensor:
    """ends_E = cumsum(splits_E), int32 on `device`.

    splits  int tensor (E,), on the rows' device (no host wait) or on the CPU, or a list of E ints: rows per expert.
    Raises ValueError for a wrong count, a negative split, or more rows than there are; values that live on a GPU are
    not read here.
    """
    splits_E = splits if isinstance(splits, Tensor) else torch.tensor(list(splits) or [0][:0])
    if splits_E.shape != (num_experts,):
        raise ValueError(f"splits must have shape ({num_experts},), rows per expert; got {tuple(splits_E.shape)}")
    if splits_E.numel() and (
        splits_E.dtype.is_floating_point or splits_E.dtype in (torch.bool, torch.complex64, torch.complex128)
    ):
        raise TypeError(f"splits must hold integers, got {splits_E.dtype}")
    if splits_E.device.type == "cpu":
        counts = splits_E.tolist()
        if any(count < 0 for count in counts) or sum(counts) > num_rows:
            raise ValueError(f"splits must be >= 0 and sum to at most the {num_rows} rows given, got {counts}")
    return splits_E.cumsum(0).to(device=device, dtype=torch.int32)
