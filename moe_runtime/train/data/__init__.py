"""Text to batches: sources, tokenizer, an on-disk token cache, and the sampler that says which sequences a step reads.

`cache.prepare` runs before any process group exists and gives every rank the same memory-mapped tokens;
`sampler.Sampler` maps a step to sequence numbers; `tokens.TokenSplit` turns the numbers into tensors. Only the
configuration is exported here: reading it must not import torch. Device placement and the loss are the trainer's.
"""

from moe_runtime.train.data.config import DataConfig

__all__ = ["DataConfig"]
