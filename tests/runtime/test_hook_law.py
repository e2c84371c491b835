"""The law of hooks: one call a parameter an iteration, after its last job, whatever happens in between."""

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

JOBS_OF_A_MICROBATCH = {"first": 2, "second": 1}  # the first layer is used twice

EVENTS = st.lists(
    st.sampled_from(["microbatch", "microbatch", "microbatch", "failure", "eval", "generate", "backward_dw", "abort"]),
    max_size=6,
)
SCHEDULES = st.lists(EVENTS, min_size=1, max_size=5)
BUDGETS = st.sampled_from([None, 0, 320, 700])


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(iterations=SCHEDULES, budget=BUDGETS)
def test_one_call_a_parameter_an_iteration_after_its_last_job(make, rows, fail_halfway, iterations, budget):
    inline, _ = make("inline", twice=True)
    model, coordinator = make("deferred", budget, twice=True)
    calls: Counter[str] = Counter()
    ran: Counter[str] = Counter()

    def hook(name: str) -> None:
        # A reducer: nothing of this parameter may be missing now, or come afterwards.
        calls[name] += 1
        assert not any(job.key.module == name for job in coordinator._jobs)
        assert not any(target[0] == name for target in coordinator._ready)
        assert torch.equal(model.get_submodule(name).weight.grad, inline.get_submodule(name).weight.grad)

    for name in JOBS_OF_A_MICROBATCH:
        coordinator.add_hook(name, "weight", lambda name=name: hook(name))
    run = coordinator.run
    coordinator.run = lambda job: (ran.update([job.key.module]), run(job))[1]

    for number, events in enumerate(iterations):
        calls.clear()
        ran.clear()
        waiting = succeeded = failed = 0
        for index, event in enumerate([*events, "microbatch"]):  # an iteration ends with a microbatch
            x_RD = rows(100 * number + index)
            if event == "microbatch":
                for each in (inline, model):
                    each(x_RD).square().sum().backward()
                waiting, succeeded = waiting + 1, succeeded + 1
            elif event == "failure":
                fail_halfway(model, x_RD)
                failed += 1
            elif event == "eval":
                if waiting:
                    with pytest.raises(RuntimeError, match="pending"):
                        model.eval()
                else:
                    model.eval()
                    model.train()
            elif event == "generate":
                with torch.no_grad():
                    model(x_RD)
            elif event == "backward_dw" and waiting > 1:
                # All but the last microbatch may be delivered early: hooks wait.
                before = [job.key for job in coordinator._jobs if job.key.module == "second"]
                if len(before) > 1:
                    model.second.backward_dw()
            elif event == "abort":
                coordinator.abort()
                model.zero_grad()
                inline.zero_grad()
                waiting = succeeded = 0
                ran.clear()
            assert not calls, f"a hook before the flush, at {event}"
        coordinator.flush()
        assert calls == {"first": 1, "second": 1}
        # Each job of a microbatch that counts ran once, one of a backward that raised at most once and for nothing.
        assert ran["first"] == 2 * succeeded
        assert succeeded <= ran["second"] <= succeeded + failed
        assert coordinator.pending() == [] and coordinator._held_bytes == 0
        for each in (inline, model):
            each.zero_grad()


def test_a_parameter_without_a_job_has_no_call(make, rows):
    model, coordinator = make("deferred")
    calls: list[str] = []
    for name in ("first", "second"):
        coordinator.add_hook(name, "weight", lambda name=name: calls.append(name))
    model.second(rows(), (3, 0, 2)).sum().backward()
    coordinator.flush()
    assert calls == ["second"]


def test_every_hook_of_a_parameter_is_called_in_order(make, rows):
    model, coordinator = make("deferred")
    calls: list[int] = []
    for number in range(3):
        model.first.register_wgrad_accumulation_and_reduce_hooks(lambda number=number: calls.append(number))
    for iteration in (1, 2):
        model(rows()).sum().backward()
        coordinator.flush()
        assert calls == [0, 1, 2] * iteration
