"""From logits to the experts of each token: scores, the choice, the weights of the chosen.

scores     softmax(z)    or    sigmoid(z)    or    sqrt(softplus(z)) = sqrt(log(1 + e^z))
choice     the K largest of scores + bias, inside the best groups; equal ones by ascending id
weights    scores of the chosen (never with the bias), over their sum if asked, times a factor
"""

# T tokens   E experts   K top-k   G groups   M experts of a group

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_runtime.functional.topk import topk
from moe_runtime.nn.routing.config import RouterConfig, Score

# Sigmoids may all be 0, and 0 / 0 is no weight; below the rounding of any sum that is not.
_TINY = 1e-20
_FAR_BELOW = -40.0


def scores_of(logits_TE: Tensor, score: Score) -> Tensor:
    """Scores (T, E) of every expert for every token, in the dtype of the logits."""
    if score == "softmax":
        return logits_TE.softmax(-1)
    if score == "sigmoid":
        return logits_TE.sigmoid()
    # Where e^z is below rounding, log(1 + e^z) is e^z. Its root is taken in the exponent: the derivative of a root
    # at an underflowed 0 is infinite.
    is_far = logits_TE < _FAR_BELOW
    root_TE = F.softplus(torch.where(is_far, 0.0, logits_TE), threshold=-_FAR_BELOW).sqrt()
    return torch.where(is_far, (0.5 * torch.where(is_far, logits_TE, 0.0)).exp(), root_TE)


def probabilities_of(logits_TE: Tensor, score: Score) -> Tensor:
    """Scores that add up to 1 for each token: what the balancing losses call the router's probability."""
    scores_TE = scores_of(logits_TE, score)
    return scores_TE if score == "softmax" else scores_TE / (scores_TE.sum(-1, keepdim=True) + _TINY)


def choose(config: RouterConfig, logits_TE: Tensor, scores_TE: Tensor, bias_E: Tensor | None) -> Tensor:
    """ids (T, K) int64 by score, the bias added and groups kept; the best choice first. No gradient."""
    if config.num_groups == 1 and bias_E is None and config.softmax_over == "chosen":
        # Softmax keeps the order, but makes equals of what lies far below the largest.
        return topk(logits_TE.detach(), config.top_k).ids_TK
    biased_TE = scores_TE.detach() if bias_E is None else scores_TE.detach() + bias_E
    if config.topk_groups < config.num_groups:
        biased_TE = keep_best_groups(biased_TE, config.num_groups, config.topk_groups, config.group_score_topk)
    return topk(biased_TE, config.top_k).ids_TK


def keep_best_groups(scores_TE: Tensor, num_groups: int, topk_groups: int, group_score_topk: int) -> Tensor:
    """The scores with -inf for experts outside the token's best groups.

    Not 0: a biased score may be negative, and what was masked would win.
    """
    scores_TGM = scores_TE.unflatten(1, (num_groups, -1))
    best_TG = scores_TGM.sort(dim=-1, descending=True).values[..., :group_score_topk].sum(-1)
    kept_TG = torch.zeros_like(best_TG, dtype=torch.bool).scatter_(1, topk(best_TG, topk_groups).ids_TK, True)
    return scores_TGM.masked_fill(~kept_TG[..., None], -torch.inf).flatten(1)


def weigh(config: RouterConfig, logits_TE: Tensor, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Weights (T, K) of the chosen; a gradient flows back to the scores."""
    if config.softmax_over == "chosen":
        return logits_TE.gather(1, ids_TK).softmax(-1) * config.scaling_factor
    gates_TK = scores_TE.gather(1, ids_TK)
    if config.norm_topk_prob:
        gates_TK = gates_TK / (gates_TK.sum(-1, keepdim=True) + _TINY)
    return gates_TK * config.scaling_factor


def round_robin(num_tokens: int, top_k: int, num_experts: int, device: torch.device) -> Tensor:
    """ids[t, k] = (t * K + k) mod E: loads that differ by one at most, distinct experts for each token."""
    return (torch.arange(num_tokens * top_k, device=device) % num_experts).view(num_tokens, top_k)
