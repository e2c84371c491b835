"""Quantized expert weights under Megatron's optimizers, which recognize Transformer Engine's classes alone.

Masters are made from `param.detach()`: while they are made, that gives the values from which the parameter was
quantized. They are freed on every rank then, also where a rank holds no master of it.

The distributed optimizer gathers new values in bfloat16 and copies them into `param.data`, which quantizes them in each
direction that is stored. DistributedDataParallelConfig needs reuse_grad_buf_for_mxfp8_param_ag=True and
fp8_param_gather=True for that, and OptimizerConfig the former, in any of our formats.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from moe_runtime.tensor import QuantizedTensor

Made = TypeVar("Made")

_SWITCH = "reuse_grad_buf_for_mxfp8_param_ag"


def with_quantized_masters(model_chunks: Sequence[nn.Module], make: Callable[[], Made]) -> Made:
    """What `make` returns, Megatron's optimizer, its masters seeded for our quantized parameters.

        optimizer = with_quantized_masters([ddp], lambda: get_megatron_optimizer(optimizer_config, [ddp]))

    Raises ValueError, naming the parameter, for one that the optimizer could not seed or would not write back.
    """
    found = [(name, p) for chunk in model_chunks for name, p in _quantized_parameters(chunk)]
    for name, parameter in found:
        _check(name, parameter, model_chunks)
    for _, parameter in found:
        value = parameter.get_high_precision_init_val()
        plain = parameter.dequantize() if value is None else value.to(parameter.device)
        parameter.detach = plain.detach  # pyright: ignore[reportAttributeAccessIssue]
    try:
        made = make()
    finally:
        for _, parameter in found:
            del parameter.detach
    for _, parameter in found:
        parameter.clear_high_precision_init_val()
    _free_model_shards(made, {id(parameter) for _, parameter in found})
    return made


def _quantized_parameters(chunk: nn.Module) -> Iterator[tuple[str, QuantizedTensor]]:
    for name, parameter in chunk.named_parameters():
        if isinstance(parameter, QuantizedTensor) and parameter.requires_grad:
            yield name, parameter


def _check(name: str, parameter: QuantizedTensor, model_chunks: Sequence[nn.Module]) -> None:
    if parameter.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"{name} is quantized and of nominal type {parameter.dtype}: Megatron has masters for bfloat16 and float16 "
            "parameters alone; build it with params_dtype=torch.bfloat16"
        )
    for direction in ("rowwise", "columnwise"):
        if getattr(parameter.quantizer, direction) and not getattr(parameter, direction):
            raise ValueError(
                f"{name} wants {direction} bytes and stores none, which the optimizer would not write: materialize it, "
                "or build it with omit_columnwise_primary_weight_storage"
            )
    for chunk in model_chunks:
        config: Any = getattr(chunk, "ddp_config", None)
        if config is not None and config.use_distributed_optimizer and not getattr(config, _SWITCH):
            raise ValueError(
                f"{name} is quantized, and the distributed optimizer would write past its bytes: expected "
                f"DistributedDataParallelConfig({_SWITCH}=True, fp8_param_gather=True), got False"
            )


def _free_model_shards(optimizer: Any, quantized: set[int]) -> None:
    """Drop the optimizer's views of the values that masters were made from; Megatron has none of quantized weights."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        groups = zip(getattr(part, "model_float16_groups", ()), getattr(part, "shard_float16_groups", ()), strict=True)
        for parameters, shards in groups:
            for index, parameter in enumerate(parameters):
                if id(parameter) in quantized:
                    shards[index] = None
