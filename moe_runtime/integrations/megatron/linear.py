"""ExpertLinear: GroupedLinear with Megatron's attributes on its parameters, through every replacement of them."""

# E local experts

from collections.abc import Callable, Mapping
from typing import Any, Self

from torch import Tensor, nn

from moe_runtime.functional import HeldWeight
from moe_runtime.integrations.megatron.attributes import ParameterAttributes
from moe_runtime.nn import GroupedLinear, GroupedMLP


class ExpertLinear(GroupedLinear):
    """The grouped linear layer of Megatron's experts; `mark` says which attributes its parameters carry."""

    _attributes: Mapping[str, ParameterAttributes] | None = None
    num_reduction_hooks = 0
    _times_reduced: Callable[[Tensor], int] | None = None

    def mark(self, *, partition_dim: int, partition_stride: int, allreduce: bool) -> None:
        """Put these attributes on every parameter, and on whatever takes its place from now on.

        partition_dim  of one expert's weight (F, D); a stacked one has the experts before it
        """
        common = {"allreduce": allreduce, "partition_stride": partition_stride}
        stacked = int(self.single_grouped_weight)
        self._attributes = {
            "weight": ParameterAttributes(partition_dim=partition_dim + stacked, **common),
            "bias": ParameterAttributes(partition_dim=stacked if partition_dim == 0 else -1, **common),
        }
        self._put_attributes()

    def attributes_of(self, name: str) -> ParameterAttributes:
        """What the parameter called `name` (weight, weight0, bias, ...) must carry."""
        assert self._attributes is not None, "mark() comes first"
        return self._attributes["weight" if name.startswith("weight") else "bias"]

    def _put_attributes(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter is not None and self._attributes is not None:
                self.attributes_of(name).put_on(parameter)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As GroupedLinear, then marked."""
        super().register_parameter(name, param)
        self._put_attributes()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._put_attributes()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A copied nn.Parameter has lost its attributes.
        self._put_attributes()
        if self.delay_wgrad_compute:
            for parameter in self.wgrad_parameters("weight"):
                parameter.skip_backward_post_hook = True  # pyright: ignore[reportAttributeAccessIssue]

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """As GroupedLinear; before the first of them, each time, that they may run is checked."""
        if self.num_reduction_hooks == 0:
            super().register_wgrad_accumulation_and_reduce_hooks(self._check_ready)
        super().register_wgrad_accumulation_and_reduce_hooks(hook)
        self.num_reduction_hooks += 1

    def watch(self, name: str, times_reduced: Callable[[Tensor], int]) -> None:
        """Raise where a weight would be reported to Megatron's reducer twice in an iteration, or without a gradient.

        name           this module's, for the sentence
        times_reduced  how often a parameter was reported since the last microbatch of this iteration began
        """
        self._full_name, self._times_reduced = name, times_reduced

    def _check_ready(self) -> None:
        for key, parameter in self._parameters.items():
            if parameter is None or not key.startswith("weight") or not parameter.requires_grad:
                continue
            if parameter.grad is None:
                raise RuntimeError(
                    f"{self._described_key(key)} would be reduced without a gradient: expected .grad, or zeros in its "
                    "place for one that is in main_grad, got None; somebody cleared it after backward_dw"
                )
            if self._times_reduced is not None and self._times_reduced(parameter):
                raise RuntimeError(
                    f"{self._described_key(key)} would be reported as reduced twice in one iteration, and its bucket "
                    "be reduced too early in the next: run backward_dw of earlier microbatches before the last "
                    "microbatch begins (inside no_sync), or after its backward"
                )

    def _described_key(self, key: str) -> str:
        name = self.__dict__.get("_full_name") or self._wgrad_name
        return f"{name}.{key}" if name else f"{key} of {self!r}"

    def waits(self) -> bool:
        """Whether a weight gradient is not computed, or not delivered, yet."""
        if self._coordinator is None:
            return False
        return ".".join(filter(None, (self._wgrad_name, "weight"))) in self._coordinator.pending()

    def take_weight(self) -> HeldWeight:
        """As GroupedLinear, once Megatron's overlapped parameter gather has brought the weight here.

        It waits in a forward pre-hook of the module that owns the parameter, and the experts read weights without
        calling that module.
        """
        for key, hook in list(self._forward_pre_hooks.items()):
            if key in self._forward_pre_hooks_with_kwargs:
                hook(self, (), {})  # pyright: ignore[reportCallIssue]
            else:
                hook(self, ())  # pyright: ignore[reportCallIssue]
        return super().take_weight()


class ExpertMLP(GroupedMLP):
    """GroupedMLP of ExpertLinears."""

    linear_class = ExpertLinear
