"""Fixtures of the end-to-end tests."""

from train_runs import tiny_config, train

__all__ = ["tiny_config", "train"]
