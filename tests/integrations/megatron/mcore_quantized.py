"""Quantized experts under Megatron's optimizers: where masters start, what is written back."""

from typing import Any

import torch
import torch.distributed as dist
from mcore_world import config, groups, moe_layer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor, nn

import moe_runtime as mr
from moe_runtime.integrations.megatron import verify, with_quantized_masters
from moe_runtime.tensor import GroupedTensor, QuantizedTensor

RECIPES = {
    "mxfp8": mr.recipes.MXFP8BlockScaling(),
    "nvfp4": mr.recipes.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
}
D, F = 64, 32


def _config(ep: int, **options: Any) -> Any:
    chosen = {"hidden_size": D, "moe_ffn_hidden_size": F, "bf16": True, "params_dtype": torch.bfloat16, **options}
    return config(ep, **chosen)


def _layer(cfg: Any, recipe: str, keep: bool, **options: Any) -> nn.Module:
    with mr.quantized_model_init(recipe=RECIPES[recipe], preserve_high_precision_init_val=keep):
        return moe_layer(cfg, ours=True, **options)


def _wrap(cfg: Any, layer: nn.Module, distopt: bool, **options: Any) -> Any:
    chosen = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": distopt,
        "reuse_grad_buf_for_mxfp8_param_ag": distopt,
        "fp8_param_gather": distopt,
        **options,
    }
    return DistributedDataParallel(cfg, DistributedDataParallelConfig(**chosen), layer)


def _optimizer(ddp: Any, distopt: bool) -> Any:
    options = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        bf16=True,
        clip_grad=1.0,
        use_distributed_optimizer=distopt,
        reuse_grad_buf_for_mxfp8_param_ag=distopt,
    )
    return with_quantized_masters([ddp], lambda: get_megatron_optimizer(options, [ddp]))


def _experts(ddp: Any) -> dict[str, Any]:
    return {name: p for name, p in ddp.module.named_parameters() if isinstance(p, QuantizedTensor)}


def _tensors(parameter: Any) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in parameter.records.tensors().items()}


def masters(recipe: str, keep: bool, distopt: bool, layout: dict[str, Any], ep: int) -> dict[str, dict[str, Any]]:
    """Of each weight: its flat values at the start, and what this rank's master holds of them."""
    groups(ep)
    cfg = _config(ep)
    ddp = _wrap(cfg, _layer(cfg, recipe, keep, **layout), distopt)
    start = {
        name: (p.get_high_precision_init_val() if keep else p.dequantize()).float().flatten()
        for name, p in _experts(ddp).items()
    }
    optimizer = _optimizer(ddp, distopt)
    verify(ddp, optimizer)
    found = {}
    for name, p in _experts(ddp).items():
        main = getattr(p, "main_param", None)
        place = None
        if distopt and main is not None:
            part = next(o for o in getattr(optimizer, "chained_optimizers", [optimizer]) if p in o.model_param_gbuf_map)
            span = part._get_model_param_range_map(p)["param"]
            place = (span.start, span.end)
        found[name] = {
            "start": start[name],
            "main": None if main is None else main.detach().float().flatten().clone(),
            "place": place,
            "kept": p.get_high_precision_init_val() is not None,
        }
    return found


def write_back(recipe: str, distopt: bool, layout: dict[str, Any], delayed: bool) -> dict[str, dict[str, bool]]:
    """After two steps, of each weight: did it move, and is every stored direction its masters', rounded."""
    groups()
    cfg = _config(1)
    layer = _layer(cfg, recipe, True, delay_wgrad_compute=delayed, **layout)
    ddp = _wrap(cfg, layer, distopt, delay_wgrad_compute=delayed)
    before = {name: _tensors(p) for name, p in _experts(ddp).items()}
    optimizer = _optimizer(ddp, distopt)
    verify(ddp, optimizer)
    for step in range(2):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        x = torch.randn(9, 2, D, generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))
        ddp(x.bfloat16())[0].float().square().mean().backward()
        if delayed:
            layer.backward_dw()  # pyright: ignore
        ddp.finish_grad_sync()
        assert optimizer.step()[0]
    found = {}
    for name, p in _experts(ddp).items():
        expected = _requantized(p, _whole_master(p, optimizer, distopt))
        held, want = _tensors(p), _tensors(expected)
        found[name] = {
            "moved": any(not held[key].equal(before[name][key]) for key in held),
            "directions": p.rowwise and p.columnwise,
            **{key: value.equal(want[key]) for key, value in held.items()},
        }
    return found


def _whole_master(p: Any, optimizer: Any, distopt: bool) -> Tensor:
    if not distopt:
        return p.main_param.detach()  # quantized from float32: nothing is gathered
    whole = torch.zeros(p.numel(), dtype=torch.bfloat16)
    if p.main_param is not None:
        part = next(o for o in getattr(optimizer, "chained_optimizers", [optimizer]) if p in o.model_param_gbuf_map)
        span = part._get_model_param_range_map(p)["param"]
        whole[span.start : span.end] = p.main_param.bfloat16()
    dist.all_reduce(whole)
    return whole.view(p.shape)


def _requantized(p: Any, values: Tensor) -> Any:
    make = GroupedTensor.pack if p.dim() == 3 else QuantizedTensor.quantized
    return make(values, p.quantizer)


def refusal(fault: str) -> str:
    """What is said of a model that could not be trained."""
    groups()
    cfg = _config(1, **({"params_dtype": torch.float32, "bf16": False} if fault == "float32" else {}))
    layer = _layer(cfg, "mxfp8", False)
    try:
        if fault == "no switch":
            ddp = _wrap(cfg, layer, True)
            ddp.ddp_config.reuse_grad_buf_for_mxfp8_param_ag = False
        elif fault == "storage remap":
            _wrap(cfg, layer, True, reuse_grad_buf_for_mxfp8_param_ag=False)
        else:
            ddp = _wrap(cfg, layer, True)
        with_quantized_masters([ddp], lambda: None)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
