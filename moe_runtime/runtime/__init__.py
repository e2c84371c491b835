"""Scheduling gradients: when they are reduced, and that they are, exactly once."""
