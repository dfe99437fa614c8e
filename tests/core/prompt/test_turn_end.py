"""Turns that end with another token than generation: said of them, and of no template as models have it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken

from streamspec.prompt.turn_end import unended_turn, unended_turn_of
from tests.support.byte_tokenizers import byte_level


def turns(user: str, assistant: str, before: str = "") -> str:
    """A template that writes a message as one of these, with `%` for its content."""
    user, assistant = (text.replace("%", "{{ message['content'] }}") for text in (user, assistant))
    return (
        f"{before}{{% for message in messages %}}{{% if message['role'] == 'user' %}}{user}{{% else %}}{assistant}"
        "{% endif %}{% endfor %}"
    )


CHATML = turns("<|im_start|>user\n%<|im_end|>\n", "<|im_start|>assistant\n%<|im_end|>\n")
# The shapes of published templates, and the tokens at which their models stop.
SHAPES: dict[str, tuple[str, list[str]]] = {
    "chatml": (CHATML, ["<|im_end|>"]),
    "qwen": ("<|im_start|>system\nYou help.<|im_end|>\n" + CHATML, ["<|im_end|>", "<|endoftext|>"]),
    "llama 3": (
        turns(
            "<|start_header_id|>user<|end_header_id|>\n\n%<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n%<|eot_id|>",
            "{{ bos_token }}",
        ),
        ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
    ),
    "llama 2": (turns("{{ bos_token }}[INST] % [/INST]", " % {{ eos_token }}"), ["</s>"]),
    "mistral": (turns("[INST] %[/INST]", "%{{ eos_token }}", "{{ bos_token }}"), ["</s>"]),
    "gemma": (
        turns("<start_of_turn>user\n%<end_of_turn>\n", "<start_of_turn>model\n%<end_of_turn>\n", "{{ bos_token }}"),
        ["<eos>", "<end_of_turn>"],
    ),
    "phi 3": (turns("<|user|>\n%<|end|>\n", "<|assistant|>\n%<|end|>\n"), ["<|endoftext|>", "<|end|>"]),
    "zephyr": (turns("<|user|>\n%</s>\n", "<|assistant|>\n%</s>\n"), ["</s>"]),
    "deepseek": (turns("<|User|>%", "<|Assistant|>%<|end_of_sentence|>"), ["<|end_of_sentence|>"]),
    "glm": (turns("<|user|>\n%", "<|assistant|>\n%", "[gMASK]<sop>"), ["<|endoftext|>", "<|user|>"]),
    "command r": (
        turns(
            "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>%<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>%<|END_OF_TURN_TOKEN|>",
        ),
        ["<|END_OF_TURN_TOKEN|>"],
    ),
    "granite": (
        turns(
            "<|start_of_role|>user<|end_of_role|>%<|end_of_text|>\n",
            "<|start_of_role|>assistant<|end_of_role|>%<|end_of_text|>\n",
        ),
        ["<|end_of_text|>"],
    ),
    "gpt-oss": (
        turns(
            "<|start|>user<|message|>%<|end|>",
            "<|start|>assistant<|channel|>final<|message|>%{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}",
        ),
        ["<|return|>", "<|call|>"],
    ),
    "words alone": (turns("USER: %\n", "ASSISTANT: %\n"), ["</s>"]),
    "an end after another": (turns("U: %", "A: %<|sep|></s>"), ["</s>"]),
    "no template": ("", ["</s>"]),
    "a broken template": ("{{ 1 / 0 }}", ["</s>"]),
    "one that refuses": ("{{ raise_exception('no') }}", ["</s>"]),
}  # fmt: skip
MARKS = """<|im_start|> <|im_end|> <|endoftext|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <s> </s>
<|end_of_text|> <bos> <eos> <start_of_turn> <end_of_turn> <|user|> <|assistant|> <|end|> <|User|> <|Assistant|> <|sep|>
<sop> <|end_of_sentence|> <|START_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|END_OF_TURN_TOKEN|>
<|start_of_role|>
<|end_of_role|> <|start|> <|message|> <|channel|> <|return|> <|call|> [gMASK]"""


def said(template: str, ends: list[str]) -> str | None:
    tokenizer: Any = byte_level()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS.split()])
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    return unended_turn(template, specials, tokenizer, [tokenizer.token_to_id(end) for end in ends])


@pytest.mark.parametrize("name", SHAPES)
def test_a_template_as_its_model_has_it_is_not_spoken_of(name: str) -> None:
    assert said(*SHAPES[name]) is None


@pytest.mark.parametrize(
    ("name", "ends", "found"),
    [
        ("qwen", ["<|endoftext|>"], "<|im_end|>"),
        ("llama 3", ["<|end_of_text|>"], "<|eot_id|>"),
        ("gemma", ["<eos>"], "<end_of_turn>"),
        ("phi 3", ["<|endoftext|>"], "<|end|>"),
        ("mistral", ["<eos>"], "</s>"),
    ],
)
def test_a_turn_that_ends_elsewhere_is_said_in_one_line(name: str, ends: list[str], found: str) -> None:
    line = said(SHAPES[name][0], ends)
    assert line is not None and "\n" not in line
    assert (
        f"ends an answer with {found}, and generation ends at {ends[0]}:" in line and "generation_config.json" in line
    )


def test_a_model_without_end_tokens_is_told_of() -> None:
    assert "generation ends at none" in str(said(CHATML, []))


@pytest.mark.parametrize(("kind", "found"), [("chat", True), ("raw", False)])
def test_a_session_is_asked_about_its_chats_alone(kind: str, found: bool) -> None:
    tokenizer: Any = byte_level()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    manifest = SimpleNamespace(model=SimpleNamespace(eos_token_ids=[0]), prompt_format=SimpleNamespace(kind=kind))
    session = SimpleNamespace(manifest=manifest, template=CHATML, tokenizer=tokenizer, special_tokens=dict)
    assert (unended_turn_of(session) is not None) == found
