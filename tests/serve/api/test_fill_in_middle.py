"""Completions with a suffix: the tokens of models that fill in the middle, from their vocabulary."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, processors

from streamspec.serve.api.fill_in_middle import TOKENS, between
from streamspec.serve.errors import ApiError
from tests.support.byte_tokenizers import byte_level


@pytest.mark.parametrize("tokens", TOKENS)
def test_the_answer_stands_between_prompt_and_suffix(tokens: tuple[str, str, str]) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    prefix, suffix, middle = (tokenizer.token_to_id(token) for token in tokens)
    before, after = (tokenizer.encode(text).ids for text in ("def f(", "return 1"))
    assert between("def f(", "return 1", tokenizer) == [prefix, *before, suffix, *after, middle]


def test_a_tokenizer_that_begins_texts_with_a_token_begins_these_with_it() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in TOKENS[0]])
    tokenizer.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 0)])
    assert between("a", "b", tokenizer)[:2] == [0, tokenizer.token_to_id(TOKENS[0][0])]


def test_a_vocabulary_without_such_tokens_is_refused_by_name() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in TOKENS[0][:2]])
    with pytest.raises(ApiError, match="suffix for a vocabulary without tokens to fill in the middle") as caught:
        between("a", "b", tokenizer)
    assert (caught.value.status, caught.value.param) == (400, "suffix") and "\n" not in caught.value.message
