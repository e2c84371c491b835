"""Trace: Chrome's format, and a bound."""

import json

from moe_runtime.runtime.trace import Trace, now


def test_events_are_complete_and_in_microseconds():
    trace = Trace()
    started = now()
    trace.add("name", "kind", started, started + 0.25, jobs=3)
    (event,) = json.loads(json.dumps(trace.as_json()))["traceEvents"]
    assert (event["name"], event["cat"], event["ph"], event["args"]) == ("name", "kind", "X", {"jobs": 3})
    assert abs(event["dur"] - 250_000) < 1
    trace.clear()
    assert trace.as_json() == {"traceEvents": []}


def test_a_long_run_keeps_the_last_events_only():
    trace = Trace()
    for index in range(20_005):
        trace.add(str(index), "kind", 0.0, 1.0)
    events = trace.as_json()["traceEvents"]
    assert len(events) == 20_000 and events[0]["name"] == "5" and events[-1]["name"] == "20004"
