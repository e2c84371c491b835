"""A picture of a run, drawn from the files in its folder: `write_report(run_dir)` writes report.png."""

from moe_runtime.report.figure import write_report

__all__ = ["write_report"]
