"""What Megatron reads off a parameter and the model must say: one set, put on every parameter that becomes the weight.

    allreduce               False: reduced over the expert-data ranks, and scaled for them
    tensor_model_parallel   True: its square sum counts on every rank, as no rank holds a copy of another's
    partition_dim           the dimension that expert tensor parallelism would cut
    partition_stride        2 where that dimension holds two halves, gate and up
    sequence_parallel       False: its gradient is whole on every tensor-parallel rank

What a reducer puts there (main_grad, grad_added_to_main_grad, ...) belongs to one wrap and is never carried over;
skip_backward_post_hook is GroupedLinear's own. docs/megatron.md has the table of all of them.
"""

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterAttributes:
    """The attributes of one parameter; the fields are Megatron's names."""

    allreduce: bool
    partition_dim: int
    partition_stride: int = 1
    tensor_model_parallel: bool = True
    sequence_parallel: bool = False

    def put_on(self, parameter: Tensor) -> None:
        """Write them, over what is there."""
        for field in fields(self):
            setattr(parameter, field.name, getattr(self, field.name))

    def differences(self, parameter: Tensor) -> list[str]:
        """'name=got, expected' for each that the parameter lacks or holds another value of."""
        missing: Any = "nothing"
        return [
            f"{field.name}={got}, expected {expected}"
            for field in fields(self)
            if (got := getattr(parameter, field.name, missing)) != (expected := getattr(self, field.name))
        ]
