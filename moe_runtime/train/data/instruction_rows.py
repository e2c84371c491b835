"""From instruction records to rows that a run reads: tokenizer, template, mask and packing put together."""

import hashlib
from pathlib import Path

from moe_runtime.core.errors import ConfigError
from moe_runtime.core.log import get_logger
from moe_runtime.integrations.transformers import ChatTokenizer, Sample
from moe_runtime.train.data.instructions import InstructionConfig, Record, read_instructions
from moe_runtime.train.data.packing import PackedSplit, PreparedInstructions, pack
from moe_runtime.train.data.tokenizer import EOS_CANDIDATES

_LOGGER = get_logger(__name__)


def prepare_instructions(
    config: InstructionConfig, *, base_tokenizer: Path | None, model_vocab_size: int
) -> PreparedInstructions:
    """Both splits in rows. Every rank makes the same, in memory, without talking.

    base_tokenizer  file or folder of the base's tokenizer; None where it has none
    ConfigError for records that are none, a tokenizer with more ids than `model_vocab_size`, and no tokenizer at all.
    """
    tokenizer = _tokenizer(config, base_tokenizer)
    if tokenizer.vocab_size > model_vocab_size:
        raise ConfigError(
            f"the tokenizer {tokenizer.path} has {tokenizer.vocab_size} ids, the base's vocabulary holds "
            f"{model_vocab_size}"
        )
    train_records, validation_records = read_instructions(config)
    train = _rows(config, tokenizer, train_records, "train on")
    validation = _rows(config, tokenizer, validation_records, "hold out")
    for name, split, records in (("to train on", train, train_records), ("held out", validation, validation_records)):
        _LOGGER.info(
            "%s: %d records, %d samples of %d tokens, %d of them learned, in %d rows of %d",
            name,
            len(records),
            split.num_documents,
            split.num_tokens,
            int(split.learned_T.sum()),
            split.num_sequences(config.seq_length),
            config.seq_length,
        )
    digest = hashlib.sha256(f"{train.fingerprint} {validation.fingerprint}".encode()).hexdigest()
    return PreparedInstructions(
        train=train,
        validation=validation,
        tokenizer_path=_tokenizer_file(tokenizer.path),
        fingerprint=digest,
    )


def _tokenizer(config: InstructionConfig, base_tokenizer: Path | None) -> ChatTokenizer:
    path = Path(config.tokenizer).expanduser() if config.tokenizer else base_tokenizer
    if path is None:
        raise ConfigError("data.tokenizer must name a tokenizer, as the base's folder holds none, got an empty string")
    template = ""
    if config.chat_template:
        try:
            template = Path(config.chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"data.chat_template must be a Jinja file, got '{config.chat_template}': {error}"
            ) from error
    # A bare tokenizer.json does not say what ends a text.
    knows_its_end = path.is_dir() and (path / "tokenizer_config.json").is_file()
    eos_tokens = (config.eos_token,) if config.eos_token else () if knows_its_end else EOS_CANDIDATES
    return ChatTokenizer(path, chat_template=template, eos_tokens=eos_tokens)


def _tokenizer_file(path: Path) -> Path:
    return path if path.is_file() else path / "tokenizer.json"


def _rows(config: InstructionConfig, tokenizer: ChatTokenizer, records: list[Record], name: str) -> PackedSplit:
    samples = (sample for record in records for sample in _samples(tokenizer, record))
    return pack(
        ((sample.ids, sample.learned) for sample in samples),
        name=name,
        seq_length=config.seq_length,
        pad_id=tokenizer.eos_id,
        packing=config.packing,
        too_long=config.too_long,
    )


def _samples(tokenizer: ChatTokenizer, record: Record) -> list[Sample]:
    if record.messages is None:
        return [tokenizer.pair(record.prompt, record.completion)]
    return tokenizer.conversation(record.messages, where=record.where, tools=record.tools)
