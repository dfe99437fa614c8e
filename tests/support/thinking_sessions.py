"""Sessions of a toy model that thinks: it says a script, in tokens of whichever kind, and drafts some of it rightly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tokenizers import AddedToken, Tokenizer

from streamspec.prompt.prompt_format import PromptFormat
from streamspec.runtime import Session
from streamspec.runtime.decoding.policy import DecodingPolicy
from streamspec.runtime.draft_sources.ngram import NGRAM
from tests.support.byte_tokenizers import EOS, byte_level
from tests.support.manifests import manifest
from tests.support.toy_runner import ToyRunner

GO = "<go>"  # where answers begin
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<go>{% else %}<{{ m.role }}>{% endif %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}"
    '<call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}'
    "{% endfor %}{% if add_generation_prompt %}<go>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
OPENED = TEMPLATE.replace("{% if enable_thinking is", "<think>\n{% if enable_thinking is")
KINDS = {"special": True, "added": False}  # the tags' tokens; "spelled": they have none


def tokenizer_of(kind: str, tags: Sequence[str] = ("<think>", "</think>")) -> Tokenizer:
    """Bytes, the token of `GO`, and the tags: special tokens, added ones, or spelled in bytes."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(GO, special=True)])
    if kind in KINDS:
        tokenizer.add_tokens([AddedToken(tag, special=KINDS[kind]) for tag in tags])
    return tokenizer


def thinking(
    script: str,
    kind: str = "added",
    template: str = TEMPLATE,
    rows: int = 8,
    tags: Sequence[str] = ("<think>", "</think>"),
    seed: int = 0,
    context: int = 600,
) -> Session:
    """A session that answers with `script`, which begins where the template's `GO` does, and end-of-text."""
    tokenizer = tokenizer_of(kind, tags)
    go, said = tokenizer.token_to_id(GO), [*tokenizer.encode(script, add_special_tokens=False).ids, EOS]

    def rule(ids: Sequence[int]) -> int:
        at = len(ids) - 1 - [*reversed(ids)].index(go)
        return said[min(len(ids) - at - 1, len(said) - 1)]

    size = tokenizer.get_vocab_size()
    made = manifest()
    model = replace(made.model, vocab_size=size, eos_token_ids=(EOS,), context_length=context)
    made = replace(made, model=model, prompt_format=PromptFormat("chat"))
    runner = ToyRunner(rule, size, gamma=4, width=2, context=context, skill=0.8, seed=seed)
    policy: Any = DecodingPolicy((EOS,), rows, sources=(NGRAM,))
    return Session(runner, made, tokenizer, template, policy=policy)
