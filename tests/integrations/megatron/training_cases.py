"""Steps of a small model under Megatron's own DDP and optimizers, our experts' schedules against the inline one."""

import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from mcore_world import D, config, groups, moe_layer, rows
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor, nn

import moe_runtime as mr
from moe_runtime.integrations.megatron import verify

STEPS, MICROBATCHES = 5, 3
BASELINES: dict["Case", dict[str, Tensor]] = {}


@dataclass(frozen=True, kw_only=True)
class Case:
    world: int = 2
    ep: int = 1
    distopt: bool = False
    overlap: bool = False
    schedule: str = "inline"
    layout: str = "grouped"
    precision: str = "fp32"
    fused: bool = False
    own_optimizer: bool = False

    def __str__(self) -> str:
        parts = [self.schedule, self.layout, self.precision, f"{self.world}ranks", f"ep{self.ep}"]
        parts += [name for name in ("distopt", "overlap", "fused") if getattr(self, name)]
        return "-".join(parts)


class Net(nn.Module):
    """A dense layer and two of Megatron's MoE layers with our experts."""

    def __init__(self, case: Case, cfg: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.dense = nn.Linear(D, D, bias=False, dtype=cfg.params_dtype, device=torch.cuda.current_device())
        options: dict[str, Any] = {
            "single_grouped_weight": case.layout == "grouped",
            "delay_wgrad_compute": case.schedule != "inline",
            "fuse_wgrad_accumulation": case.fused,
            "own_optimizer": case.own_optimizer,
        }
        self.layers = nn.ModuleList([moe_layer(cfg, ours=True, seed=seed, **options) for seed in (5, 6)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        for layer in self.layers:
            x = x + layer(x)[0]
        return x.float().square().mean()

    def backward_dw(self) -> None:
        for layer in reversed(self.layers):
            layer.backward_dw()  # pyright: ignore


def build(case: Case, *, check: bool = True, **ddp_options: Any) -> tuple[DistributedDataParallel, Any, Any]:
    """(the model under DDP, its optimizer, the coordinator or None)"""
    groups(case.ep)
    low = case.precision == "bf16"
    cfg = config(case.ep, bf16=low, params_dtype=torch.bfloat16 if low else torch.float32)
    net = Net(case, cfg)
    coordinator = mr.WgradCoordinator("deferred").attach(net) if case.schedule == "flush" else None
    ddp_config = DistributedDataParallelConfig(
        **{
            "grad_reduce_in_fp32": True,
            "overlap_grad_reduce": case.overlap,
            "overlap_param_gather": case.overlap and case.distopt,
            "use_distributed_optimizer": case.distopt,
            "bucket_size": 500 if case.overlap else None,
            "delay_wgrad_compute": case.schedule != "inline",
            **ddp_options,
        }
    )
    ddp = DistributedDataParallel(cfg, ddp_config, net)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            weight_decay=0.1,
            clip_grad=0.0,
            bf16=low,
            use_distributed_optimizer=case.distopt,
            overlap_param_gather=case.overlap and case.distopt,
        ),
        [ddp],
    )
    if check:
        verify(ddp, optimizer)
    return ddp, optimizer, coordinator


def train(case: Case, steps: int = STEPS) -> dict[str, Tensor]:
    """Every step's reduced gradients and the weights after the last, by parameter; experts' stacked."""
    ddp, optimizer, coordinator = build(case)
    seen = {}
    for step in range(steps):
        iteration(ddp, optimizer, coordinator, case.schedule, step)
        seen.update({f"step {step} {name}": value for name, value in gradients(ddp).items()})
        stepped, _, _ = optimizer.step()
        assert stepped
    if case.overlap and case.distopt:
        ddp.start_param_sync(force_sync=True)
    seen.update(stacked({name: p.detach().clone() for name, p in ddp.module.named_parameters()}))
    return seen


def iteration(ddp: Any, optimizer: Any, coordinator: Any, schedule: str, step: int) -> None:
    """Forward, backward and reduction of one step."""
    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    net = ddp.module
    inputs = rows(MICROBATCHES * 3, seed=20 + step).to(net.dense.weight.dtype).split(3)
    for index, x in enumerate(inputs):
        last = index == MICROBATCHES - 1
        with nullcontext() if last else ddp.no_sync():
            (ddp(x) / MICROBATCHES).backward()
            if schedule == "each":
                net.backward_dw()
            elif schedule == "carry" and not last and index > 0:
                net.backward_dw()  # of the microbatch before
    if schedule == "carry":
        net.backward_dw()
        net.backward_dw()
    if coordinator is not None:
        coordinator.flush()
    ddp.finish_grad_sync()


def gradients(ddp: Any) -> dict[str, Tensor]:
    """Reduced main_grad of every parameter, put together from the ranks' parts where they are scattered."""
    names = {id(p): name for name, p in ddp.module.named_parameters()}
    found = {}
    for buffers, group in (
        (ddp.buffers, parallel_state.get_data_parallel_group()),
        (ddp.expert_parallel_buffers, parallel_state.get_expert_data_parallel_group()),
    ):
        for bucket in (bucket for buffer in buffers for bucket in buffer.buckets):
            data = bucket.grad_data.clone()
            if ddp.ddp_config.use_distributed_optimizer:
                own = data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(data, own, group=group)
            for p in bucket.params_list:
                start, end = bucket.param_to_index[p]
                if ddp.ddp_config.use_distributed_optimizer:  # parameters begin at multiples of 64
                    start = p.main_grad.storage_offset() - bucket.grad_data.storage_offset()
                    end = start + p.numel()
                found[names[id(p)]] = data[start:end].view(p.shape).clone()
    return stacked(found)


def stacked(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Separate experts' tensors, by id, as the stacked layout has them; plain tensors."""
    result: dict[str, Any] = {}
    for name in sorted(values):
        value = values[name].as_subclass(Tensor)
        base = name.rstrip("0123456789")
        if base != name:
            result.setdefault(base, []).append(value)
        else:
            result[name] = value
    return {name: torch.stack(v) if isinstance(v, list) else v for name, v in result.items()}


def compare(case: Case) -> tuple[int, dict[str, float]]:
    """How many tensors were compared, and the largest relative difference of those that differ from inline training."""
    baseline = dataclasses.replace(case, overlap=False, schedule="inline", layout="grouped")
    if baseline not in BASELINES:
        BASELINES[baseline] = train(baseline)
    expected, got = BASELINES[baseline], train(case)
    assert expected.keys() == got.keys(), expected.keys() ^ got.keys()
    differ = {n: ((got[n] - v).abs().max() / v.abs().max()).item() for n, v in expected.items() if not v.equal(got[n])}
    return len(expected), differ


def compare_axes(axes: dict[str, Any]) -> tuple[int, dict[str, float]]:
    """`compare` of a case that came from another process."""
    return compare(Case(**axes))


def reducers_agree(axes: dict[str, Any]) -> dict[str, float]:
    """All-reduce against the distributed optimizer."""
    case = Case(**axes)
    one, other = train(case), train(dataclasses.replace(case, distopt=True))
    return {name: ((one[name] - other[name]).abs().max() / one[name].abs().max()).item() for name in one}


def experts_move() -> dict[str, bool]:
    """Whether each expert weight changed in training: what is compared is not a model that stands still."""
    case = Case(schedule="each", overlap=True)
    before = train(case, steps=0)
    after = train(case, steps=1)
    return {name: not before[name].equal(after[name]) for name in before if "linear_fc" in name}
