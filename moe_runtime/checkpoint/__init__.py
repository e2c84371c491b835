"""Checkpoints that any expert and data degree can load, and Hugging Face folders in `checkpoint.hf`."""

from moe_runtime.checkpoint import hf
from moe_runtime.checkpoint.files import DamagedCheckpointError
from moe_runtime.checkpoint.store import (
    AsyncSaver,
    entry_dtypes,
    latest,
    load,
    load_latest,
    read_entries,
    read_facts,
    save,
    verify,
)
from moe_runtime.checkpoint.tensors import leave_out_frozen

__all__ = [
    "AsyncSaver",
    "DamagedCheckpointError",
    "entry_dtypes",
    "hf",
    "latest",
    "leave_out_frozen",
    "load",
    "load_latest",
    "read_entries",
    "read_facts",
    "save",
    "verify",
]
