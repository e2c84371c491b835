"""Tokenizers and chat templates: a conversation, or a prompt and its completion, as ids with the part to learn marked.

What is learned is marked exactly, token by token: prompt and completion are tokenized apart, as they are when a model
answers, so no token straddles the border.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from moe_runtime.core.errors import ConfigError

_ASSISTANT = "assistant"
_TOKENIZER_FILE = "tokenizer.json"
_MARKS = "{% generation", "{%- generation"


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids, and which of them are learned."""

    ids: list[int]
    learned: list[bool]


class ChatTokenizer:
    """A tokenizer with its chat template.

    path           a folder with a tokenizer as transformers saves one, or a tokenizer.json
    chat_template  in place of the tokenizer's own; "" = that
    eos_tokens     what may end a completion, the first that the tokenizer knows; empty: its own
    Raises ConfigError for a path without tokenizer and one that knows no end of text.
    """

    def __init__(self, path: Path, *, chat_template: str = "", eos_tokens: Sequence[str] = ()) -> None:
        self.path = path
        self._tokenizer: Any = _load(path)
        if chat_template:
            self._tokenizer.chat_template = chat_template
        known = self._tokenizer.get_vocab()
        wanted = [*eos_tokens] if eos_tokens else [self._tokenizer.eos_token]
        found = [known[token] for token in wanted if token in known]
        if not found:
            raise ConfigError(f"the tokenizer {path} must know an end-of-text token, one of {wanted}, got none of them")
        self.eos_id: int = found[0]
        self.vocab_size = max(known.values()) + 1

    @property
    def has_template(self) -> bool:
        """Whether conversations can be rendered."""
        return bool(self._tokenizer.chat_template)

    def pair(self, prompt: str, completion: str) -> Sample:
        """The prompt as the tokenizer begins a text, then the completion and an end of text, which are learned."""
        before = list(self._tokenizer(prompt).input_ids) if prompt else []
        if before and before[-1] == self.eos_id:  # some tokenizers end every text
            before.pop()
        after = [*self._ids(completion), self.eos_id]
        return _joined([(before, False), (after, True)])

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], *, where: str, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[Sample]:
        """What the assistant answers is learned, up to and with what the template ends its turn with.

        One sample, where the template only ever appends as turns are added, or where it marks what is generated itself
        (`{% generation %}`). A template that renders earlier turns anew, as those that drop old reasoning do, gives one
        sample an assistant turn, each as the model would meet it. A greeting that opens the conversation is context.
        ConfigError names `where` for what cannot be rendered, and for a conversation without an answer.
        """
        template = self._tokenizer.chat_template
        if not template:
            raise ConfigError(
                f"{where} has messages, which need a chat template: expected one in the tokenizer {self.path} or in "
                "data.chat_template, got neither"
            )
        if any(mark in template for mark in _MARKS):
            return [self._marked(messages, where, tools)]
        turns = [index for index, message in enumerate(messages) if index and message.get("role") == _ASSISTANT]
        if not turns:
            raise ConfigError(f"{where} has no answer to learn: expected an assistant's message after another one")
        whole, end, parts, alone = "", 0, list[tuple[list[int], bool]](), list[Sample]()
        appends = True
        for index in turns:
            before = self._rendered(messages[:index], where, tools, answer=True)
            after = self._rendered(messages[: index + 1], where, tools, answer=False)
            if not after.startswith(before):
                raise ConfigError(
                    f"{where} cannot be split into prompt and answer: the chat template's text with the answer should "
                    f"start with its generation prompt, got {after[-80:]!r} for {before[-80:]!r}"
                )
            prompt, answer = before[end:], after[len(before) :]
            appends = appends and before.startswith(whole)
            if appends:
                parts += [(self._ids(prompt), False), (self._ids(answer), True)]
            alone.append(_joined([(self._ids(before), False), (self._ids(answer), True)]))
            whole, end = after, len(after)
        return [_joined(parts)] if appends else alone

    def _marked(self, messages: Sequence[Mapping[str, Any]], where: str, tools: Any) -> Sample:
        found = self._apply(messages, where, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        learned = [bool(flag) for flag in found["assistant_masks"]]
        if not any(learned):
            raise ConfigError(f"{where} has nothing to learn: the chat template marks no token of it as generated")
        return Sample(list(found["input_ids"]), learned)

    def _rendered(self, messages: Sequence[Mapping[str, Any]], where: str, tools: Any, *, answer: bool) -> str:
        return self._apply(messages, where, tools, tokenize=False, add_generation_prompt=answer)

    def _apply(self, messages: Sequence[Mapping[str, Any]], where: str, tools: Any, **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template([dict(message) for message in messages], tools=tools, **options)
        except (jinja2.TemplateError, TypeError, ValueError) as error:  # what a template raises of what it is given
            reason = " ".join(str(error).split())
            raise ConfigError(f"{where} cannot be rendered by the chat template: {reason}") from error

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)


def _joined(parts: Sequence[tuple[list[int], bool]]) -> Sample:
    ids = [token for tokens, _ in parts for token in tokens]
    learned = [flag for tokens, flag in parts for _ in tokens]
    return Sample(ids, learned)


def _load(path: Path) -> Any:
    try:
        if (path / "tokenizer_config.json").is_file():
            return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        file = path if path.is_file() else path / _TOKENIZER_FILE
        if file.is_file():
            return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_buffer(file.read_bytes()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the tokenizer {path} cannot be read: {' '.join(str(error).split())}") from error
    raise ConfigError(f"expected a {_TOKENIZER_FILE} or a folder with a tokenizer, got {str(path)!r}")
