"""Guards of the numbers: steps that are skipped, losses that jump, replicas that drift apart.

Whether a step is skipped is decided in `step` from sums over all ranks, so all of them do the same. Here it is counted,
and what a person needs to find the cause is written down.
"""

import json
import re
import statistics
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_runtime.checkpoint.tensors import local_of, named_parameters
from moe_runtime.core.errors import NumericsError
from moe_runtime.core.log import get_logger
from moe_runtime.train.config import GuardsConfig
from moe_runtime.train.replicas import first_difference
from moe_runtime.train.rows import RowsFile, json_number, replace_file
from moe_runtime.train.setup import Trainee

EVIDENCE_FOLDER, SPIKES_FILE = "evidence", "spikes.jsonl"
# The losses that a new one is compared with, and how many there must be.
SPIKE_WINDOW, SPIKE_MINIMUM = 64, 16
_NAMED_TENSORS = 8

_LAYER = re.compile(r"^(.*?\.\d+)\.")
_LOGGER = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientFacts:
    """This rank's gradients, as they were when the step was skipped.

    norms      2-norm of each layer's local gradients, after reduction and before clipping
    nonfinite  the first names of tensors with a value that is not finite
    """

    norms: dict[str, float]
    nonfinite: tuple[str, ...]


@torch.no_grad()
def num_nonfinite(model: nn.Module) -> Tensor:
    """float64 scalar on the device: gradients of this rank that hold a value that is not finite. No host wait."""
    gradients = [local_of(p.grad) for p in model.parameters() if p.grad is not None]
    gradients = [gradient for gradient in gradients if gradient.numel()]
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    largest = torch.stack([norm.float() for norm in torch._foreach_norm(gradients, torch.inf)])
    return largest.isfinite().logical_not().sum().double()


@torch.no_grad()
def gradient_facts(model: nn.Module) -> GradientFacts:
    """Norms by layer and the tensors that are not finite, of what this rank holds."""
    squares: dict[str, float] = defaultdict(float)
    nonfinite: list[str] = []
    for name, parameter in named_parameters(model):
        if parameter.grad is None:
            continue
        gradient = local_of(parameter.grad)
        layer = _LAYER.match(name)
        square = gradient.double().square().sum().item()
        squares[layer[1] if layer else name.rpartition(".")[0]] += square
        if not gradient.isfinite().all():
            nonfinite.append(name)
    return GradientFacts(
        norms={name: square**0.5 for name, square in squares.items()}, nonfinite=tuple(nonfinite[:_NAMED_TENSORS])
    )


class Guards:
    """Follows the steps of a run; every rank makes one and calls it at the same points.

    sequences  of a step (0, 1, ...): the ids of the sequences that this rank trained on, a list a microbatch
    skipped    how many steps the run has skipped; a resumed run goes on counting
    """

    def __init__(
        self,
        config: GuardsConfig,
        folder: Path,
        trainee: Trainee,
        *,
        sequences: Callable[[int], list[list[int]]],
        skipped: int,
        resumed_step: int | None,
    ) -> None:
        self._config, self._folder, self._trainee, self._sequences = config, folder, trainee, sequences
        self.skipped = skipped
        self._is_main = trainee.layout.rank == 0
        self._spikes = RowsFile(folder / SPIKES_FILE, is_main=self._is_main, resumed_step=resumed_step)
        self._recent: deque[float] = deque(maxlen=SPIKE_WINDOW)

    def after_step(self, done: int, loss: float, grad_norm: float, skipped: GradientFacts | None) -> None:
        """Judge step `done`, counted from 1; `skipped` is given if it was. NumericsError on all ranks ends the run."""
        if skipped is not None:
            self._record_skipped(done, loss, grad_norm, skipped)
        else:
            self._watch_for_spike(done, loss, grad_norm)
        every = self._config.replica_check_every
        if every and done % every == 0:
            difference = first_difference(self._trainee.model, self._trainee.layout)
            if difference is not None:
                raise NumericsError(f"replicas differ after step {done}: {difference}")

    def _record_skipped(self, done: int, loss: float, grad_norm: float, facts: GradientFacts) -> None:
        self.skipped += 1
        own = {
            "rank": self._trainee.layout.rank,
            "sequences": self._sequences(done - 1),
            "nonfinite_gradients": list(facts.nonfinite),
            "gradient_norms": {name: json_number(norm) for name, norm in facts.norms.items()},
        }
        path = self._folder / EVIDENCE_FOLDER / f"step-{done:06d}.json"
        ranks = _gather(own)
        if self._is_main:
            evidence = {
                "step": done,
                "skipped_so_far": self.skipped,
                "loss": json_number(loss),
                "grad_norm": json_number(grad_norm),
                "ranks": ranks,
            }
            path.parent.mkdir(exist_ok=True)
            replace_file(path, (json.dumps(evidence, indent=1, allow_nan=False) + "\n").encode())
        _LOGGER.warning(
            "step %d is skipped on all ranks: loss %g, gradient norm %g; %d skipped of at most %d; evidence in %s",
            done,
            loss,
            grad_norm,
            self.skipped,
            self._config.max_skipped,
            path,
        )
        if self.skipped >= self._config.max_skipped:
            raise NumericsError(
                f"{self.skipped} steps had a loss or gradient that is not finite, guards.max_skipped = "
                f"{self._config.max_skipped}; the last is step {done}, described in {path}"
            )

    def _watch_for_spike(self, done: int, loss: float, grad_norm: float) -> None:
        sigmas, recent = self._config.spike_sigmas, self._recent
        if sigmas and len(recent) >= SPIKE_MINIMUM:
            mean, deviation = statistics.fmean(recent), statistics.pstdev(recent)
            if loss > mean + sigmas * deviation:
                self._spikes.append(
                    {
                        "step": done,
                        "loss": json_number(loss),
                        "mean": mean,
                        "deviation": deviation,
                        "grad_norm": json_number(grad_norm),
                    }
                )
                if self._is_main:
                    _LOGGER.warning(
                        "loss %.4f of step %d is a spike: the %d before have mean %.4f and deviation %.4f",
                        loss,
                        done,
                        len(recent),
                        mean,
                        deviation,
                    )
        recent.append(loss)


def _gather(own: dict[str, Any]) -> list[Any]:
    if not dist.is_initialized():
        return [own]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return parts
