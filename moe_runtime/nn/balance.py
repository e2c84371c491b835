"""Load balancing: count how tokens chose experts, the auxiliary loss from global counts, the step of selection biases.

    L = E * sum_e f_e P_e      f_e  share of all routed slots that chose expert e, over every rank and the microbatches
                                    of this step so far; a count, no gradient
                               P_e  mean router probability of expert e over the global batch

Switch Transformer (arXiv:2101.03961, equations 4 to 6), summed over layers. With balanced counts L is 1 for each layer.
"""

# T tokens of this rank and microbatch   E experts   K top-k   L layers

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor


def expert_counts(ids_TK: Tensor, num_experts: int) -> Tensor:
    """int64 (E,): slots that chose each expert; negative ids count nowhere. No host wait."""
    # Slot 0 takes what is dropped; an id past the last expert is past the end, and scatter_add_ refuses it.
    slot = ids_TK.reshape(-1).clamp(min=-1).to(torch.int64) + 1
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=slot.device)
    # Integer additions commute, so scattering them is deterministic on every device.
    return counts.scatter_add_(0, slot, torch.ones_like(slot))[1:]


def load_balancing_loss(
    logits: Sequence[Tensor],
    counts_LE: Tensor,
    num_tokens: int,
    *,
    layers: Literal["separate", "concatenated"] = "separate",
) -> Tensor:
    """Sum over layers of E * sum_e f_e * (sum over local tokens of p_e) / num_tokens: this rank's part of L.

    logits      one (T, E) tensor a layer; probabilities are their softmax in fp32
    counts_LE   int64, summed over ranks
    num_tokens  tokens of the global batch; parts of all ranks and microbatches add up to L
    layers      "concatenated": one loss, of f and P over the tokens of all layers together, for parity with code that
                defines it so; layers that are each unbalanced may look balanced together. Hugging Face's
                `load_balancing_loss_func` is top_k times this
    """
    if len(logits) != len(counts_LE):
        raise ValueError(f"expected logits of {len(counts_LE)} layers, as many as counts, got {len(logits)}")
    if layers == "concatenated":
        num_tokens = num_tokens * len(logits)
        counts_LE, logits = counts_LE.sum(0, keepdim=True), [torch.cat([logits_TE.float() for logits_TE in logits])]
    elif layers != "separate":
        raise ValueError(f"layers must be 'separate' or 'concatenated', got {layers!r}")
    total = counts_LE.new_zeros((), dtype=torch.float32)
    for logits_TE, counts_E in zip(logits, counts_LE, strict=True):
        share_E = counts_E.double() / counts_E.sum().clamp(min=1)
        probability_E = logits_TE.float().softmax(-1).sum(0) / num_tokens
        total = total + counts_E.shape[0] * (share_E.float() * probability_E).sum()
    return total


class LoadMeter:
    """Counts of one optimizer step: collected each microbatch, summed over ranks."""

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        self._local_LE = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)

    def start_step(self) -> None:
        """Forget the counts of the last step."""
        self._local_LE.zero_()

    def add(self, ids: Sequence[Tensor]) -> None:
        """Add one microbatch: a (T, K) tensor of expert ids for each layer."""
        num_layers, num_experts = self._local_LE.shape
        if len(ids) != num_layers:
            raise ValueError(f"expected the expert ids of {num_layers} layers, got {len(ids)}")
        self._local_LE += torch.stack([expert_counts(ids_TK, num_experts) for ids_TK in ids])

    def add_counts(self, counts: Sequence[Tensor]) -> None:
        """Add one microbatch: int64 counts (E,) of each layer, as `MoELayer` returns them."""
        if [tuple(counts_E.shape) for counts_E in counts] != [self._local_LE.shape[1:]] * len(self._local_LE):
            raise ValueError(
                f"expected counts of {len(self._local_LE)} layers of shape {tuple(self._local_LE.shape[1:])}, "
                f"got {[tuple(counts_E.shape) for counts_E in counts]}"
            )
        self._local_LE += torch.stack(list(counts))

    def global_counts(self) -> Tensor:
        """int64 (L, E) over all ranks, of the microbatches so far. A collective: every rank calls it."""
        counts_LE = self._local_LE.clone()
        if dist.is_initialized():
            dist.all_reduce(counts_LE)
        return counts_LE


@torch.no_grad()
def step_selection_biases(biases: Sequence[Tensor], counts_LE: Tensor, rate: float) -> None:
    """bias[e] += rate * sign(mean(counts) - counts[e]) for each layer, from int64 counts over the global batch.

    Auxiliary-loss-free balancing (arXiv:2408.15664). Once per optimizer step.
    """
    if counts_LE.dtype != torch.int64 or len(biases) != len(counts_LE):
        raise ValueError(
            f"expected int64 counts of {len(biases)} layers, got {counts_LE.dtype} of shape {tuple(counts_LE.shape)}"
        )
    for bias_E, counts_E in zip(biases, counts_LE, strict=True):
        # mean - count has the sign of sum - E * count, which int64 holds exactly.
        bias_E += rate * (counts_E.sum() - counts_E * counts_E.shape[0]).sign().to(bias_E.dtype)
