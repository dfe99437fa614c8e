"""Says how models mark what they think before an answer: one table for the runtime, the server and training.

A row is chosen by the chat template, as a family's models differ: tags that a template does not name stay text.
`tests/runtime/text/test_thought.py` covers this file.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ThoughtTags:
    """The texts around a thought, special tokens included.

    `heads`: where an answer is written in messages, what those begin with that are its text, its final one first.
    `end` then ends each message, and another one begins after it. `efforts`: the words that the template has for
    `reasoning_effort`, where it has these alone. `again`: whether more thoughts may come within the text, where both
    tags are tokens.
    """

    begin: str
    end: str
    heads: tuple[str, ...] = ()
    efforts: tuple[str, ...] = ()
    again: bool = False


TAGS = (
    ThoughtTags(  # gpt-oss: channels
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant",
        ("<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
        ("none", "low", "medium", "high"),
    ),
    ThoughtTags("<|channel>thought\n", "<channel|>"),  # Gemma 4
    ThoughtTags("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ThoughtTags("[THINK]", "[/THINK]", again=True),  # Mistral, whose mistral-common splits all of an answer at them
    ThoughtTags("◁think▷", "◁/think▷"),  # Kimi VL
    *(ThoughtTags(f"<{tag}>", f"</{tag}>") for tag in ("think", "thinking", "seed:think", "thought", "reasoning")),
)


def tags_of(template: str | None) -> ThoughtTags | None:
    """Returns the tags that a chat template names, None where it names none."""
    return next((tags for tags in TAGS if template and (tags.begin.rstrip() in template or tags.end in template)), None)
