"""Megatron's combined 1F1B order, real plan and nodes, over a GPT with our experts."""

from typing import Any

import torch
from mcore_world import EXPERTS, config, groups
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import Float16Module
from torch import Tensor

import moe_runtime as mr
from moe_runtime.integrations.megatron import verify, with_grouped_experts

VOCABULARY, LENGTH, LAYERS, MICROBATCHES = 32, 8, 2, 3


def _model(combined: bool, coordinator: bool, num_experts: int = EXPERTS, **experts: Any) -> tuple[Any, Any, Any]:
    groups(2)
    cfg = config(
        2,
        num_layers=LAYERS,
        num_moe_experts=num_experts,
        bf16=True,
        params_dtype=torch.bfloat16,
        overlap_moe_expert_parallel_comm=combined,
        delay_wgrad_compute=combined,
        moe_aux_loss_coeff=0.0,
        moe_router_load_balancing_type="none",
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    spec = with_grouped_experts(get_gpt_layer_local_spec(num_experts=num_experts, moe_grouped_gemm=False), **experts)
    torch.manual_seed(11)
    model = GPTModel(cfg, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH)
    if combined:
        # Attention's weight gradients stay in their place: without Transformer Engine these layers cannot delay them.
        for module in model.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.backward_dw = lambda: None  # pyright: ignore
    owner = mr.WgradCoordinator("deferred").attach(model) if coordinator else None
    ddp = DistributedDataParallel(
        cfg,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=combined, bucket_size=2000, delay_wgrad_compute=combined
        ),
        Float16Module(cfg, model),
    )
    verify(ddp)
    cfg.no_sync_func = ddp.no_sync
    return cfg, ddp, owner


def _batches() -> list[Tensor]:
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(77 + rank)
    return [torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator) for _ in range(MICROBATCHES)]


def _run(ddp: Any, events: list[str]) -> dict[str, Tensor]:
    """Two iterations in Megatron's order; what the second reduced."""
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    positions = torch.arange(LENGTH).expand(2, LENGTH)

    def forward_step(iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
        tokens = next(iterator)
        inputs = (tokens[:, :-1], positions, mask)
        loss = lambda output: (output.float().mean(), {"loss": output.float().mean().detach()})  # noqa: E731
        if return_schedule_plan:
            return ddp.module.module.build_schedule_plan(*inputs, labels=tokens[:, 1:]), loss
        return model(*inputs, labels=tokens[:, 1:]), loss

    for _ in range(2):
        events.clear()
        ddp.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(_batches()),
            model=[ddp],
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        ddp.finish_grad_sync()
    return {name: p.main_grad.clone() for name, p in ddp.module.named_parameters()}


def combined(coordinator: bool, layout: dict[str, Any]) -> tuple[dict[str, float], list[str]]:
    """(largest relative difference of each gradient to Megatron's plain order, the order of the experts' events)"""
    _, plain, _ = _model(False, False, **layout)
    expected = _run(plain, [])
    _, ddp, _ = _model(True, coordinator, **layout)
    events: list[str] = []
    for i, layer in enumerate(ddp.module.module.decoder.layers):
        _record(events, f"layer {i}", layer.mlp)
    got = _run(ddp, events)
    assert expected.keys() == got.keys()
    differ = {
        name: ((got[name] - value).abs().max() / value.abs().max()).item()
        for name, value in expected.items()
        if not got[name].equal(value)
    }
    assert all(value.abs().max() > 0 for name, value in expected.items() if "linear_fc" in name)
    return differ, events


def _record(events: list[str], name: str, mlp: Any) -> None:
    backward_dw, forward, dispatch = mlp.experts.backward_dw, mlp.experts.forward, mlp.dispatch

    def dw() -> None:
        events.append(f"{name} dw")
        backward_dw()

    def compute(*args: Any) -> Any:
        events.append(f"{name} forward")
        output, bias = forward(*args)
        output.register_hook(lambda _: events.append(f"{name} dgrad"))
        return output, bias

    def launch(hidden: Tensor, probs: Tensor) -> Any:
        events.append(f"{name} dispatch")
        hidden.register_hook(lambda _: events.append(f"{name} dispatch backward"))
        return dispatch(hidden, probs)

    mlp.experts.backward_dw, mlp.experts.forward, mlp.dispatch = dw, compute, launch
