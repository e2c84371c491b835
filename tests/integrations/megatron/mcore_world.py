"""What the cases share: Megatron's process groups, small configs, and its own experts as the reference."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_moe_layer_wise_logging_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from moe_runtime.integrations.megatron import with_grouped_experts

EXPERTS, D, F = 4, 16, 24


def _globals() -> dict[str, Any]:
    """Megatron's process groups and degrees: the module's variables."""
    return {k: v for k, v in vars(parallel_state).items() if k.startswith("_") and k.isupper()}


NOTHING = _globals()
MADE: dict[int, dict[str, Any]] = {}


def forget() -> None:
    """What an earlier case left in Megatron's modules: its groups, its losses by layer, and their scale."""
    vars(parallel_state).update(NOTHING)
    get_moe_layer_wise_logging_tracker().clear()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None


def groups(ep: int = 1) -> None:
    """Megatron's process groups over all ranks. Made once for each degree: gloo's threads outlive a group."""
    forget()
    if ep not in MADE:
        parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
        MADE[ep] = _globals()
    vars(parallel_state).update(MADE[ep])


def config(ep: int = 1, **options: Any) -> TransformerConfig:
    chosen = {
        "num_layers": 1,
        "hidden_size": D,
        "num_attention_heads": 2,
        "num_moe_experts": EXPERTS,
        "moe_ffn_hidden_size": F,
        "ffn_hidden_size": F,
        "expert_model_parallel_size": ep,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_topk": 2,
        "moe_router_dtype": "fp32",
        "moe_aux_loss_coeff": 0.01,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
        **options,
    }
    return TransformerConfig(**chosen)


def moe_layer(config: TransformerConfig, *, ours: bool, seed: int = 5, **options: Any) -> MoELayer:
    """Megatron's MoELayer with its SequentialMLP, or with our experts in place of it."""
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    if ours:
        spec = with_grouped_experts(spec, **options)
    torch.manual_seed(seed)
    layer = MoELayer(config, spec.submodules.mlp.submodules)
    layer.set_layer_number(1)
    return layer


def expert_weights(experts: nn.Module, gradients: bool = False) -> dict[str, Tensor]:
    """'linear_fc1.weight' and so on -> (E, ...) values or gradients, of their experts and of both layouts of ours."""
    of = (lambda p: p.grad) if gradients else (lambda p: p.detach())
    found: dict[str, list[Tensor]] = {}
    for name, parameter in experts.named_parameters():
        value = of(parameter).as_subclass(Tensor)
        parts = name.removeprefix("local_experts.").lstrip("0123456789.")
        found.setdefault(parts.rstrip("0123456789"), []).extend(
            value.unbind(0) if parameter.dim() == 3 or (parts.endswith("bias") and parameter.dim() == 2) else [value]
        )
    return {name: torch.stack(list(values)) for name, values in found.items()}


def rows(count: int, seed: int = 1) -> Tensor:
    """(count, 2, D) hidden states of this rank's own."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randn(count, 2, D, generator=generator).to(torch.cuda.current_device())
