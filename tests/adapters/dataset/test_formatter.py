"""Rows of conversations: every answer is trained, as transformers' own apply_chat_template writes it; tools are shown
or refused; templates that rewrite earlier turns give several rows.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast, TokenizersBackend

from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.adapters.base_models.tokenizer import load_tokenizer
from streamspec.adapters.dataset.formatter import Formatter, end_texts
from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.data import Example, iterate_examples
from streamspec.errors import DataError
from streamspec.prompt.prompt_format import PromptFormat
from streamspec.prompt.template_file import special_token
from tests.support.byte_tokenizers import byte_level

TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT
SILENT = PLAIN.replace(TURN, "{% if m.role != 'tool' %}" + TURN + "{% endif %}")
TOOLS = """
{%- if tools %}{{ '<|im_start|>system\nCall one of: ' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.content %}{{ m.content }}{% endif %}
    {%- for call in m.tool_calls or [] %}
        {{- '<call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '</call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
THINKING = TOOLS.replace("<|im_start|>assistant\n' }}", "<|im_start|>assistant\n<think>' }}")
# Reasoning is written in the last answer alone.
REASONING = """
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' and loop.last %}{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}
    {{- m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

FUNCTION = {"name": "weather", "description": "é", "parameters": {"type": "object", "properties": {"city": {}}}}
SCHEMA = {"type": "function", "function": FUNCTION}
ARGUMENTS = {"city": "Kyōto", "days": [1, 2]}
CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "weather", "arguments": ARGUMENTS}}],
}
TALK = [
    {"role": "user", "content": "Rain?"},
    CALLING,
    {"role": "tool", "name": "weather", "tool_call_id": "1", "content": '{"rain": true}'},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Bye"},
]


def tokenizer(template: str | None, backend: Tokenizer | None = None) -> Any:
    backend = backend or byte_level()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    fast.chat_template = template
    return fast


def rows(
    template: str, row: dict[str, Any], tmp_path: Path, kind: str = "chat", ends: tuple[str, ...] = ()
) -> list[TokenRow]:
    (tmp_path / "d.jsonl").write_text(json.dumps(row))
    (example,) = iterate_examples(tmp_path / "d.jsonl")
    return Formatter(tokenizer(template), PromptFormat(kind), ends).rows(example)


def trained(row: TokenRow) -> list[str]:
    """The stretches of a row that are trained, as text."""
    own, found = tokenizer(None), [[]]
    for token, counts in zip(row.input_ids, row.loss_mask, strict=True):
        if counts:
            found[-1].append(token)
        elif found[-1]:
            found.append([])
    return [own.decode(part) for part in found if part]


def test_every_answer_is_trained_as_transformers_writes_it(tmp_path: Path) -> None:
    (row,) = rows(TOOLS, {"messages": TALK, "tools": [SCHEMA]}, tmp_path)
    own = tokenizer(TOOLS)
    whole = own.apply_chat_template(TALK, tools=[SCHEMA], tokenize=False)
    assert own.decode(row.input_ids) == whole.removesuffix("\n")
    answers = []
    for i, message in enumerate(TALK):
        if message["role"] == "assistant":
            prompt = own.apply_chat_template(TALK[:i], tools=[SCHEMA], tokenize=False, add_generation_prompt=True)
            answers.append(
                own.apply_chat_template(TALK[: i + 1], tools=[SCHEMA], tokenize=False)[len(prompt) :].rstrip("\n")
            )
    assert trained(row) == answers
    assert answers[0] == '<call>{"name": "weather", "arguments": {"city": "Kyōto", "days": [1, 2]}}</call><|im_end|>'
    assert answers[1:] == ["Yes.<|im_end|>", "Bye<|im_end|>"]


def test_arguments_as_json_text_are_rendered_as_objects(tmp_path: Path) -> None:
    call = {"function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}
    written = [TALK[0], CALLING | {"tool_calls": [call]}, *TALK[2:]]
    one, other = (rows(TOOLS, {"messages": m, "tools": [SCHEMA]}, tmp_path) for m in (TALK, written))
    assert one == other


@pytest.mark.parametrize(
    ("template", "row", "says"),
    [
        (PLAIN, {"messages": TALK[:4], "tools": [SCHEMA]}, "leaves out the tool weather"),
        (PLAIN, {"messages": TALK[:2]}, "leaves out the tool call weather"),
        (SILENT, {"messages": [TALK[0], *TALK[2:]]}, "leaves out messages of the role tool"),
        (THINKING, {"messages": TALK}, "writes an answer with tool calls or reasoning otherwise"),
    ],
)
def test_templates_without_tools_refuse_them_by_name(
    template: str, row: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=f"line 1: the chat template .*{says}"):
        rows(template, row, tmp_path)


def test_raw_text_refuses_tools(tmp_path: Path) -> None:
    for row in ({"messages": TALK}, {"messages": TALK[4:], "tools": [SCHEMA]}):
        with pytest.raises(DataError, match="has tools; expected --format chat"):
            rows(TOOLS, row, tmp_path, kind="raw")


def test_a_template_that_rewrites_earlier_turns_gives_a_row_for_each_answer(tmp_path: Path) -> None:
    talk = [TALK[4], TALK[5] | {"reasoning_content": "hm"}, TALK[0], TALK[3]]
    first, second = rows(REASONING, {"messages": talk}, tmp_path)
    assert trained(first) == ["<think>hm</think>Bye<|im_end|>"] and trained(second) == ["<think></think>Yes.<|im_end|>"]
    own = tokenizer(REASONING)
    for row, count in ((first, 2), (second, 4)):
        assert own.decode(row.input_ids) == own.apply_chat_template(talk[:count], tokenize=False).rstrip("\n")


def test_raw_conversations_keep_every_answer(tmp_path: Path) -> None:
    first, second = rows(PLAIN, {"messages": [*TALK[4:], TALK[0], TALK[3]]}, tmp_path, kind="raw")
    assert trained(first) == ["Bye<|im_end|>"] and trained(second) == ["Yes.<|im_end|>"]


def test_of_a_prompt_in_messages_nothing_is_trained(tmp_path: Path) -> None:
    (row,) = rows(PLAIN, {"prompt": [*TALK[4:], TALK[0]], "completion": [TALK[3]]}, tmp_path)
    assert trained(row) == ["Yes.<|im_end|>"]


def test_turns_without_words_or_weight_are_not_trained(tmp_path: Path) -> None:
    silent = {"role": "assistant", "content": None}
    (row,) = rows(PLAIN, {"messages": [TALK[4], silent, TALK[0], TALK[3] | {"weight": 0}, TALK[4], TALK[5]]}, tmp_path)
    assert trained(row) == ["Bye<|im_end|>"]
    assert rows(PLAIN, {"messages": [TALK[4], silent]}, tmp_path) == []


def test_a_conversation_that_ends_with_a_question_is_trained_up_to_it(tmp_path: Path) -> None:
    (row,) = rows(PLAIN, {"messages": [*TALK[4:], TALK[0]]}, tmp_path)
    assert trained(row) == ["Bye<|im_end|>"]
    with pytest.raises(DataError, match="has no completion.*--target-adapter"):
        rows(PLAIN, {"messages": [TALK[0]]}, tmp_path)


@pytest.mark.parametrize("kind", ["chat", "raw"])
@pytest.mark.parametrize("row", [{"prompt": "Rain?"}, {"messages": [TALK[0]]}, {"prompt": [TALK[0]]}], ids=str)
def test_prompts_alone_end_after_what_generation_begins_with(kind: str, row: dict[str, Any], tmp_path: Path) -> None:
    formatter = Formatter(tokenizer(PLAIN), PromptFormat(kind))
    formatter.prompts_alone = True
    (tmp_path / "data.jsonl").write_text(json.dumps(row))
    ((found, opening),) = formatter.all_rows(list(iterate_examples(tmp_path / "data.jsonl")))[0]
    begun = "<|im_start|>user\nRain?<|im_end|>\n<|im_start|>assistant\n" if kind == "chat" else "Rain?"
    assert formatter.tokenizer.decode(found.input_ids) == begun + "<|im_end|>"
    assert opening == len(found.input_ids) - 1 == found.loss_mask.index(True)


def test_a_last_question_that_the_target_answers_is_the_one_asked(tmp_path: Path) -> None:
    formatter = Formatter(tokenizer(PLAIN), PromptFormat("chat"))
    formatter.prompts_alone = True
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": [TALK[0], *TALK[3:5]]}))
    ((found, opening),) = formatter.all_rows(list(iterate_examples(tmp_path / "data.jsonl")))[0]
    assert trained(found) == ["<|im_end|>"]
    asked = formatter.tokenizer.decode(found.input_ids[:opening])
    assert "Yes." in asked and asked.endswith("Thanks<|im_end|>\n<|im_start|>assistant\n")


def test_the_end_of_a_turn_that_is_no_end_of_text(tmp_path: Path) -> None:
    """As Gemma's: generation stops at a second token, which the generation config names, or else at the first."""
    template = PLAIN.replace("<|im_end|>", "<eos>")  # `<|im_end|>` is the tokenizer's own end, `<eos>` another token
    (row,) = rows(template, {"messages": TALK[4:]}, tmp_path, ends=("<eos>",))
    assert trained(row) == ["Bye<eos>"]
    (row,) = rows(template, {"messages": TALK[4:]}, tmp_path)
    assert trained(row) == ["Bye<|im_end|>"]
    own = tokenizer(template)
    written = Formatter(own, PromptFormat("chat"), ("<eos>",)).answer_ends
    assert written == (own.convert_tokens_to_ids("<eos>"), own.eos_token_id)
    assert Formatter(own, PromptFormat(), ("<eos>",)).answer_ends == written[::-1]


def test_ends_are_those_of_the_generation_config(tmp_path: Path) -> None:
    own = tokenizer(None)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [own.eos_token_id, 0]}))
    assert end_texts(tmp_path, own) == ["<|im_end|>", "<eos>"]
    formatter = Formatter(own, PromptFormat(), end_texts(tmp_path, own))
    assert formatter.end_ids == (own.eos_token_id, 0)


def test_answers_stand_as_in_the_text_where_a_tokenizer_begins_texts_with_a_blank(tmp_path: Path) -> None:
    pieces = ["<eos>", "▁", "a", "b", "\n", "▁a", "▁b", "<unk>"]
    backend = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [("▁", "a"), ("▁", "b")], unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Replace("▁", " ")
    own = tokenizer("{% for m in messages %}{{ m.content + '\n' }}{% endfor %}", backend)
    chat = Formatter(own, PromptFormat("chat"))
    talk = Example("messages", [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}])
    (row,) = chat.rows(talk)
    assert own.convert_ids_to_tokens(row.input_ids) == ["▁a", "\n", "b", "<|im_end|>"]


def test_examples_tokenized_together_are_as_each_alone(tmp_path: Path) -> None:
    data = [{"prompt": "a", "completion": "b" * i} for i in range(3)]
    talks = [{"messages": TALK[4:]}, {"messages": TALK, "tools": [SCHEMA]}, {"messages": [TALK[0], TALK[3]] * 3}]
    texts = [{"text": "One two three."}, {"text": "x"}]
    for kind, some in (("raw", data), ("chat", talks), ("raw", texts)):
        (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        examples = list(iterate_examples(tmp_path / "d.jsonl"))
        formatter = Formatter(tokenizer(TOOLS), PromptFormat(kind))
        together = formatter.all_rows(examples)
        assert together == [formatter.all_rows([example])[0] for example in examples]
        for prompted in together:
            for row, opening in prompted:
                assert row.loss_mask[opening:].count(False) == 0 or some is texts


def test_answers_after_a_beginning_that_the_template_does_not_write(tmp_path: Path) -> None:
    """As of models that think first: what a prompt ends with is not in the turns that the template writes."""
    template = PLAIN.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think></think>{% endif")
    (tmp_path / "d.jsonl").write_text(json.dumps({"messages": TALK[4:]}))
    formatter = Formatter(tokenizer(template), PromptFormat("chat"))
    (row,) = formatter.rows(next(iterate_examples(tmp_path / "d.jsonl")))
    assert trained(row) == ["Bye<|im_end|>"]
    assert tokenizer(None).decode(row.input_ids).endswith("assistant\n<think></think>Bye<|im_end|>")
    assert formatter.chat is not None and formatter.chat.odd_beginning == "tant\n<think></think>"


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        ("<think>\nhm\n</think>\n\nBye", "hm\n</think>\n\nBye"),
        ("Bye", "Bye"),
        ("<think>hm</think>Bye", "hm</think>Bye"),
    ],
)
def test_a_thought_that_the_prompt_has_begun_is_not_begun_again(content: str, answer: str, tmp_path: Path) -> None:
    """As of R1-Distill, whose template leaves thoughts out of the turns that it writes."""
    template = PLAIN.replace("m.content +", "m.content.split('</think>')[-1] +")
    template = template.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif")
    talk = [TALK[4], {"role": "assistant", "content": content}]
    (row,) = rows(template, {"messages": talk}, tmp_path)
    assert trained(row) == [f"{answer}<|im_end|>"]
    assert tokenizer(None).decode(row.input_ids).endswith(f"assistant\n<think>\n{answer}<|im_end|>")


def test_a_refusal_of_the_template_names_the_row(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 1: the chat template refused the messages: no system"):
        rows("{{ raise_exception('no system') }}", {"messages": TALK[4:]}, tmp_path)


def test_the_end_is_the_one_that_transformers_takes(base: Path, tmp_path: Path) -> None:
    """GPT-2's settings name none, and its class alone knows it; a map of special tokens of transformers 4 counts beside
    settings that transformers 5 wrote."""
    shutil.copytree(base, tmp_path / "base")
    settings, specials = (tmp_path / "base" / f"{name}.json" for name in ("tokenizer_config", "special_tokens_map"))
    resolved = resolve_base(tmp_path / "base", lambda line: None)
    written = json.loads(settings.read_text())
    settings.write_text("{}")
    specials.unlink(missing_ok=True)
    assert Formatter(load_tokenizer(resolved), PromptFormat("raw")).end_ids == (2,)  # of the config
    written.pop("added_tokens_decoder", None)
    settings.write_text(json.dumps(written | {"eos_token": "</s>"}))
    specials.write_text(json.dumps({"eos_token": "<s>"}))
    mine, expected = load_tokenizer(resolved), TokenizersBackend.from_pretrained(resolved.path)
    assert mine.eos_token == special_token(resolved.path, "eos_token") == expected.eos_token == "<s>"
    decoder = {"2": {"content": "</s>", "special": True}}
    settings.write_text(json.dumps(written | {"eos_token": "</s>", "added_tokens_decoder": decoder}))
    assert special_token(resolved.path, "eos_token") == TokenizersBackend.from_pretrained(resolved.path).eos_token
