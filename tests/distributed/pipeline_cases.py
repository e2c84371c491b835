"""What ranks run for test_pipeline.py: four stages of routed experts, two on each of two ranks."""

import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

import moe_runtime as mr

SCHEDULES: dict[str, Any] = {"1f1b": ScheduleInterleaved1F1B, "zero_bubble": ScheduleInterleavedZeroBubble}
STAGES, MICROBATCHES, TOKENS, WIDTH = 4, 4, 12, 16


class Stage(nn.Module):
    """A dense layer and four experts, top-1 by position."""

    def __init__(self, index: int, *, deferred: bool) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.dense = nn.Linear(WIDTH, WIDTH)
        config = mr.RoutedExpertsConfig(
            num_experts=4, hidden_size=WIDTH, intermediate_size=8, delay_wgrad_compute=deferred
        )
        self.experts = mr.RoutedExperts(config)

    def forward(self, x_TD: Tensor) -> Tensor:
        ids_TK = (torch.arange(len(x_TD))[:, None] * 3) % 4
        return x_TD + self.experts(torch.tanh(self.dense(x_TD)), ids_TK, torch.ones(len(x_TD), 1))


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and targets of all microbatches."""
    generator = torch.Generator().manual_seed(7)
    shape = (MICROBATCHES * TOKENS, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def loss_of(y_TD: Tensor, target_TD: Tensor) -> Tensor:
    """Sum of squares, so that microbatches add up."""
    return (y_TD - target_TD).square().sum()


def alone() -> dict[str, Tensor]:
    """Gradients of all stages in one process, microbatch after microbatch."""
    stages = [Stage(index, deferred=False) for index in range(STAGES)]
    x_TD, target_TD = batch()
    for x, target in zip(x_TD.chunk(MICROBATCHES), target_TD.chunk(MICROBATCHES), strict=True):
        for stage in stages:
            x = stage(x)
        loss_of(x, target).backward()
    return _gradients(dict(enumerate(stages)))


def piped(schedule: str, deferred: bool, static: bool) -> tuple[dict[str, Tensor], int, str]:
    """This rank's gradients after one step of a schedule, how often each hook fired, and what was logged."""
    warnings.filterwarnings("ignore")  # pipelining's own deprecations, which differ between versions
    log = _Log()
    logging.getLogger("moe_runtime").addHandler(log)
    rank, world = dist.get_rank(), dist.get_world_size()
    modules = {index: Stage(index, deferred=deferred) for index in range(rank, STAGES, world)}
    coordinator, fired = None, [0]
    if deferred:
        coordinator = mr.WgradCoordinator("deferred")
        coordinator.attach(nn.ModuleList(modules.values()))
        first = next(iter(modules.values())).experts.experts.down
        first.register_wgrad_accumulation_and_reduce_hooks(lambda: fired.__setitem__(0, fired[0] + 1))
    stages = []
    for index, module in modules.items():
        shapes: dict[str, Any] = {}
        if static:
            example = torch.zeros(TOKENS, WIDTH)
            shapes = {
                "input_args": (example.clone().requires_grad_(index > 0),),
                "output_args": example.clone().requires_grad_(),
            }
        builder = None if coordinator is None else coordinator.dw_builder(module)
        stages.append(PipelineStage(module, index, STAGES, torch.device("cpu"), dw_builder=builder, **shapes))
    runner = SCHEDULES[schedule](stages, n_microbatches=MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    x_TD, target_TD = batch()
    if rank == 0:
        runner.step(x_TD)
    else:
        runner.step(target=target_TD, losses=[])
    if coordinator is not None:
        coordinator.flush()
        coordinator.check_nothing_pending("the end")
    logging.getLogger("moe_runtime").removeHandler(log)
    return _gradients(modules), fired[0], "\n".join(log.lines)


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _gradients(modules: dict[int, Stage]) -> dict[str, Tensor]:
    found = {}
    for index, module in modules.items():
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, name
            found[f"{index}.{name}"] = parameter.grad.clone()
    return found
