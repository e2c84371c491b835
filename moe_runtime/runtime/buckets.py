"""Reduce gradients of parameters that DDP was told to ignore, over a group of their own.

Expert weights under DDP with expert parallelism are replicated over the expert-data group only. Their gradients already
sum over the tokens of the whole expert group, so the sum over replicas is divided by the full data-parallel size: by
the size of the expert group as each gradient comes in, by the number of replicas when they are reduced. A gradient that
was reduced before then keeps its value, as in DDP, and two backwards without `no_sync` are right as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_runtime.runtime.jobs import graph_task

_BUCKET_BYTES = 25 * 2**20


@dataclass
class _Bucket:
    parameters: list[nn.Parameter]
    flat: Tensor | None = None
    work: dist.Work | None = None
    missing: int = 0


class GradientBuckets:
    """Sum `grad` of each parameter over `group`, times `scale`, once per backward that `should_reduce` says counts.

    A bucket's all-reduce starts when its last gradient is there; all have ended, and `.grad` holds the result, when
    `backward()` returns. A parameter that got no gradient takes part with zeros, so that no rank waits for another.
    `group=None` scales without communicating. `on_gradient=False`: nothing starts by itself, `reduce` is called.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        group: dist.ProcessGroup | None,
        scale: float,
        should_reduce: Callable[[], bool],
        on_gradient: bool = True,
    ) -> None:
        self._group, self._should_reduce = group, should_reduce
        replicas = dist.get_world_size(group) if group is not None else 1
        self._mean = 1.0 / replicas
        self._share = replicas / round(1.0 / scale)
        self._buckets = _split(parameters)
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._graph_task: int | None = None
        if on_gradient:
            for parameter in parameters:
                if self._share != 1.0:
                    parameter.register_hook(self.scaled)
                parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def scaled(self, gradient: Tensor) -> Tensor:
        """A gradient as it must be accumulated: its part of the division that the replicas' mean does not do."""
        return gradient * self._share if self._share != 1.0 else gradient

    def reduce(self) -> None:
        """Reduce every bucket now: for `scaled` gradients that no backward delivers (`on_gradient=False`)."""
        self._finish()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if not self._should_reduce():
            return
        if self._graph_task != graph_task():
            self._begin()
        bucket = self._bucket_of[parameter]
        bucket.missing -= 1
        if bucket.missing == 0:
            self._launch_ready()

    def _begin(self) -> None:
        self._graph_task = graph_task()
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()  # of a backward that raised
            bucket.missing, bucket.flat, bucket.work = len(bucket.parameters), None, None
        # Runs when this backward ends, before `backward()` returns: the point where DDP and FSDP2 finish as well.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # pyright: ignore[reportAttributeAccessIssue]

    def _launch_ready(self) -> None:
        # In bucket order on every rank, whatever order gradients came in: collectives must match across ranks.
        for bucket in self._buckets:
            if bucket.missing:
                break
            if bucket.flat is None:
                self._launch(bucket)

    def _launch(self, bucket: _Bucket) -> None:
        pieces = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket.parameters]
        bucket.flat = torch.cat(pieces).mul_(self._mean)
        if self._group is not None:
            bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)

    def _finish(self) -> None:
        for bucket in self._buckets:
            if bucket.flat is None:
                self._launch(bucket)
        for bucket in self._buckets:
            assert bucket.flat is not None
            if bucket.work is not None:
                bucket.work.wait()
            sizes = [p.numel() for p in bucket.parameters]
            for parameter, reduced in zip(bucket.parameters, bucket.flat.split(sizes), strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(reduced.view(parameter.shape))
            bucket.flat, bucket.work = None, None
        self._graph_task = None


def _split(parameters: Sequence[nn.Parameter]) -> list[_Bucket]:
    """Buckets of one dtype, about 25 MiB, in reverse order: the order in which backward makes gradients."""
    buckets: list[_Bucket] = []
    size = 0
    for parameter in reversed(parameters):
        fits = buckets and size < _BUCKET_BYTES and buckets[-1].parameters[0].dtype == parameter.dtype
        if not fits:
            buckets.append(_Bucket([]))
            size = 0
        buckets[-1].parameters.append(parameter)
        size += parameter.numel() * parameter.element_size()
    return buckets
