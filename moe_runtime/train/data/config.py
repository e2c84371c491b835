"""The [data] section of a training configuration. Values are checked here; files are looked at by `prepare`."""

from dataclasses import dataclass

from moe_runtime.core.errors import ConfigError

STANDARD_LIBRARY = "stdlib"
END_OF_TEXT = "<|endoftext|>"
DEFAULT_VOCAB_SIZE = 4096
NUM_BYTES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the text is, how it becomes tokens, and how long a sequence is. ConfigError names a bad field.

    source               "stdlib" (the running Python's standard library; a folder of that name is "./stdlib"), or a
                         .txt, .jsonl (field `text`) or .parquet (column `text`) file, or a folder of them, recursively
    tokenizer            path of a tokenizer.json; "" trains a byte-level BPE on the training split, once
    eos_token            the token that ends a document; "" = the first usual one that `tokenizer` knows
    vocab_size           ids of the BPE that is trained; with `tokenizer` given, its own count or the default
    seq_length           tokens a sequence
    validation_fraction  share of the documents, picked by a hash of their names, that is never trained on
    cache_dir            folder of the token cache; "" = moe_runtime in the user's cache folder
    document_mask        attention stays inside a document: positions restart at 0 after each document's end
    """

    source: str = STANDARD_LIBRARY
    tokenizer: str = ""
    eos_token: str = ""
    vocab_size: int = DEFAULT_VOCAB_SIZE
    seq_length: int = 256
    validation_fraction: float = 0.05
    cache_dir: str = ""
    document_mask: bool = True

    def __post_init__(self) -> None:
        for field in ("source", "tokenizer", "eos_token", "cache_dir"):
            _check_text(field, getattr(self, field))
        if not self.source:
            raise ConfigError(f'data.source must be "{STANDARD_LIBRARY}", a file or a folder, got an empty string')
        _check_int("vocab_size", self.vocab_size, minimum=NUM_BYTES + 1, why="256 bytes and the end-of-text token")
        _check_int("seq_length", self.seq_length, minimum=1, why="one token")
        fraction = self.validation_fraction
        if not isinstance(fraction, float) or not 0.0 < fraction < 1.0:
            raise ConfigError(
                f"data.validation_fraction must be a number between 0 and 1, both excluded, got {fraction!r}"
            )
        if not isinstance(self.document_mask, bool):
            raise ConfigError(f"data.document_mask must be true or false, got {self.document_mask!r}")
        if not self.tokenizer and self.eos_token not in ("", END_OF_TEXT):
            raise ConfigError(
                f"data.eos_token names a token of data.tokenizer; without one documents end in {END_OF_TEXT!r}, "
                f"got {self.eos_token!r}"
            )


def _check_text(field: str, value: object) -> None:
    if not isinstance(value, str) or "\0" in value:
        raise ConfigError(f"data.{field} must be a string without NUL characters, got {value!r}")


def _check_int(field: str, value: object, *, minimum: int, why: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"data.{field} must be an integer of at least {minimum} ({why}), got {value!r}")
