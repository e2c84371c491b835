"""Runs on a pool of ranks: a step that goes wrong on one rank only, and replicas that drift apart."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_runtime.checkpoint.tensors import local_of, model_tensors, optimizer_tensors
from moe_runtime.core.config import from_mapping
from moe_runtime.integrations.transformers import load_config
from moe_runtime.train import step as step_module
from moe_runtime.train.config import Config
from moe_runtime.train.data.tokens import Batch
from moe_runtime.train.replicas import first_difference
from moe_runtime.train.setup import Trainee, build
from moe_runtime.train.step import Stepper, Votes

SEQ, ROWS, VOCABULARY = 16, 2, 64
MODEL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def _config(data: str, expert: int, replicate: int, schedule: str = "inline") -> Config:
    return from_mapping(
        Config,
        {
            "model": {"model_type": "qwen3_moe", **MODEL},
            "data": {"seq_length": SEQ},
            "train": {"steps": 4, "global_batch_size": ROWS * dist.get_world_size()},
            "optim": {"lr": 0.01},
            "parallel": {"data": data, "expert": expert, "replicate": replicate},
            "wgrad": {"schedule": schedule},
            "router": {"bias_update_rate": 0.01},
        },
    )


def _trainee(config: Config) -> Trainee:
    return build(config, load_config(config_file="", model_type="qwen3_moe", fields=dict(MODEL)), torch.device("cpu"))


def _batch(step: int) -> Batch:
    seed = torch.Generator().manual_seed(100 * step + dist.get_rank())
    ids_BS = torch.randint(VOCABULARY, (ROWS, SEQ + 1), generator=seed)
    positions_BS = torch.arange(SEQ).expand(ROWS, SEQ)
    return Batch(input_ids_BS=ids_BS[:, :-1], labels_BS=ids_BS[:, 1:], position_ids_BS=positions_BS)


def _state(trainee: Trainee) -> dict[str, Tensor]:
    entries = model_tensors(trainee.model) | optimizer_tensors(trainee.model, trainee.optimizer)
    return {name: local_of(value).clone() for name, value in entries.items()}


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def bad_step(data: str, expert: int, schedule: str, fault: str) -> tuple[list[bool], bool, bool, list[str]]:
    """Step 1 of 0, 1, 2 goes wrong on rank 1.

    (was each skipped, step 1 changed nothing, the end equals that of a run without step 1, tensors not finite)
    """
    config = _config(data, expert, 1, schedule)
    trainee = _trainee(config)
    stepper = Stepper(config, trainee)
    skipped, nonfinite, before = [], [], {}
    for step in range(3):
        before = _state(trainee) if step == 1 else before
        with _planted(trainee, fault if step == 1 and dist.get_rank() == 1 else ""):
            result = stepper.step([_batch(step)], 0.01)
        skipped.append(result.skipped is not None)
        nonfinite += result.skipped.nonfinite if result.skipped else []
        if step == 1:
            unchanged = _same(before, _state(trainee))
    other = _trainee(config)
    without = Stepper(config, other)
    for step in (0, 2):
        without.step([_batch(step)], 0.01)
    return skipped, unchanged, _same(_state(trainee), _state(other)), nonfinite


class _planted:
    """While entered, this rank's backward makes a NaN or infinity; "late": after the reduction, where none sees it."""

    def __init__(self, trainee: Trainee, fault: str) -> None:
        self._trainee, self._fault = trainee, fault

    def __enter__(self) -> None:
        self._clip = step_module.clip_grad_norm_
        self._handles = []
        if self._fault in ("nan", "inf"):
            self._handles.append(self._trainee.inner.model.norm.register_forward_hook(self._spoil))
        elif self._fault == "late":
            step_module.clip_grad_norm_ = self._spoil_and_clip

    def __exit__(self, *exc_info: object) -> None:
        step_module.clip_grad_norm_ = self._clip
        for handle in self._handles:
            handle.remove()

    def _spoil(self, module: nn.Module, args: object, output: Tensor) -> None:
        def spoil(gradient: Tensor) -> Tensor:
            gradient = gradient.clone()
            gradient.view(-1)[3] = math.nan if self._fault == "nan" else math.inf
            return gradient

        output.register_hook(spoil)

    def _spoil_and_clip(self, model: nn.Module, max_norm: float) -> Tensor:
        for parameter in reversed(list(model.parameters())):
            if parameter.grad is not None and local_of(parameter.grad).numel():
                local_of(parameter.grad).view(-1)[0] = math.nan
                break
        return self._clip(model, max_norm)


def votes_are_heard() -> list[tuple[bool, bool]]:
    """What each of three steps says that some rank asked for: nothing, rank 0 a stop, rank 1 a look at its save."""
    config = _config("ddp", 2, 1)
    stepper = Stepper(config, _trainee(config))
    rank = dist.get_rank()
    own = [Votes(), Votes(stop=rank == 0), Votes(look_at_save=rank == 1)]
    results = [stepper.step([_batch(step)], 0.01, votes).votes for step, votes in enumerate(own)]
    return [(votes.stop, votes.look_at_save) for votes in results]


def changed_bit(data: str, expert: int, replicate: int, ending: str, rank: int) -> tuple[str | None, str | None]:
    """What `first_difference` says of equal replicas, and after one bit of a tensor on `rank` was changed."""
    config = _config(data, expert, replicate)
    trainee = _trainee(config)
    Stepper(config, trainee).step([_batch(0)], 0.01)
    before = first_difference(trainee.model, trainee.layout)
    tensors = dict(trainee.model.named_parameters()) | dict(trainee.model.named_buffers())
    tensor = next(tensor for name, tensor in tensors.items() if name.endswith(ending))
    if dist.get_rank() == rank:
        with torch.no_grad():
            bits = local_of(tensor.detach()).view(torch.int32)
            bits.view(-1)[-1] ^= 1
    after = first_difference(trainee.model, trainee.layout)
    return before and str(before), after and str(after)
