"""Accumulating microbatches: reduce gradients in the last one's backward only, whatever wraps the model."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from moe_runtime.runtime import WgradCoordinator


@contextmanager
def gradient_sync(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Around the forward and backward of one microbatch of `model`, as `distribute` returned it."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        coordinator = coordinator_of(model)
        if coordinator is not None:
            coordinator.hold_reduction()
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    yield


def coordinator_of(model: nn.Module) -> WgradCoordinator | None:
    """The coordinator attached to the model, or to what DDP wraps."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return getattr(inner, "wgrad_coordinator", None)
