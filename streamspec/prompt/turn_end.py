"""Finds chat templates whose turns end with a token at which generation does not: such a chat answers, and then goes on
as the user. tests/core/prompt/test_turn_end.py covers this module.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from streamspec.errors import StreamspecError
from streamspec.prompt.prompt_format import render_chat

PROBE = "ok"  # an answer that no template changes


def unended_turn_of(session: Any) -> str | None:
    """Returns what `unended_turn` says of a loaded session's chats."""
    ends = session.manifest.model.eos_token_ids
    template = session.template if session.manifest.prompt_format.kind == "chat" else None
    return unended_turn(template, session.special_tokens(), session.tokenizer, ends)


def unended_turn(
    template: str | None, specials: Mapping[str, str], tokenizer: Any, ends: Collection[int]
) -> str | None:
    """Returns what to say of a template that ends an answer with special tokens none of which is in `ends`; None where
    it ends one with text, or as generation does, or cannot be asked. `tokenizer`: of the library tokenizers."""
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": PROBE}]
    try:
        tail = render_chat(talk, template, specials, add_generation_prompt=False).rpartition(PROBE)[2]
    except StreamspecError:
        return None
    known = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    marks = sorted(map(re.escape, filter(None, known)), key=len, reverse=True)
    found = re.findall("|".join(marks), tail) if marks else []
    if not found or any(known[token] in ends for token in found):
        return None
    named = ", ".join(str(tokenizer.id_to_token(i)) for i in ends) or "none"
    return (
        f"the chat template ends an answer with {found[0]}, and generation ends at {named}: answers will run on; "
        "add that token to eos_token_id in the base's generation_config.json and export again"
    )
