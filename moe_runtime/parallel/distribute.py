"""distribute(): split the experts, then wrap the model in FSDP2 or DDP so that every gradient is divided by the full
data-parallel size.

A gradient of an expert already sums over the tokens of its whole expert group. Dividing by the expert-data size alone
would leave it `expert` times too large, so the divisor is the same for every parameter: the number of ranks.
"""

# E experts over the whole group

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from moe_runtime.comm.layout import ParallelLayout, attach_layout, build_meshes
from moe_runtime.nn import RoutedExperts
from moe_runtime.parallel.plan import ParallelPlan
from moe_runtime.runtime import GradientBuckets, WgradCoordinator
from moe_runtime.tensor import QuantizedTensor

_MARK = "skip_backward_post_hook"


def distribute(model: nn.Module, plan: ParallelPlan, coordinator: WgradCoordinator | None = None) -> nn.Module:
    """Split and wrap `model` by `plan`; returns the module to call (for DDP, the wrapper).

    The model may hold parameters on meta under FSDP2 (materialize afterwards); DDP needs real ones. Modules inside a
    `ModuleList` are FSDP2's units, and each set of routed experts is a unit of its own on the expert-data mesh.
    A coordinator is attached, and told how deferred gradients are reduced; accumulate microbatches under
    `gradient_sync`, which leaves them to it.
    Raises ValueError on every rank, before any collective, for sizes that do not fit.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    shard = plan.shard_degree(world)
    experts = {name: module for name, module in model.named_modules() if isinstance(module, RoutedExperts)}
    _check_experts(experts, plan, world, shard)
    layout = ParallelLayout(data=plan.data, replicate=plan.replicate, shard=shard, expert=plan.expert)
    if world > 1 or plan.data != "none":
        device_type = _device_type(model)
        dense, expert_mesh = build_meshes(device_type, replicate=plan.replicate, shard=shard, expert=plan.expert)
        layout = replace(layout, dense_mesh=dense, expert_mesh=expert_mesh)
    if plan.expert > 1:
        assert layout.expert_group is not None
        for module in experts.values():
            module.shard_experts(layout.expert_group)
        names = (f"{prefix}.{name}" for prefix, module in experts.items() for name, _ in module.named_parameters())
        layout = replace(layout, expert_parameters=frozenset(names))
    if coordinator is not None:
        coordinator.attach(model)
    wrapped = _wrap(model, plan, layout, coordinator)
    attach_layout(wrapped, layout)
    attach_layout(model, layout)
    return wrapped


def _device_type(model: nn.Module) -> str:
    """Where the parameters are, or, on meta, where the process group says they will be."""
    device_type = next(model.parameters()).device.type
    if device_type != "meta":
        return device_type
    # A machine may have GPUs that a gloo run does not use.
    uses_gpus = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())
    return "cuda" if uses_gpus else "cpu"


def _check_experts(experts: dict[str, RoutedExperts], plan: ParallelPlan, world: int, shard: int) -> None:
    if plan.expert > 1 and not experts:
        raise ValueError(f"expert={plan.expert} needs RoutedExperts modules in the model, found none")
    for name, module in experts.items():
        if module.config.num_experts % plan.expert:
            raise ValueError(
                f"{name} has {module.config.num_experts} experts, which expert={plan.expert} of {world} ranks "
                "does not divide"
            )
        if plan.data != "none" and module.config.fuse_wgrad_accumulation:
            raise ValueError(
                f"{name} accumulates into main_grad, which neither FSDP2 nor DDP reduces: expected "
                f"fuse_wgrad_accumulation=False with data={plan.data!r}, got True"
            )
        local, degree = module.config.num_experts // plan.expert, shard // plan.expert
        uneven = [p for p in module.parameters() if p.dim() == 3 and local % degree and p.shape[1] % degree]
        quantized = [p for p in module.parameters() if isinstance(p, QuantizedTensor)]
        if plan.data == "fsdp2" and any(p.dim() == 2 for p in quantized):
            raise ValueError(
                f"{name}: FSDP2 shards quantized weights by whole experts, which separate ones cannot be: expected "
                "single_grouped_weight=True or data='ddp', got separate quantized weights and data='fsdp2'"
            )
        if plan.data == "fsdp2" and local % degree and quantized:
            raise ValueError(_unsharded_quantized(name, module.config.num_experts, plan, world, shard))
        if plan.data == "fsdp2" and plan.expert > 1 and uneven:
            raise ValueError(
                f"{name}: the {degree} expert-data ranks divide neither its {local} local experts nor its "
                f"{uneven[0].shape[1]} weight rows; choose another expert or replicate degree"
            )


def _unsharded_quantized(name: str, num_experts: int, plan: ParallelPlan, world: int, shard: int) -> str:
    legal = [
        degree
        for degree in range(plan.expert, shard + 1, plan.expert)
        if world % degree == 0 and (num_experts // plan.expert) % (degree // plan.expert) == 0
    ]
    return (
        f"{name}: quantized experts are sharded whole, and shard={shard} with expert={plan.expert} does not divide "
        f"{num_experts} experts evenly; expected a shard degree of at most {max(legal)}: "
        f"shard={max(legal)}, replicate={world // max(legal)}"
    )


def _wrap(
    model: nn.Module, plan: ParallelPlan, layout: ParallelLayout, coordinator: WgradCoordinator | None
) -> nn.Module:
    deferred = coordinator if coordinator is not None and coordinator.schedule == "deferred" else None
    if plan.data == "fsdp2":
        _fully_shard(model, plan, layout, experts_apart=layout.expert > 1 or deferred is not None)
        if deferred is not None:
            deferred.reduce_with_fsdp(model)
    if plan.data == "ddp":
        return _data_parallel(model, layout, deferred)
    return model


def _fully_shard(model: nn.Module, plan: ParallelPlan, layout: ParallelLayout, *, experts_apart: bool) -> None:
    assert layout.dense_mesh is not None and layout.expert_mesh is not None
    dense = _shard_mesh(layout.dense_mesh, "shard", plan.replicate)
    options = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=plan.param_dtype, reduce_dtype=plan.reduce_dtype),
        "reshard_after_forward": plan.reshard_after_forward,
    }
    if experts_apart:
        expert_data = _shard_mesh(layout.expert_mesh, "expert_data", plan.replicate)
        for module in model.modules():
            if isinstance(module, RoutedExperts):
                _shard_experts(module, expert_data, layout, options)
    for block in _blocks(model):
        fully_shard(block, mesh=dense, **options)
    fully_shard(model, mesh=dense, **options)


def _shard_experts(module: RoutedExperts, mesh: DeviceMesh, layout: ParallelLayout, options: dict) -> None:
    degree = layout.shard // layout.expert
    local = module.config.num_experts // layout.expert

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(1 if parameter.dim() == 3 and local % degree else 0)

    # Tokens come in the compute dtype already, and routing weights stay fp32, as they do without sharding.
    policy = replace(options["mp_policy"], cast_forward_inputs=False)
    unit = fully_shard(module, mesh=mesh, shard_placement_fn=placement, **{**options, "mp_policy": policy})
    assert isinstance(unit, FSDPModule)
    unit.set_gradient_divide_factor(float(layout.data_parallel_size))
    if degree > 1:
        # gloo has no pre-multiplied sum. On a shard mesh of one rank torch divides by itself, and would do so twice.
        unit.set_force_sum_reduction_for_comms(True)


def _shard_mesh(mesh: DeviceMesh, axis: str, replicate: int) -> DeviceMesh:
    return mesh["replicate", axis] if replicate > 1 else mesh[axis]


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Repeated blocks: children of the outermost module lists that hold parameters."""
    found: list[nn.Module] = []
    for module in model.children():
        if isinstance(module, nn.ModuleList):
            found += [child for child in module if next(child.parameters(), None) is not None]
        else:
            found += _blocks(module)
    return found


def _data_parallel(model: nn.Module, layout: ParallelLayout, deferred: WgradCoordinator | None) -> nn.Module:
    assert layout.expert_mesh is not None
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("data='ddp' needs materialized parameters, got some on meta; use 'fsdp2' or materialize first")
    delayed = {name for name, p in model.named_parameters() if deferred and getattr(p, _MARK, False)}
    ours = layout.expert_parameters | delayed
    if not any(p.requires_grad and name not in ours for name, p in model.named_parameters()):
        raise ValueError(
            "data='ddp' needs a trainable parameter outside of the experts that are split or delayed: train one, or "
            "choose data='fsdp2' or expert=1"
        )
    # DDP broadcasts by flattening, which the bytes of a quantized tensor do not survive; then all is done here.
    stored = any(isinstance(p, QuantizedTensor) for p in model.parameters())
    if ours:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(ours))
    wrapped = DistributedDataParallel(model, init_sync=not stored)
    if stored:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name not in ours:
                dist.broadcast(tensor.detach(), src=0)
    if not ours:
        return wrapped
    group = _expert_data_group(layout)
    parameters = [p for name, p in model.named_parameters() if name in ours]
    if group is not None:
        # What DDP ignores it does not broadcast; replicas of an expert must start equal as well.
        for parameter in parameters:
            dist.broadcast(parameter.detach(), group=group, group_src=0)
    for late in (False, True):
        members = [p for name, p in model.named_parameters() if name in ours and p.requires_grad]
        buckets = GradientBuckets(
            [p for p in members if bool(deferred and getattr(p, _MARK, False)) == late],
            group=group,
            scale=1.0 / layout.data_parallel_size,
            should_reduce=lambda: wrapped.require_backward_grad_sync,
            on_gradient=not late,
        )
        if late and deferred is not None:
            deferred.reduce_with_buckets(buckets)
    return wrapped


def _expert_data_group(layout: ParallelLayout) -> dist.ProcessGroup | None:
    """All ranks that hold a replica of this rank's experts: over replicate and expert_data together."""
    if layout.world == layout.expert:
        return None
    assert layout.expert_mesh is not None
    own: dist.ProcessGroup | None = None
    ranks = layout.expert_mesh.mesh  # (replicate, expert, expert_data)
    for index in range(layout.expert):
        members = ranks[:, index, :].reshape(-1).tolist()
        group = dist.new_group(members)  # every rank creates every group, or creation hangs
        if layout.rank in members:
            own = group if isinstance(group, dist.ProcessGroup) else None
    return own
