"""What a test of grouped experts needs: hostile inputs, and a comparison that one wrong expert cannot hide from."""

from moe_runtime.testing.compare import assert_close_per_expert
from moe_runtime.testing.hostile import RAGGED, nan_filled_memory, strided, with_nan_tail

__all__ = ["RAGGED", "assert_close_per_expert", "nan_filled_memory", "strided", "with_nan_tail"]
