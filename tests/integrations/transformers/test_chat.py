"""What is learned of a conversation, token by token, under templates that append, that mark, and that render anew."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from moe_runtime.core.errors import ConfigError
from moe_runtime.integrations.transformers import ChatTokenizer, Sample

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Only the last turn keeps its reasoning, as Qwen3's template has it.
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one two"},
    {"role": "assistant", "content": "three"},
    {"role": "user", "content": "four"},
    {"role": "assistant", "content": "five six"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE with ChatML's marks, saved as transformers saves one."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(["one two three four five six assistant user system"] * 9, trainer)
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(path)
    return path


def shown(tokenizer: ChatTokenizer, folder: Path, sample: Sample) -> list[tuple[str, bool]]:
    """(text, learned) of each run of tokens with one flag."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    runs: list[tuple[list[int], bool]] = []
    for token, learned in zip(sample.ids, sample.learned, strict=True):
        if not runs or runs[-1][1] != learned:
            runs.append(([], learned))
        runs[-1][0].append(token)
    return [(backend.decode(ids, skip_special_tokens=False), learned) for ids, learned in runs]


def test_a_pair_is_learned_after_its_prompt_with_the_end_of_text(folder: Path) -> None:
    tokenizer = ChatTokenizer(folder)
    sample = tokenizer.pair("one two", " three")
    assert shown(tokenizer, folder, sample) == [("one two", False), (" three<|im_end|>", True)]
    assert sample.ids[-1] == tokenizer.eos_id == 2 and tokenizer.vocab_size == 295
    # " three" is one token and " thr" + "ee" would be others: the border holds although the text could merge there.
    assert tokenizer.pair("one thr", "ee").learned.count(False) == len(tokenizer.pair("one thr", "x").ids) - 2
    assert shown(tokenizer, folder, tokenizer.pair("", "five")) == [("five<|im_end|>", True)]


def test_every_answer_of_an_appending_template_is_learned(folder: Path) -> None:
    tokenizer = ChatTokenizer(folder)
    (sample,) = tokenizer.conversation(TURNS, where="a line")
    assert shown(tokenizer, folder, sample) == [
        ("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\none two<|im_end|>\n<|im_start|>assistant\n", False),
        ("three<|im_end|>\n", True),
        ("<|im_start|>user\nfour<|im_end|>\n<|im_start|>assistant\n", False),
        ("five six<|im_end|>\n", True),
    ]
    # Each mark is one token, so what is learned is what the model would be asked to say.
    assert sample.ids.count(1) == 5 and sample.ids.count(2) == 5


def test_a_greeting_and_what_follows_the_last_answer_are_not_learned(folder: Path) -> None:
    tokenizer = ChatTokenizer(folder)
    greeted = [{"role": "assistant", "content": "hi"}, *TURNS[1:4]]
    (sample,) = tokenizer.conversation(greeted, where="a line")
    assert [text for text, learned in shown(tokenizer, folder, sample) if learned] == ["three<|im_end|>\n"]
    with pytest.raises(ConfigError, match="a line has no answer to learn: expected an assistant's message after"):
        tokenizer.conversation(greeted[:2], where="a line")


def test_a_template_that_marks_is_believed(folder: Path) -> None:
    tokenizer = ChatTokenizer(folder, chat_template=MARKED)
    (sample,) = tokenizer.conversation(TURNS, where="a line")
    assert [text for text, learned in shown(tokenizer, folder, sample) if learned] == [
        "three<|im_end|>",
        "five six<|im_end|>",
    ]


def test_a_template_that_renders_anew_gives_each_answer_as_it_would_be_met(folder: Path) -> None:
    tokenizer = ChatTokenizer(folder, chat_template=REASONING)
    samples = tokenizer.conversation(TURNS, where="a line")
    asked = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\none two<|im_end|>\n<|im_start|>assistant\n"
    assert [shown(tokenizer, folder, sample) for sample in samples] == [
        [(asked, False), ("<think>three<|im_end|>\n", True)],
        [
            (f"{asked}three<|im_end|>\n<|im_start|>user\nfour<|im_end|>\n<|im_start|>assistant\n", False),
            ("<think>five six<|im_end|>\n", True),
        ],
    ]


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ raise_exception('no system role') }}", "a line cannot be rendered by the chat template: no system role"),
        ("{{ messages[0].content }}", "a line cannot be split into prompt and answer"),
        ("{% for m in messages %}{% generation %}{% endgeneration %}{% endfor %}", "a line has nothing to learn"),
    ],
)
def test_a_template_that_does_not_fit_is_refused(folder: Path, template: str, sentence: str) -> None:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
    if "split" in sentence:
        template = "{% if add_generation_prompt %}> {% endif %}{{ messages | length }}"
    with pytest.raises(ConfigError) as caught:
        ChatTokenizer(folder, chat_template=template).conversation(turns, where="a line")
    assert str(caught.value).startswith(sentence)


def test_no_tokenizer_no_end_and_no_template_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a tokenizer\.json or a folder with a tokenizer, got"):
        ChatTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        ChatTokenizer(tmp_path / "tokenizer.json")
    bare = folder / "tokenizer.json"
    with pytest.raises(ConfigError, match=r"must know an end-of-text token, one of .*, got none of them"):
        ChatTokenizer(bare)
    assert ChatTokenizer(bare, eos_tokens=("</s>", "<|endoftext|>")).eos_id == 0
    with pytest.raises(ConfigError, match="a line has messages, which need a chat template"):
        ChatTokenizer(bare, eos_tokens=("<|endoftext|>",)).conversation(TURNS, where="a line")
