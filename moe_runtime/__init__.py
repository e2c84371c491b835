"""moe_runtime: a distributed training runtime for grouped mixture-of-experts layers in PyTorch."""

__version__ = "0.1.0"
