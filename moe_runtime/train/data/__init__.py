"""Text to batches: sources, tokenizer, an on-disk token cache, and the sampler that says which sequences a step reads.

`prepare` runs before any process group exists and gives every rank the same memory-mapped tokens; `Sampler` maps a
step to sequence numbers; `TokenSplit.sequences` turns the numbers into tensors. Device placement, prefetching and
the loss are the trainer's.
"""

from moe_runtime.train.data.cache import PreparedData, prepare
from moe_runtime.train.data.config import DataConfig
from moe_runtime.train.data.sampler import Sampler
from moe_runtime.train.data.tokens import Batch, TokenSplit

__all__ = ["Batch", "DataConfig", "PreparedData", "Sampler", "TokenSplit", "prepare"]
