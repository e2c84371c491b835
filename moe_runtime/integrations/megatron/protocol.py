"""Whether Megatron's DDP will reduce what these experts compute: checked once, after the wrap.

Megatron trains wrongly, without an error, where a parameter's gradient comes later than its reducer believes, or where
nobody reduces it. docs/megatron.md lists the ways; each raises here, or when it happens, with the parameter's name.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn

from moe_runtime.integrations.megatron.linear import ExpertLinear
from moe_runtime.tensor import QuantizedTensor

_REGISTERS = "register_wgrad_accumulation_and_reduce_hooks"
_MARK = "skip_backward_post_hook"


def verify(model: Any, optimizer: Any = None) -> None:
    """RuntimeError, naming the parameter, where Megatron's DDP would train `model` wrongly, now or in a later step.

    model      Megatron's DistributedDataParallel, or a list of them (one for each model chunk), once it is built
    optimizer  Megatron's, if it is built already: stepping while weight gradients wait raises from now on
    """
    for ddp in model if isinstance(model, Sequence) else [model]:
        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(f"verify expects Megatron's DistributedDataParallel, got {type(ddp).__name__}")
        linears = {name: m for name, m in ddp.module.named_modules() if isinstance(m, ExpertLinear)}
        _verify_reduction(ddp, linears)
        _verify_placement(ddp, linears)
        for name, linear in linears.items():
            linear.watch(name, partial(_times_reduced, ddp))
        for inner in _inner_optimizers(optimizer):
            inner.register_step_pre_hook(lambda *_, linears=linears: check_nothing_waits(linears, "optimizer step"))


def check_nothing_waits(linears: dict[str, ExpertLinear], action: str) -> None:
    """RuntimeError if weight gradients wait that `action` would miss."""
    if waiting := [f"{name}.weight" for name, linear in linears.items() if linear.waits()]:
        raise RuntimeError(f"{action} with weight gradients pending: {', '.join(waiting)}; call backward_dw first")


def _verify_reduction(ddp: DistributedDataParallel, linears: dict[str, ExpertLinear]) -> None:
    """Exactly one hook for each parameter, and that after its gradient exists."""
    owners: dict[int, list[str]] = {}
    delayed: dict[int, str] = {}
    for name, module in ddp.module.named_modules():
        if hasattr(module, _REGISTERS):
            for parameter in module.parameters():
                owners.setdefault(id(parameter), []).append(name)
    for name, linear in linears.items():
        weights = linear.wgrad_parameters("weight")
        if linear.delay_wgrad_compute:
            delayed.update((id(weight), name) for weight in weights)
    for name, parameter in ddp.module.named_parameters():
        if not parameter.requires_grad:
            continue
        _verify_parameter(ddp, name, parameter, owners.get(id(parameter), []), id(parameter) in delayed)
    for name, linear in linears.items():
        expected = sum(weight.requires_grad for weight in linear.wgrad_parameters("weight"))
        if linear.delay_wgrad_compute and linear.num_reduction_hooks != expected:
            raise RuntimeError(
                f"{name}.weight needs one reduction hook for each of its {expected} parameters, "
                f"got {linear.num_reduction_hooks}: wrap a model once, after a coordinator was attached"
            )


def _verify_parameter(
    ddp: DistributedDataParallel, name: str, parameter: nn.Parameter, owners: list[str], is_delayed: bool
) -> None:
    if parameter not in ddp.param_to_bucket_group:
        raise RuntimeError(f"{name} was put in place after Megatron's DDP was built, which would never reduce it")
    marked = bool(getattr(parameter, _MARK, False))
    native = _has_native_hook(ddp, parameter)
    if not (marked or is_delayed):
        if not native:
            raise RuntimeError(f"{name} has lost its mark {_MARK}, with which Megatron's DDP left it to its module")
        return
    if native and not ddp.ddp_config.delay_wgrad_compute:
        raise RuntimeError(
            f"{name} gets its gradient after backward, and Megatron's DDP reduces it before: expected "
            "DistributedDataParallelConfig(delay_wgrad_compute=True), got False"
        )
    if native:
        raise RuntimeError(
            f"{name} gets its gradient after backward, and Megatron's DDP reduces it before: it was not marked "
            f"{_MARK} when DDP was built, or replaced by a parameter that was not"
        )
    if not owners:
        raise RuntimeError(
            f"{name} is marked {_MARK}, and no module with {_REGISTERS} owns it: nobody would reduce its gradient"
        )
    if len(owners) > 1:
        raise RuntimeError(
            f"{name} belongs to {len(owners)} modules that delay its gradient, {' and '.join(owners)}: each would "
            "report it as reduced; expected one owner"
        )


def _has_native_hook(ddp: DistributedDataParallel, parameter: Tensor) -> bool:
    """Whether DDP hooked this parameter's accumulation into `.grad`, as it does for all that are not delayed."""
    with torch.enable_grad():
        grad_fn = parameter.expand_as(parameter).grad_fn
    assert grad_fn is not None
    node = grad_fn.next_functions[0][0]
    return any(node is held for held in ddp.grad_accs)


def _verify_placement(ddp: DistributedDataParallel, linears: dict[str, ExpertLinear]) -> None:
    """The parameter that computes is the one that the buffers hold, reduced over the ranks that share it."""
    for linear_name, linear in linears.items():
        for key, parameter in linear._parameters.items():
            if parameter is not None and (differences := linear.attributes_of(key).differences(parameter)):
                raise RuntimeError(f"{linear_name}.{key} carries {'; '.join(differences)}")
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    held: Any = ddp  # its list of buffers has the name of a method of nn.Module
    for kind, buffers in (("dense", held.buffers), ("expert", held.expert_parallel_buffers)):
        for buffer in buffers:
            for parameter in buffer.params:
                name = names.get(id(parameter))
                wanted = "dense" if getattr(parameter, "allreduce", True) else "expert"
                if name is not None and wanted != kind:
                    raise RuntimeError(
                        f"{name} has allreduce={wanted == 'dense'}, and had another value when DDP was built, which "
                        f"reduces it among the {kind} parameters"
                    )
                if name is not None and not _is_in_buffer(ddp, buffer, parameter):
                    raise RuntimeError(
                        f"{name} is stored outside of the buffer into which the distributed optimizer writes: its "
                        ".data was replaced after DDP was built"
                    )


def _is_in_buffer(ddp: DistributedDataParallel, buffer: Any, parameter: Tensor) -> bool:
    # Bytes of a quantized parameter are written in other ways; so is all that is gathered in the gradients' memory.
    is_bytes = isinstance(parameter, QuantizedTensor) or buffer.param_dtype != parameter.dtype
    if buffer.param_data is None or ddp.ddp_config.reuse_grad_buf_for_mxfp8_param_ag or is_bytes:
        return True
    start = buffer.param_index_map[parameter][0]
    return parameter.data_ptr() == buffer.param_data[start:].data_ptr()


def _times_reduced(ddp: DistributedDataParallel, parameter: Tensor) -> int:
    group = ddp.param_to_bucket_group.get(parameter)  # pyright: ignore[reportArgumentType]
    if group is None or not ddp.ddp_config.overlap_grad_reduce or not group.is_last_microbatch:
        return 0
    return group.per_param_grad_ready_counts.get(parameter, 0)  # pyright: ignore[reportArgumentType]


def _inner_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """The torch optimizers inside Megatron's."""
    for part in getattr(optimizer, "chained_optimizers", [] if optimizer is None else [optimizer]):
        inner = getattr(part, "optimizer", part)
        if isinstance(inner, torch.optim.Optimizer):
            yield inner
