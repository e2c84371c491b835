"""LoRA on a model's layers, and its exchange with PEFT. The only package that imports peft.

    add_lora               adapters beside the layers named, everything else frozen
    lora_state_dict        the adapters alone, whole, however the model is sharded
    export_peft            a folder that PEFT opens
    import_peft            adapters from such a folder
    merge_lora             the updates added to the base, and taken away again: unmerge_lora

Routed experts need no PEFT: theirs are `moe_runtime.nn.GroupedLoRA`. Ordinary linear layers get PEFT's own.
"""

from moe_runtime.integrations.peft.adapters import LoRAReport, add_lora, check_frozen_base, lora_config
from moe_runtime.integrations.peft.folders import export_peft, import_peft
from moe_runtime.integrations.peft.linear import add_pefts_own
from moe_runtime.integrations.peft.merge import MergedLayer, MergeReport, merge_lora, unmerge_lora
from moe_runtime.integrations.peft.state import load_lora_state_dict, lora_state_dict

__all__ = [
    "LoRAReport",
    "MergeReport",
    "MergedLayer",
    "add_lora",
    "add_pefts_own",
    "check_frozen_base",
    "export_peft",
    "import_peft",
    "load_lora_state_dict",
    "lora_config",
    "lora_state_dict",
    "merge_lora",
    "unmerge_lora",
]
