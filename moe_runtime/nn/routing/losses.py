"""Auxiliary losses of one layer, as parts that add up: over microbatches, and over ranks.

    balance   L = E * sum_e f_e P_e     f_e  share of the routed slots that chose expert e; a count, no gradient
                                        P_e  mean probability of expert e over the tokens
    z         L = mean of logsumexp(z[t])^2

L is 1 for balanced counts. The kinds differ in where f_e is counted: in this microbatch ("batch"), in each sequence
("sequence", the mean over sequences), or in all of the step so far ("global_batch").

Each loss is divided by the tokens (or sequences) of the global batch, never by those of this call. So M microbatches on
N ranks give 1/(M N) of the gradient each, and their sum is that of one large batch. Where gradients of replicas are
averaged, the whole objective is multiplied by their number first, as for the loss over tokens.
"""

# T tokens of this call   S sequences of this call   E experts   K top-k

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_runtime.nn.balance import expert_counts
from moe_runtime.nn.routing.config import LossKind, RouterConfig
from moe_runtime.nn.routing.scores import probabilities_of


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchScope:
    """What one call of a layer is a part of. By default: of nothing larger.

    num_tokens        tokens that are no padding in the global batch, over all ranks and microbatches
    num_sequences     sequences of the global batch; one that is split over ranks counts once
    context_group     ranks that hold other parts of the same sequences; "batch" and "sequence" count over them
    data_group        all ranks of the global batch; "global_batch" counts over them
    earlier_counts_E  int64 counts over `data_group` of this step's earlier microbatches, for "global_batch"
    """

    num_tokens: int | None = None
    num_sequences: int | None = None
    context_group: dist.ProcessGroup | None = None
    data_group: dist.ProcessGroup | None = None
    earlier_counts_E: Tensor | None = None

    def __post_init__(self) -> None:
        larger = (self.context_group, self.data_group, self.earlier_counts_E)
        if self.num_tokens is None and any(part is not None for part in larger):
            raise ValueError("num_tokens of the global batch must be given with a group or with earlier counts")
        for name in ("num_tokens", "num_sequences"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


class RouterLosses(NamedTuple):
    """This call's parts of the auxiliary losses, fp32 scalars; None for a kind that is not configured.

    A tuple, not a dataclass: wrappers such as FSDP2 look for tensors in a module's output, and look into tuples.
    """

    total: Tensor  # sum of coefficient * loss: what is added to the training loss
    batch: Tensor | None = None
    sequence: Tensor | None = None
    global_batch: Tensor | None = None
    z: Tensor | None = None


def router_losses(
    config: RouterConfig,
    logits_TE: Tensor,
    ids_TK: Tensor,
    *,
    scope: BatchScope,
    num_sequences: int | None = None,
) -> RouterLosses:
    """The losses of `config.aux_losses` for one call.

    ids_TK         what the router chose, before a capacity drops anything; a token with ids of -1 is padding
    num_sequences  equal sequences that the T tokens of this call are, one after the other; the "sequence" loss needs it
    """
    is_token_T = ids_TK[:, 0] >= 0
    # Padding may hold anything; selected away, as 0 * NaN is NaN.
    logits_TE = logits_TE.masked_fill(~is_token_T[:, None], 0)
    parts: dict[LossKind, Tensor] = {}
    total = logits_TE.new_zeros(())
    for loss in config.aux_losses:
        if loss.kind == "z":
            part = _z_loss(logits_TE, is_token_T, scope)
        elif loss.kind == "sequence":
            part = _sequence_loss(config, logits_TE, ids_TK, scope, num_sequences)
        else:
            part = _batch_loss(config, logits_TE, ids_TK, scope, over_step=loss.kind == "global_batch")
        parts[loss.kind] = part.float()
        total = total + loss.coefficient * part
    return RouterLosses(total.float(), **parts)


def _batch_loss(
    config: RouterConfig, logits_TE: Tensor, ids_TK: Tensor, scope: BatchScope, *, over_step: bool
) -> Tensor:
    is_token_T = ids_TK[:, 0] >= 0
    probability_TE = probabilities_of(logits_TE, config.score).masked_fill(~is_token_T[:, None], 0)
    counts_E = expert_counts(ids_TK, config.num_experts)
    _sum_over(counts_E, scope.data_group if over_step else scope.context_group)
    if over_step and scope.earlier_counts_E is not None:
        counts_E = counts_E + scope.earlier_counts_E
    share_E = counts_E.double() / counts_E.sum().clamp(min=1)
    mean_E = probability_TE.sum(0) / _num_tokens(is_token_T, scope)
    return config.num_experts * (share_E.to(mean_E.dtype) * mean_E).sum()


def _sequence_loss(
    config: RouterConfig, logits_TE: Tensor, ids_TK: Tensor, scope: BatchScope, num_sequences: int | None
) -> Tensor:
    if num_sequences is None or num_sequences < 1 or len(ids_TK) % num_sequences:
        raise ValueError(
            f"the 'sequence' loss needs the number of sequences that the {len(ids_TK)} tokens are, of equal length; "
            f"got {num_sequences}"
        )
    length, num_experts = len(ids_TK) // num_sequences, config.num_experts
    is_token_T = ids_TK[:, 0] >= 0
    probability_TE = probabilities_of(logits_TE, config.score).masked_fill(~is_token_T[:, None], 0)
    first_T = torch.arange(num_sequences, device=ids_TK.device).repeat_interleave(length) * num_experts
    cells_TK = torch.where(ids_TK < 0, -1, ids_TK + first_T[:, None])
    counts_SE = expert_counts(cells_TK, num_sequences * num_experts).view(num_sequences, num_experts)
    _sum_over(counts_SE, scope.context_group)
    slots_S = counts_SE.sum(1).clamp(min=1)
    share_SE = counts_SE.double() / slots_S[:, None]
    tokens_S = (slots_S.double() / config.top_k).clamp(min=1)
    sums_SE = probability_TE.view(num_sequences, length, num_experts).sum(1)
    weight_SE = (share_SE / tokens_S[:, None]).to(sums_SE.dtype)
    return num_experts * (weight_SE * sums_SE).sum() / (scope.num_sequences or num_sequences)


def _z_loss(logits_TE: Tensor, is_token_T: Tensor, scope: BatchScope) -> Tensor:
    squares_T = logits_TE.logsumexp(-1).square().masked_fill(~is_token_T, 0)
    return squares_T.sum() / _num_tokens(is_token_T, scope)


def _num_tokens(is_token_T: Tensor, scope: BatchScope) -> int | Tensor:
    return is_token_T.sum().clamp(min=1) if scope.num_tokens is None else scope.num_tokens


def _sum_over(counts: Tensor, group: dist.ProcessGroup | None) -> None:
    """Counts over the group, in place. Their shape is the same in recomputation, so this may stand inside it."""
    if group is not None:
        dist.all_reduce(counts, group=group)
