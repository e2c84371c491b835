"""WgradCoordinator: every delayed gradient is computed once, delivered once, on time or refused by name."""

import copy
import json
import pickle
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import moe_runtime as mr
from moe_runtime.optim import MasterWeights, clip_grad_norm_

# One job of a Stack's layer: 5 rows in and 5 rows of gradient, 8 columns each, fp32.
JOB_BYTES = 2 * 5 * 8 * 4

DELAYED = ["first.weight", "second.weight"]


def drops(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "never completed" in record.getMessage()]


# Values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(
    ("schedule", "budget"), [("late", None), ("deferred", None), ("deferred", 0), ("deferred", 500)]
)
def test_gradients_equal_inline(make, rows, grads, assert_same, schedule, budget, microbatches, twice, discrete):
    inline, _ = make("inline", twice=twice, discrete=discrete)
    model, coordinator = make(schedule, budget, twice=twice, discrete=discrete)
    for iteration in range(2):  # the second adds to gradients that are there
        for index in range(microbatches):
            for each in (inline, model):
                each(rows(10 * iteration + index)).square().sum().backward()
        coordinator.flush()
        assert_same(grads(model), grads(inline))


@pytest.mark.parametrize("schedule", ["late", "deferred"])
def test_parts_called_without_the_model_accumulate_in_autograds_order(make, rows, grads, assert_same, schedule):
    inline, _ = make("inline")
    model, coordinator = make(schedule)
    for index in range(3):  # no forward of the model separates these microbatches
        for each in (inline, model):
            each.first(rows(index), (3, 0, 2)).square().sum().backward()
        if index == 0:
            coordinator.flush()
    coordinator.flush()
    assert_same(grads(model), grads(inline))


def test_one_separate_expert(rows):
    layers = [
        mr.GroupedLinear(1, 8, 8, single_grouped_weight=False, delay_wgrad_compute=late) for late in (False, True)
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    for layer in layers:
        layer(rows(), (5,)).square().sum().backward()
    layers[1].backward_dw()
    assert torch.equal(layers[1].weight0.grad, layers[0].weight0.grad)


@pytest.mark.parametrize("schedule", ["late", "deferred"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_checkpointed_gradients_equal_inline(make, rows, grads, assert_same, schedule, reentrant, twice):
    found = []
    for each in ("inline", schedule):
        model, coordinator = make(each, twice=twice)
        for index in range(2):
            x_RD = rows(index).requires_grad_()
            out_RD = checkpoint(model, x_RD, use_reentrant=reentrant)
            checkpoint(model, out_RD, use_reentrant=reentrant).square().sum().backward()
        coordinator.flush()
        found.append(grads(model))
    assert_same(found[1], found[0])


@pytest.mark.parametrize("schedule", ["late", "deferred"])
def test_a_failure_under_a_nested_backward_drops_only_its_own_jobs(make, rows, grads, assert_same, schedule, caplog):
    inline, _ = make("inline")
    model, coordinator = make(schedule)
    for each in (inline, model):
        x_RD = rows().requires_grad_()
        # The outer backward has handed a job in when the inner one, of a reentrant recomputation, begins.
        each(checkpoint(each, x_RD, use_reentrant=True)).square().sum().backward()
    coordinator.flush()
    assert drops(caplog) == []
    assert_same(grads(model), grads(inline))


@pytest.mark.parametrize("schedule", ["late", "deferred"])
def test_two_backwards_of_one_graph_count_twice(make, rows, grads, assert_same, schedule):
    found = []
    for each in ("inline", schedule):
        model, coordinator = make(each)
        loss = model(rows()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        coordinator.flush()
        found.append(grads(model))
    assert_same(found[1], found[0])


@pytest.mark.parametrize("schedule", ["late", "deferred"])
def test_a_repeated_backward_after_a_failure_counts_once(make, rows, schedule):
    found = []
    for each in ("inline", schedule):
        model, coordinator = make(each)
        loss = loss_that_fails_once(model, rows()) if each != "inline" else model.second(rows(), (3, 0, 2)).sum()
        if each != "inline":
            with pytest.raises(ArithmeticError):
                loss.backward(retain_graph=True)
            model.zero_grad()
        loss.backward()
        coordinator.flush()
        found.append(model.second.weight.grad)
    assert torch.equal(found[1], found[0])


def loss_that_fails_once(model: nn.Module, x_RD: torch.Tensor) -> torch.Tensor:
    """Its first backward raises after the second layer's job was handed in, and before a late node would run it."""
    held = model.second.take_weight()
    x_RD = x_RD.requires_grad_() * 1
    x_RD.register_hook(FailOnce())
    return model.second.forward_ends(x_RD, model.second.ends(x_RD, (3, 0, 2)), held=held).sum()


class FailOnce:
    def __init__(self) -> None:
        self.failed = False

    def __call__(self, gradient: torch.Tensor) -> None:
        if not self.failed:
            self.failed = True
            raise ArithmeticError("planted")


@pytest.mark.parametrize("schedule", ["late", "deferred"])
@pytest.mark.parametrize("discrete", [False, True])
def test_a_frozen_weight_gives_no_job(make, rows, schedule, discrete):
    model, coordinator = make(schedule, discrete=discrete)
    for name, parameter in model.first.named_parameters():
        parameter.requires_grad_("weight" not in name)
    x_RD = rows().requires_grad_()
    model(x_RD).square().sum().backward()
    assert {"first" in name for name in coordinator.pending()} <= {False}
    coordinator.flush()
    assert all(p.grad is None for name, p in model.first.named_parameters() if "weight" in name)
    assert x_RD.grad is not None and all(p.grad is not None for p in model.second.parameters())


def test_a_frozen_expert_among_separate_ones_stays_without_gradient(make, rows, grads, assert_same):
    found = []
    for schedule in ("inline", "deferred"):
        model, coordinator = make(schedule, discrete=True)
        model.first.weight1.requires_grad_(False)
        model(rows()).square().sum().backward()
        coordinator.flush()
        found.append(grads(model))
    assert found[1]["first.weight1"] is None
    assert_same(found[1], found[0])


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("schedule", ["late", "deferred"])
def test_a_forward_without_gradients_gives_no_job(make, rows, grads, assert_same, schedule, context):
    inline, _ = make("inline")
    model, coordinator = make(schedule)
    loss = model(rows()).square().sum()
    with context():
        model(rows(1))  # between a forward and its backward, as generating does
    loss.backward()
    with context():
        model(rows(2))
    coordinator.flush()
    inline(rows()).square().sum().backward()
    assert_same(grads(model), grads(inline))


def test_eval_between_steps_changes_nothing(make, rows, grads, assert_same):
    model, coordinator = make("deferred")
    found = []
    for evaluates in (False, True):
        model.zero_grad()
        for index in range(2):
            model(rows(index)).square().sum().backward()
            coordinator.flush()
            if evaluates:
                model.eval()
                with torch.no_grad():
                    model(rows(9))
                model.train()
        found.append(grads(model))
    assert_same(found[1], found[0])


@pytest.mark.xfail(strict=True, reason="a Function's needs_input_grad does not say what this backward asks for")
@pytest.mark.parametrize("schedule", ["late", "deferred"])
def test_gradient_of_the_rows_alone_gives_no_job(make, rows, schedule):
    model, coordinator = make(schedule)
    x_RD = rows().requires_grad_()
    torch.autograd.grad(model(x_RD).sum(), x_RD)
    assert coordinator.pending() == []


def test_inline_is_a_no_op(make, rows, grads, assert_same):
    torch.manual_seed(0)
    plain, _ = make("inline")
    plain = copy.deepcopy(plain)
    model, coordinator = make("inline")
    for each in (plain, model):
        each(rows()).square().sum().backward()
    assert_same(grads(model), grads(plain))
    assert (coordinator.flush(), coordinator.abort(), coordinator.pending()) == (0, 0, [])
    assert coordinator.peak_held_bytes == 0 and coordinator.trace() == {"traceEvents": []}


@pytest.mark.parametrize("schedule", ["inline", "late", "deferred"])
def test_a_non_finite_gradient_is_seen_after_the_flush(make, rows, schedule):
    model, coordinator = make(schedule)
    x_RD = rows()
    x_RD[0, 0] = float("inf")
    model.first.bias.requires_grad_(False)
    model.second.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    coordinator.guard(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = copy.deepcopy(model.state_dict())
    scaler.scale(model(x_RD).sum()).backward()
    coordinator.flush()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0, "found inf: the scale backs off"
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items()), "the step is left out"


# Order, budget, memory ----------------------------------------------------------------------------


@pytest.mark.parametrize(("microbatches", "twice"), list(product([1, 2, 4], [False, True])))
def test_held_bytes_without_a_budget_equal_the_formula(make, rows, microbatches, twice):
    model, coordinator = make("deferred", twice=twice)
    for index in range(microbatches):
        model(rows(index)).square().sum().backward()
    assert coordinator.peak_held_bytes == microbatches * (3 if twice else 2) * JOB_BYTES
    assert coordinator.flush() == microbatches * (3 if twice else 2)


@pytest.mark.parametrize("budget", [0, 1, JOB_BYTES - 1, JOB_BYTES, JOB_BYTES + 1, 3 * JOB_BYTES, 100 * JOB_BYTES])
def test_held_bytes_exceed_the_budget_by_at_most_one_job(make, rows, grads, assert_same, budget, caplog):
    inline, _ = make("inline", twice=True)
    model, coordinator = make("deferred", budget, twice=True)
    for index in range(4):
        for each in (inline, model):
            each(rows(index)).square().sum().backward()
    assert coordinator.peak_held_bytes <= budget + JOB_BYTES
    assert coordinator.peak_held_bytes == min(12, budget // JOB_BYTES + 1) * JOB_BYTES
    coordinator.flush()
    assert_same(grads(model), grads(inline))
    small = [r.getMessage() for r in caplog.records if "is less than the" in r.getMessage()]
    # Once for each weight, not for each job.
    assert len(small) == (2 if budget < JOB_BYTES else 0)
    assert all(f"budget_bytes={budget} is less than the {JOB_BYTES} bytes" in line for line in small)


def test_the_oldest_job_runs_first(make, rows):
    model, coordinator = make("deferred", 2 * JOB_BYTES)
    for index in range(3):
        model(rows(index)).square().sum().backward()
    coordinator.flush()
    names = [event["name"] for event in coordinator.trace()["traceEvents"] if event["cat"] == "wgrad"]
    expected = [f"{layer}.weight (microbatch {m}, call 0)" for m in (1, 2, 3) for layer in ("second", "first")]
    assert names == expected


@pytest.mark.parametrize("budget", [0, JOB_BYTES])
def test_a_budget_keeps_one_gradient_a_weight_and_not_one_a_microbatch(make, rows, budget):
    model, coordinator = make("deferred", budget)
    for index in range(6):
        model(rows(index)).square().sum().backward()
    held = [value for kept in (coordinator._ready, coordinator._placed) for value in kept]
    assert len(held) <= 4 and len(coordinator._ready) <= 2


def test_budgets_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="budget_bytes must be at least 0 or None, got -1"):
        mr.WgradCoordinator("deferred", -1)
    for schedule in ("inline", "late"):
        with pytest.raises(ValueError, match=f"budget_bytes is for schedule 'deferred', got 5 with '{schedule}'"):
            mr.WgradCoordinator(schedule, 5)
    with pytest.raises(ValueError, match="schedule must be one of inline, late, deferred; got 'eager'"):
        mr.WgradCoordinator("eager")


def test_trace_is_chrome_json_with_one_event_a_job(make, rows):
    for schedule, extra in (("late", 0), ("deferred", 1)):
        model, coordinator = make(schedule, twice=True)
        for index in range(2):
            model(rows(index)).square().sum().backward()
        coordinator.flush()
        events = json.loads(json.dumps(coordinator.trace()))["traceEvents"]
        jobs = [event for event in events if event["cat"] == "wgrad"]
        assert len(jobs) == 6 and len({event["name"] for event in jobs}) == 6 and len(events) == 6 + extra
        for event in events:
            assert event["ph"] == "X" and event["dur"] >= 0 and {"name", "ts", "pid", "tid", "args"} <= event.keys()
        assert jobs[-1]["args"]["held_bytes"] == 0


def test_profiler_ranges_carry_the_parameters_name(make, rows):
    model, coordinator = make("deferred")
    model(rows()).square().sum().backward()
    with torch.profiler.profile() as profile:
        coordinator.flush()
    names = {event.key for event in profile.key_averages()}
    assert {"moe::wgrad(first.weight)", "moe::wgrad(second.weight)"} <= names


# Faults: refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sgd", "master weights"])
def test_step_clip_state_dict_and_eval_with_jobs_pending_raise_and_name_them(make, rows, kind):
    model, coordinator = make("deferred")
    if kind == "master weights":
        model.to(torch.bfloat16)
        optimizer: torch.optim.Optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    coordinator.guard(optimizer)
    x_RD = rows().to(model.first.weight.dtype)
    model(x_RD).square().sum().backward()
    assert coordinator.pending() == ["second.weight", "first.weight"]
    actions: dict[str, Callable[[], object]] = {
        "optimizer step": optimizer.step,
        "clip_grad_norm_": lambda: clip_grad_norm_(model, 1.0),
        "state_dict": model.state_dict,
        "optimizer state_dict": optimizer.state_dict,
        r"eval\(\)": model.eval,
        "deepcopy": lambda: copy.deepcopy(model),
    }
    for action, call in actions.items():
        with pytest.raises(RuntimeError, match=rf"^{action} with .* pending: second.weight, first.weight; flush\(\)"):
            call()
    coordinator.flush()
    for call in actions.values():
        call()
    model.train()


def test_flushing_twice_and_without_a_backward_raise(make, rows):
    model, coordinator = make("deferred")
    sentence = "flush: no weight gradient is pending; it was flushed already, or no backward ran"
    with pytest.raises(RuntimeError, match=sentence):
        coordinator.flush()
    model(rows()).square().sum().backward()
    assert coordinator.flush() == 2
    with pytest.raises(RuntimeError, match=sentence):
        coordinator.flush()
    for schedule in ("inline", "late"):
        _, other = make(schedule)
        assert other.flush() == other.flush() == 0


def test_backward_dw_with_nothing_pending_raises_and_not_delayed_does_nothing(make, rows):
    model, coordinator = make("deferred")
    with pytest.raises(RuntimeError, match="backward_dw: no weight gradient of first is pending"):
        model.first.backward_dw()
    model(rows()).square().sum().backward()
    model.first.backward_dw()
    assert coordinator.pending() == ["second.weight"]
    with pytest.raises(RuntimeError, match="backward_dw: no weight gradient of first is pending"):
        model.first.backward_dw()
    coordinator.flush()
    for schedule in ("inline", "late"):
        model, _ = make(schedule)
        assert not model.first.need_backward_dw()
        model.first.backward_dw()
    with pytest.raises(RuntimeError, match="need delay_wgrad_compute=True, got False"):
        model.first.register_wgrad_accumulation_and_reduce_hooks(lambda: None)


NOTICED_BY: dict[str, Callable] = {
    "forward": lambda model, coordinator, optimizer, x: model(x),
    "forward of a part": lambda model, coordinator, optimizer, x: model.second(x, (3, 0, 2)),
    "pending": lambda model, coordinator, optimizer, x: coordinator.pending(),
    "step": lambda model, coordinator, optimizer, x: optimizer.step(),
    "eval": lambda model, coordinator, optimizer, x: model.eval(),
}


@pytest.mark.parametrize("noticed_by", NOTICED_BY)
@pytest.mark.parametrize("schedule", ["late", "deferred"])
def test_jobs_of_a_backward_that_raised_are_dropped_with_a_sentence(make, rows, caplog, schedule, noticed_by):
    model, coordinator = make(schedule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    coordinator.guard(optimizer)
    with pytest.raises(ArithmeticError):
        loss_that_fails_once(model, rows()).backward()
    NOTICED_BY[noticed_by](model, coordinator, optimizer, rows())
    assert len(drops(caplog)) == 1
    assert "second.weight (microbatch 0, call 0)" in drops(caplog)[0]
    assert coordinator.pending() == [] and coordinator._held_bytes == 0


@pytest.mark.parametrize("schedule", ["late", "deferred"])
def test_flush_drops_jobs_of_a_backward_that_raised(make, rows, grads, assert_same, caplog, schedule):
    inline, _ = make("inline")
    model, coordinator = make(schedule)
    with pytest.raises(ArithmeticError):
        loss_that_fails_once(model, rows()).backward()
    if schedule == "late":
        assert coordinator.flush() == 0
    else:
        with pytest.raises(RuntimeError, match="flush: no weight gradient is pending"):
            coordinator.flush()
    assert len(drops(caplog)) == 1
    model.zero_grad()
    for each in (inline, model):
        each(rows(1)).square().sum().backward()
    coordinator.flush()
    assert_same(grads(model), grads(inline))


@pytest.mark.parametrize("budget", [None, 0, JOB_BYTES])
def test_a_backward_that_raised_leaves_the_others_whole(make, rows, grads, fail_halfway, assert_same, caplog, budget):
    inline, _ = make("inline")
    model, coordinator = make("deferred", budget)
    for index in range(3):
        for each in (inline, model):
            each(rows(index)).square().sum().backward()
        if index == 1:
            kept = [p.grad for p in (model.second.bias, model.first.bias)]
            fail_halfway(model, rows(7))
            model.second.bias.grad, model.first.bias.grad = kept
    del kept
    coordinator.flush()
    assert len(drops(caplog)) == 1 and "second.weight" in drops(caplog)[0]
    got, expected = grads(model), grads(inline)
    assert_same({name: got[name] for name in DELAYED}, {name: expected[name] for name in DELAYED})


def test_the_next_backward_notices_too(make, rows, fail_halfway, caplog):
    model, coordinator = make("deferred")
    earlier = model(rows(1)).square().sum()
    fail_halfway(model, rows())
    earlier.backward()
    assert len(drops(caplog)) == 1
    assert coordinator.flush() == 2


@pytest.mark.parametrize("budget", [None, 0])
def test_abort_drops_everything(make, rows, grads, assert_same, budget, caplog):
    inline, _ = make("inline")
    model, coordinator = make("deferred", budget)
    for index in range(2):
        model(rows(index)).square().sum().backward()
    assert coordinator.abort() >= 2
    assert coordinator.abort() == 0
    assert coordinator.pending() == [] and coordinator._held_bytes == 0
    model.zero_grad()
    for each in (inline, model):
        each(rows(5)).square().sum().backward()
    coordinator.flush()
    assert_same(grads(model), grads(inline))
    assert drops(caplog) == []


def test_a_job_that_raised_in_flush_is_run_by_the_next_flush(make, rows, grads, assert_same):
    inline, _ = make("inline")
    model, coordinator = make("deferred")
    for each in (inline, model):
        each(rows()).square().sum().backward()
    broken = coordinator._jobs[0]
    compute, broken.compute = broken.compute, raise_out_of_memory
    with pytest.raises(MemoryError):
        coordinator.flush()
    assert coordinator.pending() == ["second.weight", "first.weight"]
    broken.compute = compute
    assert coordinator.flush() == 2
    assert_same(grads(model), grads(inline))


def raise_out_of_memory() -> torch.Tensor:
    raise MemoryError("planted")


# Megatron's protocol ------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True], ids=["at once", "attached late to a meta shell"])
@pytest.mark.parametrize("single", [True, False])
def test_two_microbatches_then_two_calls(late, single):
    """E2: [14, 18], not [10, 12] (overwritten) nor [28, 36] (doubled); one hook; a third call is an error."""
    layer = mr.GroupedLinear(
        1, 2, 1, delay_wgrad_compute=True, device="meta" if late else None, single_grouped_weight=single, bias=True
    )
    name = "weight" if single else "weight0"
    if late:
        shape = (1, 1, 2) if single else (1, 2)
        layer.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        layer.register_parameter("bias" if single else "bias0", nn.Parameter(torch.zeros((1, 1) if single else (1,))))
    weight = layer.get_parameter(name)
    assert weight.skip_backward_post_hook is True
    hooks: list[list[float]] = []
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: hooks.append(weight.grad.flatten().tolist()))
    for x, dy in (([[1.0, 2.0], [3.0, 4.0]], [[1.0], [1.0]]), ([[5.0, 6.0]], [[2.0]])):
        layer(torch.tensor(x), (len(x),)).backward(torch.tensor(dy))
    assert weight.grad is None and hooks == []
    layer.backward_dw()
    assert weight.grad.flatten().tolist() == [4.0, 6.0] and hooks == []
    layer.backward_dw()
    assert weight.grad.flatten().tolist() == [14.0, 18.0] and hooks == [[14.0, 18.0]]
    with pytest.raises(RuntimeError, match="backward_dw: no weight gradient of this module is pending"):
        layer.backward_dw()
    assert weight.grad.flatten().tolist() == [14.0, 18.0] and len(hooks) == 1
    # E3: the bias is not delayed, and adds up: 2 + 2.
    assert layer.get_parameter("bias" if single else "bias0").grad.item() == 4.0


def test_a_frozen_delayed_weight_passes_the_gradient_on():
    """E4: dX = dY W exactly, no weight gradient and nothing pending."""
    layer = mr.GroupedLinear(2, 2, 1, delay_wgrad_compute=True)
    layer.weight.requires_grad_(False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[[2.0, 3.0]], [[5.0, 7.0]]]))
    x_RD = torch.ones(2, 2, requires_grad=True)
    layer(x_RD, (1, 1)).backward(torch.tensor([[1.0], [2.0]]))
    assert x_RD.grad.tolist() == [[2.0, 3.0], [10.0, 14.0]] and layer.weight.grad is None
    with pytest.raises(RuntimeError, match="no weight gradient"):
        layer.backward_dw()


def test_backward_dw_takes_a_backward_whole(make, rows):
    """A layer used twice in a forward has two jobs; one call runs both, and leaves the next microbatch's."""
    model, coordinator = make("deferred", twice=True)
    for index in range(2):
        model(rows(index)).square().sum().backward()
    model.first.backward_dw()
    assert len([job for job in coordinator._jobs if job.key.module == "first"]) == 2
    model.first.backward_dw()
    assert coordinator.pending() == ["second.weight"]


# Copies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["inline", "late", "deferred"])
def test_a_deep_copy_has_a_coordinator_of_its_own(make, rows, grads, assert_same, schedule):
    model, coordinator = make(schedule)
    hooks: list[str] = []
    if schedule == "deferred":
        coordinator.add_hook("first", "weight", lambda: hooks.append("original's"))
    copied = copy.deepcopy(model)
    own = copied.wgrad_coordinator
    assert own is not coordinator and own.schedule == schedule
    model(rows()).square().sum().backward()
    assert own.pending() == []
    copied.state_dict()  # not refused for what waits in the original
    copied(rows()).square().sum().backward()
    if schedule == "deferred":
        with pytest.raises(RuntimeError, match="state_dict with weight gradients pending"):
            copied.state_dict()
    own.flush()
    assert hooks == []
    coordinator.flush()
    assert hooks == (["original's"] if schedule == "deferred" else [])
    assert_same(grads(copied), grads(model))


def test_a_model_with_a_coordinator_pickles(make, rows, grads, assert_same):
    model, coordinator = make("deferred")
    model(rows()).square().sum().backward()
    coordinator.flush()
    loaded = pickle.loads(pickle.dumps(model))
    model.zero_grad()
    for each in (model, loaded):
        each.zero_grad()
        each(rows(1)).square().sum().backward()
        each.wgrad_coordinator.flush()
    assert_same(grads(loaded), grads(model))


# Compiled -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["late", "deferred"])
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_block_gives_the_same_gradients(make, rows, grads, assert_same, schedule):
    inline, _ = make("inline")
    model, coordinator = make(schedule)
    compiled = torch.compile(model, backend="eager")
    for index in range(2):
        inline(rows(index)).square().sum().backward()
        compiled(rows(index)).square().sum().backward()
    assert len(coordinator.pending()) == (2 if schedule == "deferred" else 0)
    coordinator.flush()
    assert_same(grads(model), grads(inline))


class Taker(nn.Module):
    """Only what a coordinator adds to a layer: taking the weight. The layer itself breaks the graph on a CPU."""

    def __init__(self, delayed: bool) -> None:
        super().__init__()
        self.layer = mr.GroupedLinear(1, 8, 8, delay_wgrad_compute=delayed, single_grouped_weight=False)

    def forward(self, x_RD: torch.Tensor) -> torch.Tensor:
        return x_RD @ self.layer.take_weight().value[0]


@pytest.mark.parametrize("schedule", ["inline", "late", "deferred"])
@pytest.mark.filterwarnings("ignore")
def test_only_inline_compiles_without_a_graph_break(rows, schedule):
    model = Taker(schedule == "deferred")
    mr.WgradCoordinator(schedule).attach(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    if schedule == "inline":
        compiled(rows()).sum().backward()
    else:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            compiled(rows())
