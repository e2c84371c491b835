"""One optimizer step: forward and backward of every microbatch, one reduction, one clip, one update.

The loss is the sum over tokens to learn divided by their number in the global batch. Replicas' gradients are averaged
by DDP and FSDP2, so each rank's part is multiplied by their number first; nothing then depends on how many ranks there
are.
"""

# B sequences of a microbatch on this rank   S tokens of a sequence   T = B S   V vocabulary   L MoE layers   E experts

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from moe_runtime.integrations.transformers import selection_biases
from moe_runtime.nn import LoadMeter, load_balancing_loss, step_selection_biases
from moe_runtime.optim import clip_grad_norm_
from moe_runtime.parallel import coordinator_of, gradient_sync
from moe_runtime.precision import autocast
from moe_runtime.train.config import Config
from moe_runtime.train.data.tokens import IGNORED, Batch
from moe_runtime.train.guards import GradientFacts, gradient_facts, num_nonfinite
from moe_runtime.train.phases import Phases
from moe_runtime.train.setup import Trainee, recipe_of


@dataclass(frozen=True, slots=True)
class Votes:
    """What any rank may ask all of them to do after a step; the step's own reduction carries it."""

    stop: bool = False
    look_at_save: bool = False


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Global values of one step, on the host.

    votes    what at least one rank asked for
    skipped  this rank's gradients, where they changed nothing because a value of some rank was not finite
    """

    loss: float
    grad_norm: float
    aux_loss: float | None
    load_LE: Tensor
    votes: Votes
    skipped: GradientFacts | None


class Stepper:
    """Runs steps of one trainee by one configuration; `phases` hears of "forward", "backward" and "optimizer"."""

    def __init__(self, config: Config, trainee: Trainee, phases: Phases | None = None) -> None:
        self.config, self.trainee = config, trainee
        self._phases = phases or Phases()
        self._meter = LoadMeter(trainee.num_moe_layers, trainee.num_experts, trainee.device)
        self._recipe = recipe_of(config.recipe)
        self._biases = selection_biases(trainee.inner) if config.router.bias_update_rate > 0 else []

    def step(
        self, microbatches: Sequence[Batch], lr: float, votes: Votes | None = None, *, num_labels: int | None = None
    ) -> StepResult:
        """Train on this rank's rows of one global batch; `num_labels` of it are learned over all ranks, None: all.

        `votes` are this rank's.
        """
        trainee, config = self.trainee, self.config
        trainee.model.train()
        self._meter.start_step()
        num_tokens = config.train.global_batch_size * config.data.seq_length
        num_labels = num_tokens if num_labels is None else num_labels
        losses = torch.zeros(2, dtype=torch.float64, device=trainee.device)
        for index, batch in enumerate(microbatches):
            with gradient_sync(trainee.model, last=index == len(microbatches) - 1):
                losses += self._backward(batch, num_tokens, num_labels)
        coordinator = coordinator_of(trainee.model)
        if coordinator is not None:
            with self._phases("backward"):
                coordinator.flush()
        with self._phases("optimizer"):
            return self._update(losses, lr, votes or Votes())

    def _update(self, losses: Tensor, lr: float, votes: Votes) -> StepResult:
        """Clip, step and forget the gradients; `losses` and `votes` are this rank's parts."""
        trainee, config = self.trainee, self.config
        grad_norm = clip_grad_norm_(trainee.model, config.optim.clip_norm or float("inf"))
        # The norm has every gradient once; a replica that alone went wrong is in nobody's norm.
        asked = torch.tensor([votes.stop, votes.look_at_save], dtype=torch.float64, device=trainee.device)
        sums = torch.cat([losses, num_nonfinite(trainee.model).to(trainee.device).reshape(1), asked])
        if dist.is_initialized():
            dist.all_reduce(sums)
        loss, aux_loss, nonfinite, stop, look_at_save = sums.tolist()
        norm = grad_norm.item()
        is_finite = math.isfinite(loss) and math.isfinite(norm) and not nonfinite
        load_LE = self._meter.global_counts()
        skipped = None
        if is_finite or not config.guards.skip_nonfinite:
            for group in trainee.optimizer.param_groups:
                group["lr"] = lr
            trainee.optimizer.step()
            if self._biases:
                step_selection_biases(self._biases, load_LE, config.router.bias_update_rate)
        else:
            skipped = gradient_facts(trainee.model)
        trainee.optimizer.zero_grad(set_to_none=True)
        uses_aux = config.router.aux_loss_coefficient > 0
        return StepResult(
            loss=loss,
            grad_norm=norm,
            aux_loss=aux_loss / trainee.num_moe_layers if uses_aux else None,
            load_LE=load_LE.cpu(),
            votes=Votes(stop=stop > 0, look_at_save=look_at_save > 0),
            skipped=skipped,
        )

    def _backward(self, batch: Batch, num_tokens: int, num_labels: int) -> Tensor:
        """This rank's part of (loss, auxiliary loss), float64 (2,)."""
        trainee, coefficient = self.trainee, self.config.router.aux_loss_coefficient
        with self._phases("forward"):
            with trainee.recorder.recording() as routed, autocast(recipe=self._recipe):
                loss = token_loss(trainee.model, batch, trainee.device) / num_labels
            self._meter.add(routed.ids_TK)
            objective, aux_loss = loss, torch.zeros_like(loss)
            if coefficient > 0:
                counts_LE = self._meter.global_counts()
                aux_loss = load_balancing_loss(routed.logits_TE, counts_LE, num_tokens)
                objective = loss + coefficient * aux_loss
        with self._phases("backward"):
            (objective * trainee.layout.data_parallel_size).backward()
        return torch.stack([loss.detach(), aux_loss.detach()]).double()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Mean loss a token to learn over the batches of all ranks."""
        trainee = self.trainee
        trainee.model.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=trainee.device)
        for batch in batches:
            with autocast(recipe=self._recipe):
                totals[0] += token_loss(trainee.model, batch, trainee.device).double()
            totals[1] += (batch.labels_BS != IGNORED).sum()
        if dist.is_initialized():
            dist.all_reduce(totals)
        loss, num_tokens = totals.tolist()
        return loss / num_tokens


def token_loss(model: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    """Sum over tokens to learn of the next token's cross entropy in nats, fp32."""
    ids_BS, labels_BS, positions_BS = (
        tensor.to(device, non_blocking=True) for tensor in (batch.input_ids_BS, batch.labels_BS, batch.position_ids_BS)
    )
    # Without a cache, Hugging Face reads document boundaries off positions that restart.
    logits_BSV = model(input_ids=ids_BS, position_ids=positions_BS, use_cache=False).logits
    logits_TV, labels_T = logits_BSV.float().flatten(0, 1), labels_BS.flatten()
    return F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORED, reduction="sum")
