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
