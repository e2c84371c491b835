"""WgradCoordinator: owns every weight gradient that is not computed in its place, and loses, doubles or mistimes none.

A job is accepted in a backward, runs exactly once, and its gradient is delivered exactly once per iteration:
accumulated in the order autograd would have used, then reduced by whoever reduces the others. No state is shared
between coordinators, and nothing is known here of experts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.profiler import record_function

from moe_runtime.core.log import get_logger
from moe_runtime.runtime.buckets import GradientBuckets
from moe_runtime.runtime.jobs import Backward, Job, JobKey, graph_task, in_backward
from moe_runtime.runtime.schedules import Schedule, WgradSlot, check_schedule
from moe_runtime.runtime.targets import DelayedModule, FSDPUnit, accumulate, find_unit
from moe_runtime.runtime.trace import Trace, now

_LOGGER = get_logger(__name__)


class WgradCoordinator:
    """Schedules the weight gradients of the modules it is attached to.

    schedule      "inline", "late" (same backward, later) or "deferred" (until `flush`)
    budget_bytes  held activations above which the oldest deferred job runs at once; None: no bound
    side_stream   on a GPU, run jobs on a stream of their own, joined before their gradient is used
    """

    def __init__(
        self, schedule: Schedule = "inline", budget_bytes: int | None = None, side_stream: bool = True
    ) -> None:
        check_schedule(schedule)
        if budget_bytes is not None and budget_bytes < 0:
            raise ValueError(f"budget_bytes must be at least 0 or None, got {budget_bytes}")
        self.schedule: Schedule = schedule
        self.budget_bytes, self.side_stream = budget_bytes, side_stream
        self.peak_held_bytes = 0
        self._held_bytes = 0
        self._jobs: list[Job] = []
        self._ready: dict[tuple[str, str], list[tuple[int, Tensor]]] = {}
        self._modules: dict[str, DelayedModule] = {}
        self._hooks: dict[tuple[str, str], list[Callable[[], None]]] = {}
        self._backward: Backward | None = None
        self._microbatch = 0
        self._calls: dict[tuple[str, str], int] = {}
        self._buckets: GradientBuckets | None = None
        self._units: dict[str, FSDPUnit] = {}
        self._stream: torch.cuda.Stream | None = None
        self._trace = Trace()

    # Ownership -------------------------------------------------------------------------------------------------------

    def attach(self, model: nn.Module) -> "WgradCoordinator":
        """Own the weight gradients of every module in `model` that can delay them; before DDP or FSDP2 wraps it.

        Raises ValueError for a module whose `delay_wgrad_compute` disagrees with the schedule, for weights that two
        modules own, for a marked parameter that none owns, and for a model that is wrapped already.
        """
        owners = {name: module for name, module in model.named_modules() if hasattr(module, "own_wgrad")}
        self._check_attachable(model, owners)
        for name, module in owners.items():
            self.adopt(name, module)  # pyright: ignore[reportArgumentType]
        model.register_forward_pre_hook(self._on_forward)
        model.register_state_dict_pre_hook(lambda *_: self.check_nothing_pending("state_dict"))
        model.__dict__["wgrad_coordinator"] = self
        return self

    def adopt(self, name: str, module: DelayedModule) -> None:
        """Own one module's weight gradients, without the checks and guards of `attach`."""
        self._modules[name] = module
        module.own_wgrad(self, name)

    def _check_attachable(self, model: nn.Module, owners: dict[str, nn.Module]) -> None:
        if self._modules:
            raise ValueError("this coordinator is attached already; make one for each model")
        wrapped = any(isinstance(m, FSDPModule | DistributedDataParallel) for m in model.modules())
        if self.schedule == "deferred" and wrapped:
            raise ValueError("attach a deferred coordinator before DDP or FSDP2 wraps the model: their hooks exist now")
        owned: dict[int, str] = {}
        for name, module in owners.items():
            flag = bool(getattr(module, "delay_wgrad_compute", False))
            if flag != (self.schedule == "deferred"):
                raise ValueError(
                    f"{name or 'the model'} has delay_wgrad_compute={flag}, which schedule {self.schedule!r} does not "
                    f"allow: build it with delay_wgrad_compute={self.schedule == 'deferred'}"
                )
            for parameter_name, parameter in module.named_parameters(prefix=name, recurse=False):
                if id(parameter) in owned and self.schedule == "deferred":
                    raise ValueError(f"{owned[id(parameter)]} and {parameter_name} are one weight with two owners")
                owned[id(parameter)] = parameter_name
        for name, parameter in model.named_parameters():
            if getattr(parameter, "skip_backward_post_hook", False) and id(parameter) not in owned:
                raise ValueError(f"{name} is marked skip_backward_post_hook, but no module would compute its gradient")

    def reduce_with_buckets(self, buckets: GradientBuckets) -> None:
        """Reduce deferred gradients through these buckets after each flush: parameters that DDP ignores."""
        self._buckets = buckets

    def reduce_with_fsdp(self, root: nn.Module) -> None:
        """Reduce deferred gradients through the FSDP2 units of `root` after each flush."""
        for name, module in self._modules.items():
            unit = find_unit(root, module)  # pyright: ignore[reportArgumentType]
            if unit is None:
                raise ValueError(f"{name} is in no FSDP2 unit of this model")
            unit.hold()
            self._units[name] = unit

    def hold_reduction(self) -> None:
        """Take back reduction after somebody switched it on for the whole model, as each last microbatch does."""
        for unit in self._units.values():
            unit.hold()

    def add_hook(self, module: str, parameter: str, hook: Callable[[], None]) -> None:
        """Call `hook()` once an iteration, after the last job of this parameter was delivered."""
        self._hooks.setdefault((module, parameter), []).append(hook)

    # Jobs ------------------------------------------------------------------------------------------------------------

    def slot(self, module: str, parameter: str) -> WgradSlot | None:
        """Where the autograd node made now hands in its weight gradient; None where it is computed in its place."""
        if self.schedule == "inline" or not torch.is_grad_enabled():
            return None
        target = (module, parameter)
        call = self._calls.get(target, 0)
        if not in_backward():
            # A recomputation builds nodes again; only those of the original forward have keys of their own.
            self.drop_unfinished()
            self._calls[target] = call + 1
        return WgradSlot(self, JobKey(module, parameter, self._microbatch, call))

    def _on_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not in_backward():
            self.drop_unfinished()
            self._microbatch += 1
            self._calls.clear()

    def accept(self, key: JobKey, compute: Callable[[], Tensor], operands: tuple[Tensor, ...]) -> Job:
        """Take over the weight gradient that `compute` makes from `operands`; called in a backward, by a slot."""
        unit = self._units.get(key.module)
        if unit is not None and unit.reduces_by_itself():
            raise RuntimeError(
                f"FSDP2 would reduce {key} before its gradient exists; switch reduction with "
                "moe_runtime.parallel.gradient_sync, not with set_requires_gradient_sync on the whole model"
            )
        job = Job(key, compute, operands, self._current_backward(), self._record_ready(operands))
        self._held_bytes += job.num_bytes
        self.peak_held_bytes = max(self.peak_held_bytes, self._held_bytes)
        self._jobs.append(job)
        if self.schedule == "deferred" and self.budget_bytes is not None:
            while self._jobs and self._held_bytes > self.budget_bytes:
                self._finish(self._jobs[0])
        return job

    def _current_backward(self) -> Backward:
        task = graph_task()
        if self._backward is None or self._backward.graph_task != task or self._backward.completed:
            backward = self._backward = Backward(task)

            def completed() -> None:
                backward.completed = True

            # Runs when this backward has ended without an exception.
            torch.autograd.Variable._execution_engine.queue_callback(completed)  # pyright: ignore[reportAttributeAccessIssue]
        return self._backward

    def _record_ready(self, operands: tuple[Tensor, ...]) -> torch.cuda.Event | None:
        if not (self.side_stream and operands[0].is_cuda):
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def run(self, job: Job) -> Tensor:
        """Compute one job's gradient, exactly once; afterwards it holds nothing."""
        self._jobs.remove(job)
        self._held_bytes -= job.num_bytes
        started = now()
        with record_function(f"moe::wgrad({job.key.module}.{job.key.parameter})"), self._beside(job), torch.no_grad():
            gradient = job.compute()
        self._trace.add(str(job.key), "wgrad", started, now(), held_bytes=self._held_bytes)
        return gradient

    @contextmanager
    def _beside(self, job: Job) -> Iterator[None]:
        """On the side stream from the moment the operands were ready, joined at the end."""
        if job.ready is None:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device=job.operands[0].device)
        self._stream.wait_event(job.ready)
        with torch.cuda.stream(self._stream):
            yield
        for operand in job.operands:
            # Its memory must not be reused before the side stream has read it.
            operand.record_stream(self._stream)
        torch.cuda.current_stream(job.operands[0].device).wait_stream(self._stream)

    def _finish(self, job: Job) -> None:
        """Run a deferred job and keep its gradient until the flush, with those of the same microbatch summed first."""
        gradient = self.run(job)
        if gradient.is_cuda and job.ready is not None:
            gradient.record_stream(torch.cuda.current_stream(gradient.device))
        kept = self._ready.setdefault(job.key.target, [])
        if kept and kept[-1][0] == job.key.microbatch:
            # Calls within a microbatch meet before they meet the accumulated gradient: autograd's own order.
            kept[-1] = (job.key.microbatch, kept[-1][1] + gradient)
        else:
            kept.append((job.key.microbatch, gradient))

    # Delivery --------------------------------------------------------------------------------------------------------

    def pending(self) -> list[str]:
        """Names of parameters whose gradient is not delivered yet."""
        self.drop_unfinished()
        targets = [job.key.target for job in self._jobs] + list(self._ready)
        return [".".join(filter(None, target)) for target in dict.fromkeys(targets)]

    def flush(self) -> int:
        """Run every job, deliver every gradient, reduce, then call the hooks; returns how many jobs had waited.

        Once an iteration, after its last backward. RuntimeError where nothing waits, unless the schedule never defers.
        """
        if self.schedule != "deferred":
            return 0
        self.drop_unfinished()
        if not self._jobs and not self._ready:
            raise RuntimeError("flush: no weight gradient is pending; it was flushed already, or no backward ran")
        count = len(self._jobs)
        started = now()
        while self._jobs:
            self._finish(self._jobs[0])
        self._deliver(list(self._ready))
        self._trace.add("flush", "coordinator", started, now(), jobs=count)
        self._microbatch = 0
        self._calls.clear()
        return count

    def run_oldest(self, module: str) -> None:
        """Run the jobs of the oldest microbatch of one module and deliver them: Megatron's `backward_dw`."""
        self.drop_unfinished()
        mine = [job for job in self._jobs if job.key.module == module]
        if not mine and not any(target[0] == module for target in self._ready):
            raise RuntimeError(f"backward_dw: no weight gradient of {module or 'this module'} is pending")
        oldest = min((job.key.microbatch for job in mine), default=None)
        for job in mine:
            if job.key.microbatch == oldest:
                self._finish(job)
        waiting = {job.key.target for job in self._jobs}
        for target in [target for target in self._ready if target[0] == module]:
            self._deliver([target], call_hooks=target not in waiting)

    def _deliver(self, targets: list[tuple[str, str]], call_hooks: bool = True) -> None:
        by_unit: dict[FSDPUnit, list[tuple[DelayedModule, str, Tensor]]] = {}
        for target in targets:
            module = self._modules[target[0]]
            for _, gradient in self._ready.pop(target):
                unit = self._units.get(target[0])
                if unit is None:
                    accumulate(module, target[1], gradient)
                else:
                    by_unit.setdefault(unit, []).append((module, target[1], gradient))
        for unit, gradients in by_unit.items():
            unit.reduce(gradients)
        if by_unit:
            next(iter(by_unit)).finish()
        if self._buckets is not None and call_hooks:
            self._buckets.reduce()
        for target in targets if call_hooks else []:
            for hook in self._hooks.get(target, ()):
                hook()

    # Faults ----------------------------------------------------------------------------------------------------------

    def drop_unfinished(self) -> None:
        """Drop jobs of a backward that ended by an exception, and say so."""
        current = graph_task()
        lost = [job for job in self._jobs if not job.backward.completed and job.backward.graph_task != current]
        if not lost:
            return
        names = ", ".join(dict.fromkeys(str(job.key) for job in lost))
        _LOGGER.warning("dropped weight gradients of a backward that never completed: %s", names)
        self._forget(lost)

    def abort(self) -> int:
        """Drop everything that waits; returns how many jobs and gradients that were."""
        count = len(self._jobs) + sum(len(kept) for kept in self._ready.values())
        self._forget(list(self._jobs))
        self._ready.clear()
        self._microbatch = 0
        self._calls.clear()
        return count

    def _forget(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._jobs.remove(job)
            self._held_bytes -= job.num_bytes

    def check_nothing_pending(self, action: str) -> None:
        """RuntimeError, naming them, if weight gradients wait: `action` would miss them."""
        if waiting := self.pending():
            raise RuntimeError(
                f"{action} with weight gradients pending: {', '.join(waiting)}; flush() or abort() first"
            )

    def guard(self, optimizer: Optimizer) -> None:
        """Make `optimizer.step()` and its `state_dict()` raise while weight gradients wait."""
        optimizer.register_step_pre_hook(lambda *_: self.check_nothing_pending("optimizer step"))
        optimizer.register_state_dict_pre_hook(lambda *_: self.check_nothing_pending("optimizer state_dict"))

    def trace(self) -> dict[str, Any]:
        """Events so far, in Chrome's trace format."""
        return self._trace.as_json()
