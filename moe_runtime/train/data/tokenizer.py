"""Text to token ids with the `tokenizers` library, which this file alone imports: train a BPE, or load a user's own.

Training is deterministic: the same text and size give the same tokenizer.json, byte for byte, whatever the number of
threads. No environment variable is read or written.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any

import numpy as np

from moe_runtime.core.errors import ConfigError
from moe_runtime.train.data.config import END_OF_TEXT

TRAINER_VERSION = 1  # part of the cache's key: raise it when `train_bpe` would give another tokenizer for the same text
EOS_CANDIDATES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "[SEP]")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTokenizer:
    """A loaded tokenizer.json. `vocab_size` is its largest id plus one, added tokens included."""

    vocab_size: int
    eos_id: int
    _backend: Any

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One int64 array of ids per text. No special token is added, and none is recognized inside the text."""
        with _OneSentence("data.tokenizer must be able to encode any text, got"):
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]


def train_bpe(texts: Iterable[str], vocab_size: int) -> bytes:
    """The tokenizer.json of a byte-level BPE of at most `vocab_size` ids: 0 is `<|endoftext|>`, then come the bytes."""
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    return tokenizer.to_str().encode("utf-8")


def load_tokenizer(data: bytes, *, origin: str, eos_token: str = "") -> TextTokenizer:
    """Read a tokenizer.json's bytes; `origin` names it in errors. ConfigError for a bad file or no end of text."""
    try:
        backend = _library().Tokenizer.from_buffer(data)
    except ValueError as error:
        raise ConfigError(f"data.tokenizer must be a tokenizer.json, got {origin}: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    # A document that spells out "<|endoftext|>" must not end there.
    backend.encode_special_tokens = True
    ids = backend.get_vocab(with_added_tokens=True)
    wanted = (eos_token,) if eos_token else EOS_CANDIDATES
    found = [ids[token] for token in wanted if token in ids]
    if not found:
        raise ConfigError(
            f"data.tokenizer must know an end-of-text token, one of {list(wanted)}, got {origin} without; "
            "name its own with data.eos_token"
        )
    return TextTokenizer(vocab_size=max(ids.values()) + 1, eos_id=found[0], _backend=backend)


def _library() -> ModuleType:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError("moe_runtime.train.data needs tokenizers: pip install 'moe-runtime[train]'") from error
    return tokenizers


class _OneSentence:
    """Turns the plain `Exception` that `tokenizers` raises for its own faults into a ConfigError; nothing narrower."""

    def __init__(self, expected: str) -> None:
        self.expected = expected

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is Exception:
            raise ConfigError(f"{self.expected}: {error}") from error
