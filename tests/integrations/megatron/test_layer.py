"""Inside Megatron's MoELayer our experts compute what its own do, start where they start, carry what they carry."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

Mcore = Callable[..., list[Any]]

# Two float32 products summed in another order; seen: 6e-7.
TOLERANCE = 2e-6
TOP1 = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
LAYOUTS = {"grouped": {"single_grouped_weight": True}, "discrete": {"single_grouped_weight": False}}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("ep", "options"),
    [
        (1, {"activation": "swiglu"}),
        (1, {"activation": "swiglu_fused"}),
        (1, {"activation": "geglu", "add_bias_linear": True}),
        (1, {"activation": "swiglu_clamped", "add_bias_linear": True}),
        (1, {"activation": "relu2"}),
        (1, {"activation": "swiglu", "add_bias_linear": True, "moe_apply_probs_on_input": True, **TOP1}),
        (2, {"activation": "swiglu", "add_bias_linear": True}),
        (2, {"activation": "relu2", "moe_token_dispatcher_type": "allgather"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else f"ep{value}",
)
def test_the_layer_equals_megatrons_own(ep: int, options: dict[str, Any], layout: str, mcore: Mcore):
    for differences in mcore(ep, "layer_cases.against_sequential", ep, options, LAYOUTS[layout]):
        assert {name: d for name, d in differences.items() if not d < TOLERANCE} == {}
        assert len(differences) >= 5


def test_initial_values_do_not_depend_on_the_expert_degree(mcore: Mcore):
    (whole,) = mcore(1, "layer_cases.initial_values", 1)
    assert torch.cat(mcore(2, "layer_cases.initial_values", 2)).equal(whole)
    assert len({expert.sum().item() for expert in whole}) == len(whole)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ep", [1, 2])
def test_attributes_stay_on_parameters_that_are_replaced(ep: int, layout: str, mcore: Mcore):
    for result in mcore(ep, "layer_cases.attributes", ep, LAYOUTS[layout]):
        assert result["changed"] == {}
        stacked = layout == "grouped"
        suffix = "" if stacked else "0"
        assert result["marks"][f"linear_fc1.weight{suffix}"] == {
            "allreduce": ep == 1,
            "tensor_model_parallel": True,
            "partition_dim": 0 + stacked,
            "partition_stride": 2,
            "sequence_parallel": False,
            "skip_backward_post_hook": True,
        }
        assert result["marks"][f"linear_fc2.bias{suffix}"]["allreduce"] == (ep == 1)
        assert result["marks"][f"linear_fc2.bias{suffix}"]["skip_backward_post_hook"] is False


def test_attributes_are_those_of_megatrons_experts(mcore: Mcore):
    for theirs, result in zip(
        mcore(2, "layer_cases.their_attributes"),
        mcore(2, "layer_cases.attributes", 2, LAYOUTS["discrete"]),
        strict=True,
    ):
        for name in ("linear_fc1", "linear_fc2"):
            want = theirs[f"local_experts.0.{name}.weight"]
            got = result["marks"][f"{name}.weight0"]
            # The rest are marks that only one side has: its own delayed gradient, and what it leaves unset.
            assert {key: got[key] for key, value in want.items() if value not in ("nothing", False)} == {
                key: value for key, value in want.items() if value not in ("nothing", False)
            }
            assert want["allreduce"] is got["allreduce"] is False


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"activation_func": "tanh"}, "got activation_func=tanh, gated_linear_unit=True"),
        ({"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size=2: an expert is whole on its rank"),
        ({"fp8": "e4m3"}, "fp8=e4m3, fp4=None: use moe_runtime's quantized_model_init"),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}, "moe_act"),
        ({"fine_grained_activation_offloading": True}, "fine_grained_activation_offloading"),
        ({"use_te_activation_func": True}, "use_te_activation_func"),
    ],
    ids=str,
)
def test_options_that_would_be_ignored_are_refused(options: dict[str, Any], sentence: str, mcore: Mcore):
    (got,) = mcore(1, "layer_cases.refusal", options)
    assert sentence in got
