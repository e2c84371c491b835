"""Our grouped experts inside Megatron-Core. The only package that imports megatron.

spec = with_grouped_experts(get_gpt_layer_local_spec(num_experts=8))     its MoELayer, router, dispatcher; our experts
model = GPTModel(config, spec, ...)
"""

try:
    import megatron.core as _megatron_core  # noqa: F401
except ImportError as error:
    raise ImportError(
        "moe_runtime.integrations.megatron needs: pip install megatron-core (0.16.1 on Python 3.11, 0.19.2 on 3.12)"
    ) from error

from moe_runtime.integrations.megatron.attributes import ParameterAttributes
from moe_runtime.integrations.megatron.experts import GroupedExperts, experts_spec, with_grouped_experts
from moe_runtime.integrations.megatron.linear import ExpertLinear
from moe_runtime.integrations.megatron.protocol import verify
from moe_runtime.integrations.megatron.quantized import with_quantized_masters

__all__ = [
    "ExpertLinear",
    "GroupedExperts",
    "ParameterAttributes",
    "experts_spec",
    "verify",
    "with_grouped_experts",
    "with_quantized_masters",
]
