"""WgradCoordinator: owns every weight gradient that is not computed in its place, and loses, doubles or mistimes none.

    accept    a backward hands a job over
    run       its gradient is computed, once; calls within one backward are summed, as autograd would
    place     added to what earlier backwards left, in their order
    complete  reduced by whoever reduces the others, then the hooks: once an iteration

No state is shared between coordinators, and nothing is known here of experts.
"""

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.profiler import record_function

from moe_runtime.core.log import get_logger
from moe_runtime.runtime.buckets import GradientBuckets
from moe_runtime.runtime.jobs import Backward, Job, JobKey, graph_task, in_backward
from moe_runtime.runtime.ownership import active_ddp, check_attachable, check_ddp, check_fsdp, mark
from moe_runtime.runtime.schedules import Schedule, WgradSlot, check_schedule
from moe_runtime.runtime.targets import DelayedModule, FSDPUnit, accumulate, find_unit
from moe_runtime.runtime.trace import Trace, now

_LOGGER = get_logger(__name__)

Target = tuple[str, str]  # (module, parameter)


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
        if budget_bytes is not None and schedule != "deferred":
            raise ValueError(f"budget_bytes is for schedule 'deferred', got {budget_bytes} with {schedule!r}")
        self.schedule: Schedule = schedule
        self.budget_bytes, self.side_stream = budget_bytes, side_stream
        self.peak_held_bytes = 0
        self._held_bytes = 0
        self._jobs: list[Job] = []
        self._ready: dict[Target, tuple[Backward, Tensor]] = {}
        self._placed: dict[Target, None] = {}
        self._modules: dict[str, DelayedModule] = {}
        self._hooks: dict[Target, list[Callable[[], None]]] = {}
        self._backwards: list[Backward] = []
        self._microbatch = 0
        self._calls: dict[Target, int] = {}
        self._over_budget: set[Target] = set()
        self._checked_ddp: object = None
        self._checked_fsdp: bool | None = None
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
        if self._modules:
            raise ValueError("this coordinator is attached already; make one for each model")
        owners = {name: module for name, module in model.named_modules() if hasattr(module, "own_wgrad")}
        check_attachable(model, owners, self.schedule)
        for name, module in owners.items():
            self.adopt(name, module)  # pyright: ignore[reportArgumentType]
            if self.schedule == "deferred":
                # Conversions and copies put unmarked parameters in place of marked ones.
                mark(module)  # pyright: ignore[reportArgumentType]
        if self.schedule != "inline":
            model.register_forward_pre_hook(self._on_forward)
            model.register_state_dict_pre_hook(self._on_state_dict)
        model.__dict__["wgrad_coordinator"] = self
        return self

    def adopt(self, name: str, module: DelayedModule) -> None:
        """Own one module's weight gradients, without the checks and guards of `attach`.

        Raises ValueError where a coordinator that the module had before is waited for: by a gradient or by a hook.
        """
        before = getattr(module, "_coordinator", None)
        if isinstance(before, WgradCoordinator) and before is not self:
            before.check_nothing_pending("attaching a coordinator")
            if before._hooks:
                raise ValueError(f"{name or 'the module'} has hooks already: attach first, then register them")
        self._modules[name] = module
        module.own_wgrad(self, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "WgradCoordinator":
        """For a copy of the model: the same schedule and modules, and none of the original's reducers and hooks."""
        self.check_nothing_pending("deepcopy")
        new = memo[id(self)] = WgradCoordinator(self.schedule, self.budget_bytes, self.side_stream)
        new._modules.update(copy.deepcopy(self._modules, memo))
        return new

    def reduce_with_buckets(self, buckets: GradientBuckets) -> None:
        """Reduce deferred gradients through these buckets after each flush: parameters that DDP ignores."""
        self._check_reduces_grad()
        self._buckets = buckets

    def reduce_with_fsdp(self, root: nn.Module) -> None:
        """Reduce deferred gradients through the FSDP2 units of `root` after each flush."""
        self._check_reduces_grad()
        for name, module in self._modules.items():
            unit = find_unit(root, module)  # pyright: ignore[reportArgumentType]
            if unit is None:
                raise ValueError(f"{name} is in no FSDP2 unit of this model")
            unit.hold()
            mark(module)
            self._units[name] = unit

    def _check_reduces_grad(self) -> None:
        fused = [name for name, module in self._modules.items() if getattr(module, "fuse_wgrad_accumulation", False)]
        if fused:
            raise ValueError(
                f"{fused[0]} accumulates into main_grad, which nothing here would reduce: build it with "
                "fuse_wgrad_accumulation=False"
            )

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
            if self.schedule == "deferred" and (ddp := active_ddp()) is not self._checked_ddp:
                check_ddp(ddp, self._modules)
                self._checked_ddp = ddp
        return WgradSlot(self, JobKey(module, parameter, self._microbatch, call))

    def _on_forward(self, model: nn.Module, *_: Any) -> None:
        if not torch.is_grad_enabled() or in_backward():
            return
        self.drop_unfinished()
        self._microbatch += 1
        self._calls.clear()
        sharded = isinstance(model, FSDPModule)
        if self.schedule == "deferred" and sharded != self._checked_fsdp:
            check_fsdp(model, self._modules, self._units)
            self._checked_fsdp = sharded

    def accept(self, key: JobKey, compute: Callable[[], Tensor | None], operands: tuple[Tensor, ...]) -> Job:
        """Take over the weight gradient that `compute` makes from `operands`; called in a backward, by a slot."""
        unit = self._units.get(key.module)
        if unit is not None and unit.reduces_by_itself():
            raise RuntimeError(
                f"FSDP2 would reduce {key} before its gradient exists; switch reduction with "
                "moe_runtime.parallel.gradient_sync, not with set_requires_gradient_sync on the whole model"
            )
        self.drop_unfinished()
        job = Job(key, compute, operands, self._current_backward(), self._record_ready(operands))
        self._held_bytes += job.num_bytes
        self.peak_held_bytes = max(self.peak_held_bytes, self._held_bytes)
        self._jobs.append(job)
        if self.budget_bytes is not None:
            self._keep_to_budget(job, self.budget_bytes)
        return job

    def _keep_to_budget(self, newest: Job, budget_bytes: int) -> None:
        if newest.num_bytes > budget_bytes and newest.key.target not in self._over_budget:
            self._over_budget.add(newest.key.target)
            _LOGGER.warning(
                "budget_bytes=%d is less than the %d bytes of one weight gradient of %s: it is computed at once",
                budget_bytes,
                newest.num_bytes,
                _full_name(newest.key.target),
            )
        while self._jobs and self._held_bytes > budget_bytes:
            self._finish(self._jobs[0])

    def _current_backward(self) -> Backward:
        task = graph_task()
        for backward in self._backwards:
            if backward.graph_task == task:
                return backward
        self._backwards.append(Backward())
        return self._backwards[-1]

    def _record_ready(self, operands: tuple[Tensor, ...]) -> torch.cuda.Event | None:
        if not (self.side_stream and operands[0].is_cuda):
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def run(self, job: Job) -> Tensor | None:
        """Compute one job's gradient, exactly once; afterwards it holds nothing. None: it is in `main_grad`."""
        started = now()
        name = f"moe::wgrad({_full_name(job.key.target)})"
        with record_function(name), self._beside(job), torch.no_grad():
            gradient = job.compute()
        if job.ready is not None and gradient is not None:
            # Made on the side stream, used on this one: its memory must not go to the next job while it is read here.
            gradient.record_stream(torch.cuda.current_stream(gradient.device))
        # Last, so that a job whose computing raised (out of memory) still waits, and the next flush retries it.
        self._forget([job])
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
        """Run a deferred job and keep its gradient, summed with those of the same backward."""
        target, gradient = job.key.target, self.run(job)
        if gradient is None:
            self._placed[target] = None
            return
        if target in self._ready and self._ready[target][0] is job.backward:
            # Calls within a backward meet before they meet the accumulated gradient: autograd's own order.
            gradient = self._ready[target][1] + gradient
        elif target in self._ready:
            self._place(target)
        self._ready[target] = (job.backward, gradient)

    # Delivery --------------------------------------------------------------------------------------------------------

    def pending(self) -> list[str]:
        """Names of parameters whose gradient is not delivered yet."""
        self.drop_unfinished()
        targets = [*(job.key.target for job in self._jobs), *self._ready, *self._placed]
        return [_full_name(target) for target in dict.fromkeys(targets)]

    def flush(self) -> int:
        """Run every job, deliver every gradient, reduce, then call the hooks; returns how many jobs had waited.

        Once an iteration, after its last backward. RuntimeError where nothing waits, unless the schedule never defers.
        """
        self.drop_unfinished()
        if self.schedule != "deferred":
            return 0
        if not (self._jobs or self._ready or self._placed):
            raise RuntimeError("flush: no weight gradient is pending; it was flushed already, or no backward ran")
        count = len(self._jobs)
        started = now()
        reduced = set()
        waiting = [*(job.key.target for job in self._jobs), *self._ready, *self._placed]
        for reducer in dict.fromkeys(map(self._reducer, self._in_order(waiting))):
            # One FSDP2 unit after the other, so that whole gradients of one alone are held.
            for job in [job for job in self._jobs if self._reducer(job.key.target) == reducer]:
                self._finish(job)
            for target in [target for target in self._ready if self._reducer(target) == reducer]:
                self._place(target)
            if isinstance(reducer, FSDPUnit):
                reducer.reduce()
                reduced.add(reducer)
        self._complete(reduced)
        self._trace.add("flush", "coordinator", started, now(), jobs=count)
        self._microbatch = 0
        self._calls.clear()
        return count

    def run_oldest(self, module: str) -> None:
        """Run the jobs of the oldest backward of one module and deliver them: Megatron's `backward_dw`.

        Reduction and hooks follow when nothing waits any more that is reduced together with this module.
        """
        self.drop_unfinished()
        mine = [job for job in self._jobs if job.key.module == module]
        waits = mine or any(target[0] == module for target in (*self._ready, *self._placed))
        if not waits:
            raise RuntimeError(f"backward_dw: no weight gradient of {module or 'this module'} is pending")
        for job in mine:
            if job.backward is mine[0].backward:
                self._finish(job)
        for target in [target for target in self._ready if target[0] == module]:
            self._place(target)
        self._complete()

    def dw_builder(self, stage: nn.Module) -> Callable[[], Callable[[], None]]:
        """For `torch.distributed.pipelining.PipelineStage(stage, ..., dw_builder=)`: weight gradients run in W slots.

        A schedule calls the builder after each backward of the stage, and what it returns in the slot for weights. Each
        slot adds to `.grad`; `flush()` after the schedule's step reduces and calls the hooks.
        Raises ValueError for another schedule than "deferred", for a budget, which would run gradients outside of their
        slots, and for a stage of which this coordinator owns nothing.
        """
        if self.schedule != "deferred" or self.budget_bytes is not None:
            raise ValueError(
                "W slots are for schedule 'deferred' without a budget, got "
                f"schedule={self.schedule!r}, budget_bytes={self.budget_bytes}"
            )
        inside = {id(module) for module in stage.modules()}
        owned = {name for name, module in self._modules.items() if id(module) in inside}
        if not owned:
            raise ValueError("this coordinator owns no module of the stage: attach it to the stages first")
        slotted: set[Job] = set()

        def build() -> Callable[[], None]:
            self.drop_unfinished()
            waiting = [job for job in self._jobs if job.key.module in owned and job not in slotted]
            jobs = [job for job in waiting if job.backward is waiting[-1].backward]
            self._drop_without_slot([job for job in waiting if job not in jobs])
            slotted.update(jobs)

            def run() -> None:
                for job in jobs:
                    self._finish(job)
                slotted.difference_update(jobs)
                for target in [target for target in self._ready if target[0] in owned]:
                    self._place(target)

            return run

        return build

    def _drop_without_slot(self, jobs: list[Job]) -> None:
        """Drop jobs of a backward after which no slot was asked for: the schedule did not know of it."""
        if jobs:
            self._forget(jobs)
            _LOGGER.warning(
                "dropped weight gradients of a backward without a W slot: %s; torch infers shapes by running a stage "
                "on uninitialized values: give PipelineStage input_args and output_args",
                ", ".join(dict.fromkeys(str(job.key) for job in jobs)),
            )

    def _place(self, target: Target) -> None:
        """Add a gradient to what earlier backwards left; it is not reduced yet."""
        _, gradient = self._ready.pop(target)
        module, unit = self._modules[target[0]], self._units.get(target[0])
        self._placed[target] = None
        if unit is not None:
            unit.add(module, target[1], gradient)
        else:
            accumulate(module, target[1], gradient if self._buckets is None else self._buckets.scaled(gradient))

    def _complete(self, reduced: Set[FSDPUnit] = frozenset()) -> None:
        """Reduce the placed gradients that nothing more will be added to (but for units that did), and call hooks."""
        unfinished = {self._reducer(target) for target in (*(job.key.target for job in self._jobs), *self._ready)}
        targets = self._in_order([target for target in self._placed if self._reducer(target) not in unfinished])
        units = dict.fromkeys(self._units[target[0]] for target in targets if target[0] in self._units)
        for unit in units:
            if unit not in reduced:
                unit.reduce()
        if units:
            next(iter(units)).finish()
        if targets and self._buckets is not None:
            self._buckets.reduce()
        for target in targets:
            del self._placed[target]
        for target in targets:
            for hook in self._hooks.get(target, ()):
                hook()

    def _in_order(self, targets: Iterable[Target]) -> list[Target]:
        """Last module first, on every rank: under a budget, which jobs ran early depends on a rank's own rows."""
        order = {module: index for index, module in enumerate(reversed(self._modules))}
        return sorted(set(targets), key=lambda target: (order[target[0]], target[1]))

    def _reducer(self, target: Target) -> Hashable:
        """Targets with an equal reducer are reduced together; those with none stand for themselves."""
        return self._units.get(target[0]) or self._buckets or target

    # Faults ----------------------------------------------------------------------------------------------------------

    def drop_unfinished(self) -> None:
        """Drop jobs and gradients of a backward that ended by an exception, and say so."""
        failed = {backward for backward in self._backwards if backward.failed}
        self._backwards = [b for b in self._backwards if not (b.completed or b in failed)]
        if not failed:
            return
        jobs = [job for job in self._jobs if job.backward in failed]
        ready = [target for target, (backward, _) in self._ready.items() if backward in failed]
        self._forget(jobs)
        for target in ready:
            del self._ready[target]
        if jobs or ready:
            names = dict.fromkeys([*(str(job.key) for job in jobs), *map(_full_name, ready)])
            _LOGGER.warning("dropped weight gradients of a backward that never completed: %s", ", ".join(names))

    def abort(self) -> int:
        """Drop everything that waits; returns how many jobs and gradients that were.

        What was added to `.grad` already, under a budget or by `backward_dw`, stays there for `zero_grad` to clear.
        """
        count = len(self._jobs) + len(self._ready) + len(self._placed)
        self._forget(list(self._jobs))
        for module, parameter in self._placed:
            if (unit := self._units.get(module)) is not None:
                unit.discard(self._modules[module], parameter)
        self._ready.clear()
        self._placed.clear()
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

    def _on_state_dict(self, *_: Any) -> None:
        self.check_nothing_pending("state_dict")

    def guard(self, optimizer: Optimizer) -> None:
        """Make `optimizer.step()` and its `state_dict()` raise while weight gradients wait."""
        optimizer.register_step_pre_hook(lambda *_: self.check_nothing_pending("optimizer step"))
        optimizer.register_state_dict_pre_hook(lambda *_: self.check_nothing_pending("optimizer state_dict"))

    def trace(self) -> dict[str, Any]:
        """Events so far, in Chrome's trace format."""
        return self._trace.as_json()


def _full_name(target: Target) -> str:
    return ".".join(filter(None, target))
