"""Errors, the environment, logging: what every other package may import."""
