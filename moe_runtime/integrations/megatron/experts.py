"""GroupedExperts: the `experts` submodule of Megatron's MoELayer, from our grouped layers.

Megatron routes, permutes and exchanges tokens; what arrives here are rows sorted by local expert.
"""

# R routed rows   D model (or latent) width   F expert width   E local experts

import copy
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from moe_runtime.functional import Activation
from moe_runtime.integrations.megatron.checkpoint import ExpertsPlace, sharded_entries
from moe_runtime.integrations.megatron.linear import ExpertLinear, ExpertMLP


class GroupedExperts(MegatronModule):
    """All experts of a rank: children `linear_fc1` (D -> 2F, gate before up, or F ungated) and `linear_fc2` (F -> D).

    num_local_experts      E: Megatron's MoELayer passes it, the config and the process groups
    single_grouped_weight  one weight (E, F, D); False: weight0, weight1, ... Either loads the other's checkpoints
    delay_wgrad_compute, fuse_wgrad_accumulation    None: as the config says for the whole model
    own_optimizer          keep the experts in buffers and an optimizer of their own at expert degree 1 too, and not, as
                           Megatron, from degree 2 on: then a checkpoint with its optimizer opens at any degree

    Of the config are read: widths, latent size, bias, activation, `moe_apply_probs_on_input`, initialization, dtype,
    `delay_wgrad_compute`, `gradient_accumulation_fusion`. Built under `quantized_model_init`, weights are stored
    quantized. Raises ValueError, naming it, for an option that these experts would not honor.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        submodules: object = None,
        single_grouped_weight: bool = True,
        delay_wgrad_compute: bool | None = None,
        fuse_wgrad_accumulation: bool | None = None,
        own_optimizer: bool = False,
    ) -> None:
        super().__init__(config=config)
        if submodules is not None:
            raise ValueError(f"GroupedExperts has no submodules to choose, got {submodules!r}")
        _check_honored(config)
        self.num_local_experts = num_local_experts
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        self.ep_group, self.tp_group, self.dp_group = groups.ep, groups.expt_tp, groups.expt_dp
        assert config.moe_ffn_hidden_size is not None, "Megatron's config fills it in"
        mlp = ExpertMLP(
            num_local_experts,
            config.moe_latent_size or config.hidden_size,
            config.moe_ffn_hidden_size,
            activation=activation_of(config),
            bias=config.add_bias_linear,
            single_grouped_weight=single_grouped_weight,
            delay_wgrad_compute=_chosen(delay_wgrad_compute, config.delay_wgrad_compute),
            fuse_wgrad_accumulation=_chosen(fuse_wgrad_accumulation, config.gradient_accumulation_fusion),
            dtype=config.params_dtype,
            device="meta",
        )
        assert isinstance(mlp.gate_up, ExpertLinear) and isinstance(mlp.down, ExpertLinear)
        self.linear_fc1, self.linear_fc2 = mlp.gate_up, mlp.down
        # Not a child: the names of parameters are Megatron's.
        self._mlp = (mlp,)
        # The dense group of an expert is another one than its own wherever its ranks are grouped otherwise.
        same_ranks = self.ep_group.size() == 1 and config.tensor_model_parallel_size == self.tp_group.size()
        ordinary = same_ranks and not own_optimizer
        stride = 2 if config.gated_linear_unit else 1
        self.linear_fc1.mark(partition_dim=0, partition_stride=stride, allreduce=ordinary)
        self.linear_fc2.mark(partition_dim=1, partition_stride=1, allreduce=ordinary)
        if not config.init_model_with_meta_device:
            self.to_empty(device="cpu" if config.use_cpu_initialization else torch.cuda.current_device())
            self.reset_parameters()

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """(R, D) rows sorted by expert -> (R, D), and no bias: it is added already.

        permuted_probs  (R,) routing weights; their product with the activation, as Megatron's own experts take it
        """
        x_RD, gate_R = permuted_local_hidden_states, permuted_probs
        if self.config.overlap_moe_expert_parallel_comm and self.num_local_experts == 1:
            # This order frees what the exchange gave after forward; sorting by expert copies it, where it must.
            x_RD = x_RD.clone()
        if self.config.moe_apply_probs_on_input:
            x_RD, gate_R = (gate_R[:, None] * x_RD).to(x_RD.dtype), None
        return self._mlp[0](x_RD, tokens_per_expert, gate_R), None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Each expert as Megatron's own: `init_method` and `output_layer_init_method` of the config, biases zero.

        On the CPU an expert's values depend on its global id, and not on how many ranks share the experts.
        """
        if not self.config.perform_initialization:
            return
        on_cpu = self.config.use_cpu_initialization
        own = range(self.ep_group.rank() * self.num_local_experts, (self.ep_group.rank() + 1) * self.num_local_experts)
        ids = range(self.ep_group.size() * self.num_local_experts) if on_cpu else own
        methods: Any = (self.config.init_method, self.config.output_layer_init_method)
        linears = (self.linear_fc1, self.linear_fc2)
        values: list[list[Tensor]] = [[], []]
        tracker: Any = get_cuda_rng_tracker()
        with nullcontext() if on_cpu else tracker.fork(get_expert_parallel_rng_tracker_name()):
            for e in ids:
                for linear, method, kept in zip(linears, methods, values, strict=True):
                    shape = (linear.out_features, linear.in_features)
                    device = next(linear.parameters()).device
                    # As Megatron: in float32 on the CPU, in the parameter's own precision on a GPU.
                    dtype = torch.float32 if on_cpu else self.config.params_dtype
                    value = torch.empty(shape, dtype=dtype, device=device)
                    method(value)
                    if e in own:
                        kept.append(value.to(self.config.params_dtype))
        for linear, kept in zip(linears, values, strict=True):
            _fill(linear, kept)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """For Megatron's checkpoints: one entry for each expert of all ranks, as its SequentialMLP writes them."""
        place = ExpertsPlace(
            first=self.ep_group.rank() * self.num_local_experts,
            total=self.ep_group.size() * self.num_local_experts,
            replica_id=(0, 0, self.dp_group.rank()),
            sharded_offsets=tuple(sharded_offsets),
            singleton=bool((metadata or {}).get("singleton_local_shards", False)),
        )
        sharded = {}
        for name in ("linear_fc1", "linear_fc2"):
            halves = name == "linear_fc1" and self.config.gated_linear_unit
            for key, entry in sharded_entries(getattr(self, name), f"{prefix}experts.{name}", place, halves).items():
                sharded[f"{prefix}{name}.{key}"] = entry
        return sharded

    def need_backward_dw(self) -> bool:
        """Whether `backward_dw` must be called after each backward."""
        return any(linear.need_backward_dw() for linear in (self.linear_fc1, self.linear_fc2))

    def backward_dw(self) -> None:
        """The weight gradients of the oldest backward that waits, last layer first; nothing unless delayed."""
        for linear in (self.linear_fc2, self.linear_fc1):
            if any(parameter.requires_grad for parameter in linear.wgrad_parameters("weight")):
                linear.backward_dw()


def _chosen(option: bool | None, configured: bool) -> bool:
    return configured if option is None else option


def _fill(linear: ExpertLinear, values: list[Tensor]) -> None:
    weights = linear.wgrad_parameters("weight")
    sources = [torch.stack(values)] if linear.single_grouped_weight else values
    for weight, source in zip(weights, sources, strict=True):
        weight.copy_(source)
    for bias in linear.wgrad_parameters("bias") if linear.use_bias else ():
        bias.zero_()


def activation_of(config: TransformerConfig) -> Activation:
    """The activation that the config's function, gate, offset and clamp make. ValueError for one that is not here."""
    shape = (config.activation_func, bool(config.gated_linear_unit))
    limits = (config.glu_linear_offset, config.activation_func_clamp_value)
    if shape == (squared_relu, False):
        return "relu2"
    known: dict[Any, Activation] = {
        (F.silu, True, 0.0, None): "swiglu",
        (F.gelu, True, 0.0, None): "geglu",
        (quick_gelu, True, 1.0, 7.0): "swiglu_clamped",
    }
    found = known.get((*shape, *limits))
    if found is None:
        raise ValueError(
            "GroupedExperts computes gated silu, gated gelu, gated quick_gelu with offset 1 and clamp 7, or "
            f"squared_relu; got activation_func={getattr(shape[0], '__name__', shape[0])}, "
            f"gated_linear_unit={shape[1]}, glu_linear_offset={limits[0]}, activation_func_clamp_value={limits[1]}"
        )
    return found


def _check_honored(config: TransformerConfig) -> None:
    """ValueError for options of Megatron's experts that these would have to ignore."""
    recomputed = (config.recompute_modules or ()) if config.recompute_granularity == "selective" else ()
    refused = {
        f"expert_tensor_parallel_size={config.expert_tensor_parallel_size}: an expert is whole on its rank": (
            (config.expert_tensor_parallel_size or 1) > 1
        ),
        f"fp8={config.fp8}, fp4={config.fp4}: use moe_runtime's quantized_model_init and autocast": (
            bool(config.fp8 or config.fp4)
        ),
        "recompute_modules with moe_act: a fused backward makes the activations again already": "moe_act" in recomputed,
        "fine_grained_activation_offloading": bool(config.fine_grained_activation_offloading),
        "activation_func_fp8_input_store": bool(config.activation_func_fp8_input_store),
        "use_te_activation_func": bool(config.use_te_activation_func),
    }
    for reason, applies in refused.items():
        if applies:
            raise ValueError(f"GroupedExperts does not support {reason}; unset it, or keep Megatron's experts")


def experts_spec(**options: Any) -> ModuleSpec:
    """What `MoESubmodules(experts=...)` takes; options are GroupedExperts' keywords."""
    return ModuleSpec(module=GroupedExperts, params=options)


def with_grouped_experts(spec: Any, **options: Any) -> Any:
    """A copy of a layer's or block's spec in which every MoELayer has our experts.

    Raises ValueError where the spec has no MoELayer: a dense model, or num_experts=None.
    """
    spec = copy.deepcopy(spec)
    if not _replace_experts(spec, experts_spec(**options)):
        raise ValueError("expected a spec with an MoELayer, found none: was it made with num_experts?")
    return spec


def _replace_experts(spec: Any, experts: ModuleSpec) -> int:
    """Write `experts` into every MoESubmodules that can be reached; how many there were."""
    if hasattr(spec, "layer_specs"):
        return sum(_replace_experts(layer, experts) for layer in spec.layer_specs)
    submodules = getattr(spec, "submodules", None)
    if submodules is None:  # newer versions hold them in a functools.partial
        submodules = getattr(spec, "keywords", {}).get("submodules")
    if submodules is None:
        return 0
    if hasattr(submodules, "experts"):
        submodules.experts = experts
        return 1
    return _replace_experts(submodules.mlp, experts) if hasattr(submodules, "mlp") else 0
