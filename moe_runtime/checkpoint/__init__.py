"""Checkpoints that any expert and data degree can load."""

from moe_runtime.checkpoint.store import latest, load, read_facts, save

__all__ = ["latest", "load", "read_facts", "save"]
