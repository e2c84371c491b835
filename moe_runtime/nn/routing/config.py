"""How tokens choose experts, and what balances the choice: frozen values; a routing that cannot train is refused."""

# E experts   K top-k

from dataclasses import dataclass
from typing import Literal, get_args

Score = Literal["softmax", "sigmoid", "sqrt_softplus"]
Selection = Literal["topk", "sinkhorn", "round_robin"]
LossKind = Literal["batch", "sequence", "global_batch", "z"]
RouterDtype = Literal["float32", "float64"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AuxLoss:
    """One auxiliary loss of a layer.

    kind         "batch": balance over the tokens of one microbatch (Switch Transformer, arXiv:2101.03961);
                 "sequence": over each sequence (DeepSeek-V3, arXiv:2412.19437 section 2.1.2); "global_batch": over the
                 whole step; "z": logits stay small (ST-MoE, arXiv:2202.08906)
    coefficient  multiplies the loss in `RouterLosses.total`
    """

    kind: LossKind
    coefficient: float

    def __post_init__(self) -> None:
        _check_name("kind of auxiliary loss", self.kind, get_args(LossKind))
        if not 0 <= self.coefficient < float("inf"):
            raise ValueError(f"coefficient must be finite and at least 0, got {self.coefficient}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """How tokens choose experts. Everything is computed in `dtype`, whatever the dtype of the tokens.

    score               "softmax" over experts, or an independent "sigmoid" or "sqrt_softplus" of each logit
    softmax_over        "all" experts before choosing, or the "chosen" ones after it
    norm_topk_prob      divide the chosen scores by their sum
    scaling_factor      multiplies the weights of the routed experts, after normalization
    expert_bias         add a per-expert bias to the scores for selection only (DeepSeek-V3)
    linear_bias         the product that makes logits has a trained bias (gpt-oss)
    num_groups          experts stand in that many groups in id order; a token chooses inside its best `topk_groups`
    group_score_topk    a group's score is the sum of that many of its best scores: 2 in DeepSeek-V3, 1 in DeepSeek-V2
    jitter              in training, logits are made of x times uniform noise in [1 - jitter, 1 + jitter]
    selection           "topk"; "sinkhorn": balanced over the tokens of a training forward; "round_robin": forced
                        balance for benchmarks, experts in turn whatever the scores
    sinkhorn_iterations how often the rows and columns of the assignment are normalized
    aux_losses          at most one of each kind; `Router.losses` and `MoELayer` compute them
    """

    num_experts: int
    hidden_size: int
    top_k: int
    score: Score = "softmax"
    softmax_over: Literal["all", "chosen"] = "all"
    norm_topk_prob: bool = False
    scaling_factor: float = 1.0
    expert_bias: bool = False
    linear_bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    group_score_topk: int = 2
    jitter: float = 0.0
    selection: Selection = "topk"
    sinkhorn_iterations: int = 20
    aux_losses: tuple[AuxLoss, ...] = ()
    dtype: RouterDtype = "float32"

    def __post_init__(self) -> None:
        for name in ("num_experts", "hidden_size", "sinkhorn_iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k must be in [1, num_experts={self.num_experts}], got {self.top_k}")
        _check_name("score", self.score, get_args(Score))
        _check_name("softmax_over", self.softmax_over, ("all", "chosen"))
        _check_name("selection", self.selection, get_args(Selection))
        _check_name("dtype", self.dtype, get_args(RouterDtype))
        if self.softmax_over == "chosen" and self.score != "softmax":
            raise ValueError(f"softmax_over='chosen' needs score='softmax', got {self.score!r}")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter must be in [0, 1), got {self.jitter}")
        kinds = [loss.kind for loss in self.aux_losses]
        if len(set(kinds)) != len(kinds):
            raise ValueError(f"aux_losses must hold at most one of each kind, got {', '.join(kinds)}")
        self._check_groups()
        self._check_selection()
        self._check_gradient()

    @property
    def weights_sum_to_one(self) -> bool:
        """Whether a token's weights add up to `scaling_factor`, which leaves a single choice no gradient."""
        return self.norm_topk_prob or self.softmax_over == "chosen"

    def _check_groups(self) -> None:
        if self.num_groups == 1 and self.topk_groups == 1:
            return
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(f"num_groups must divide num_experts={self.num_experts}, got {self.num_groups}")
        size = self.num_experts // self.num_groups
        if not 1 <= self.topk_groups <= self.num_groups:
            raise ValueError(f"topk_groups must be in [1, num_groups={self.num_groups}], got {self.topk_groups}")
        if self.topk_groups * size < self.top_k:
            raise ValueError(
                f"{self.topk_groups} groups of {size} experts must hold the top_k={self.top_k} that a token chooses"
            )
        if not 1 <= self.group_score_topk <= size:
            raise ValueError(
                f"group_score_topk must be in [1, {size}], the experts of a group, got {self.group_score_topk}"
            )

    def _check_selection(self) -> None:
        if self.selection == "topk":
            return
        balancing = [loss.kind for loss in self.aux_losses if loss.kind != "z"]
        unused = {
            "expert_bias": self.expert_bias,
            "num_groups": self.num_groups > 1,
            f"auxiliary loss {', '.join(map(repr, balancing))}": bool(balancing),
        }
        if found := [name for name, is_set in unused.items() if is_set]:
            raise ValueError(f"selection={self.selection!r} balances by itself and takes no {' or '.join(found)}")

    def _check_gradient(self) -> None:
        balancing = any(loss.kind != "z" and loss.coefficient > 0 for loss in self.aux_losses)
        if self.num_experts == 1 or self.top_k > 1 or not self.weights_sum_to_one or balancing:
            return
        if self.selection == "topk":
            raise ValueError(
                "top_k=1 with weights that are normalized over the chosen gives every token the weight 1 and the "
                "router no gradient: expected norm_topk_prob=False and softmax_over='all', a top_k of 2 or more, or a "
                f"balancing auxiliary loss, got top_k=1, norm_topk_prob={self.norm_topk_prob}, "
                f"softmax_over={self.softmax_over!r} and no such loss"
            )


def _check_name(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{what} must be one of {', '.join(map(repr, known))}; got {value!r}")
