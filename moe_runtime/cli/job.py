"""The slow part of the train command: the model's config, the data, the loop, the report.

Apart from `train` because it imports torch and transformers.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_runtime.comm.bootstrap import Launch
from moe_runtime.core import log
from moe_runtime.integrations.transformers import load_config
from moe_runtime.report import write_report
from moe_runtime.train import loop
from moe_runtime.train.config import Config, check_model
from moe_runtime.train.data.cache import PreparedData, prepare

_logger = log.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run that nothing more can be known to be wrong with, before its process group exists."""

    config: Config
    launch: Launch
    hf_config: Any
    data: PreparedData

    def run(self) -> None:
        """Train, then draw the report on rank 0."""
        folder = loop.run(self.config, self.launch, self.hf_config, self.data)
        if self.launch.is_main:
            draw_report(folder)


def draw_report(folder: Path) -> None:
    """Draw the run in `folder`; a report that cannot be drawn does not fail the run."""
    try:
        path = write_report(folder)
    except (ImportError, ValueError, OSError) as error:
        _logger.warning("no report: %s", error)
    else:
        _logger.info("report %s", path)


def prepare_job(config: Config, launch: Launch) -> Job:
    """Check model and data, and tokenize where the cache is empty; every rank does this, without talking."""
    log.configure(launch.rank)
    model = config.model
    # transformers completes nested fields in place; the config is to be saved as it was written.
    fields = copy.deepcopy(model.fields)
    hf_config = load_config(config_file=model.config_json, model_type=model.model_type, fields=fields)
    check_model(config, hf_config)
    text_config = getattr(hf_config, "get_text_config", lambda: hf_config)()
    data = prepare(config.data, model_vocab_size=text_config.vocab_size)
    return Job(config=config, launch=launch, hf_config=hf_config, data=data)
