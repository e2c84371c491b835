"""The planned memory as a table, and the measured peak beside it."""

from rich import box
from rich.table import Table

from moe_runtime.planner import MemoryPlan
from moe_runtime.train.finetune import Outcome

_MIB = 2**20


def plan_table(plan: MemoryPlan) -> Table:
    """One row a part, then the sum."""
    table = Table(title="planned memory of a rank", title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("part")
    table.add_column("MiB", justify="right")
    table.add_column("of what", overflow="fold")
    for line in plan.lines:
        table.add_row(line.name, f"{line.num_bytes / _MIB:,.1f}", line.formula)
    table.add_row("all", f"{plan.total / _MIB:,.1f}", "on top of what the process holds before it builds the model")
    return table


def measured_line(outcome: Outcome) -> str:
    """One line: the peak beside the plan."""
    return (
        f"memory of rank 0: measured peak {outcome.measured_bytes / _MIB:,.1f} MiB above the start, "
        f"planned {outcome.planned_bytes / _MIB:,.1f} MiB "
        f"({outcome.measured_bytes / outcome.planned_bytes:.2f} of the plan)"
    )
