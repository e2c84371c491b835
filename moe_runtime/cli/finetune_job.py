"""The slow part of the finetune command: the base's config, the data, the adapters, the plan, the loop, the report.

Apart from `finetune` because it imports torch and transformers.
"""

from dataclasses import dataclass
from typing import Any

from rich.console import Console

from moe_runtime.cli.finetune_plan import plan_of
from moe_runtime.cli.job import draw_report
from moe_runtime.cli.plan_table import measured_line, plan_table
from moe_runtime.comm.bootstrap import Launch
from moe_runtime.core import log
from moe_runtime.integrations.transformers import load_config
from moe_runtime.planner import MemoryPlan
from moe_runtime.train import loop
from moe_runtime.train.config import check_model, named_run_dir
from moe_runtime.train.data.instruction_rows import prepare_instructions
from moe_runtime.train.data.packing import PreparedInstructions
from moe_runtime.train.finetune import Finetune, check_resume, meta_model
from moe_runtime.train.finetune_config import BaseFiles, FinetuneConfig, as_training


@dataclass(frozen=True, kw_only=True)
class FinetuneJob:
    """A run that nothing more can be known to be wrong with, before its process group exists."""

    config: FinetuneConfig
    launch: Launch
    base: BaseFiles
    hf_config: Any
    data: PreparedInstructions
    plan: MemoryPlan

    def run(self) -> None:
        """Print the plan, train, print what was measured, and draw the report on rank 0."""
        console = Console(stderr=True, highlight=False)
        if not console.is_terminal:
            console.width = 140  # a pipe has no width; the default of 80 would fold the table
        if self.launch.is_main:
            console.print(plan_table(self.plan))
        task = Finetune(self.config, self.base, self.data, planned_bytes=self.plan.total)
        training = as_training(self.config, self.base.config_file)
        folder = loop.run(training, self.launch, self.hf_config, self.data, task=task)
        if self.launch.is_main:
            if task.outcome is not None:
                console.print(measured_line(task.outcome))
            draw_report(folder)


def prepare_job(config: FinetuneConfig, launch: Launch, base: BaseFiles) -> FinetuneJob:
    """Check base, data and adapters; every rank does this, without talking and without the base's values in memory."""
    log.configure(launch.rank)
    hf_config = load_config(config_file=str(base.config_file))
    if hasattr(hf_config, "quantization_config"):
        delattr(hf_config, "quantization_config")  # weights are read as values
    training = as_training(config, base.config_file)
    check_model(training, hf_config)
    model = meta_model(config, hf_config)
    text_config = getattr(hf_config, "get_text_config", lambda: hf_config)()
    data = prepare_instructions(config.data, base_tokenizer=base.tokenizer, model_vocab_size=text_config.vocab_size)
    check_resume(config, named_run_dir(training), base, data)
    plan = plan_of(config, model, text_config, launch.world_size)
    return FinetuneJob(config=config, launch=launch, base=base, hf_config=hf_config, data=data, plan=plan)
