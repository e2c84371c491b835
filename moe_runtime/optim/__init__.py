"""Optimizers around packed parameters: fp32 masters, one gradient norm."""

from moe_runtime.optim.clip import clip_grad_norm_
from moe_runtime.optim.master_weights import MasterWeights

__all__ = ["MasterWeights", "clip_grad_norm_"]
