"""The errors users meet. Each message is one sentence that says what was expected and what came.

Bad arguments raise plain ValueError or TypeError; the classes here name the cases a caller may want to catch apart.
"""


class ConfigError(ValueError):
    """A training configuration that cannot run; raised before any process group or file exists."""


class UnsupportedError(RuntimeError):
    """The hardware, build or model cannot do what was asked for by name; the message lists every refusal."""


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, damaged, or belongs to another model."""


class NumericsError(RuntimeError):
    """Training met values that it cannot go on with: too many that are not finite, or replicas that differ."""


class CollectiveMismatchError(RuntimeError):
    """Ranks of one group are in different collectives, or disagree on how many rows one sends to another."""
