"""Tokenizers of GGUF files: special tokens as the file has them, text cut as llama.cpp cuts it."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, GemmaTokenizer, GenerationConfig

from streamspec.adapters.base_models.gguf import tokenizer as gguf_tokenizer
from streamspec.adapters.base_models.gguf.converter import convert
from streamspec.adapters.base_models.gguf.file import GgufFile
from streamspec.adapters.base_models.gguf.tokenizer import PRE_TOKENIZERS, GgufTokenizer, tokenizer_of
from streamspec.adapters.base_models.resolve import Base
from streamspec.adapters.base_models.tokenizer import load_tokenizer
from streamspec.errors import BaseModelError
from streamspec.prompt.prompt_format import PromptFormat
from tests.support import gguf_files as files
from tests.support.gguf_cases import made

SPACE = "▁"


def built(vocabulary: dict[str, Any], **special: Any) -> GgufTokenizer:
    words = vocabulary | files.special_keys(**special)
    return tokenizer_of(GgufFile(Path("m.gguf"), {f"tokenizer.ggml.{key}": value for key, value in words.items()}))


def greedy_pieces(text: str, vocabulary: dict[str, Any], prefix: bool) -> list[int]:
    """SentencePiece's algorithm: of all neighbours whose union is a token, the best score merges first, the leftmost of
    equals. Letters without a token become bytes. User-defined tokens stand alone.
    """
    tokens, scores = vocabulary["tokens"], vocabulary["scores"]
    ids = {token: number for number, token in enumerate(tokens)}
    result: list[int] = []
    for number, part in enumerate(text.split("  ")):
        result += [ids["  "]] if number else []
        symbols = list(((" " if prefix and part else "") + part).replace(" ", SPACE))
        while True:
            pairs = [
                (-scores[ids[left + right]], at)
                for at, (left, right) in enumerate(pairwise(symbols))
                if left + right in ids
            ]
            if not pairs:
                break
            at = min(pairs)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        for symbol in symbols:
            result += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return result


def test_without_scores_the_earlier_token_merges_first() -> None:
    """As of files made of vocabularies without a tokenizer.model, whose scores are all equal."""
    vocabulary = files.sentencepiece_vocabulary()
    same = built(vocabulary | {"scores": [-1000.0] * len(vocabulary["tokens"])}).tokenizer
    draw = random.Random(0)
    for text in [" thin", *("".join(draw.choice("thean dir") for _ in range(30)) for _ in range(100))]:
        assert same.encode(text).ids == built(vocabulary).tokenizer.encode(text).ids, text


def test_tokens_of_a_letter_that_is_a_byte_are_found() -> None:
    """Tabs of older Gemma."""
    vocabulary = files.sentencepiece_vocabulary()
    for key, value in (("tokens", "\t\t"), ("token_type", files.NORMAL), ("scores", 0.0)):
        vocabulary[key] = [*vocabulary[key], value]
    tokenizer = built(vocabulary, add_space_prefix=False, add_bos_token=False).tokenizer
    for text in ("\t\tthe", "\tthe\t\t", "\t\t\t", "é\t"):
        assert tokenizer.encode(text).ids == greedy_pieces(text, vocabulary, prefix=False), text
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_merges_the_best_score_first(prefix: bool) -> None:
    vocabulary = files.sentencepiece_vocabulary()
    tokenizer = built(vocabulary, add_space_prefix=prefix, add_bos_token=False).tokenizer
    draw = random.Random(0)
    texts = ["the and in", " the", "é😀 the", "a  the   b", "\n\tthe", ""]
    texts += ["".join(draw.choice("thean dir \né7") for _ in range(draw.randint(1, 40))) for _ in range(200)]
    for text in texts:
        assert tokenizer.encode(text).ids == greedy_pieces(text, vocabulary, prefix), text
        assert tokenizer.decode(tokenizer.encode(text).ids) == text or (prefix and "  " in text)


# Merges that the best score first would not make: "t he" before "th e".
GEMMA_MERGES = ["h e", "t he", "▁ the", "i n", "a n", "an d", "▁ and", "e r", "\n \n", "▁ ▁", "t h"]


def gemma_vocabulary() -> dict[str, Any]:
    """Metadata of a tokenizer with bytes, scores that say nothing, and merges."""
    vocabulary = files.sentencepiece_vocabulary()
    tokens = [token for token in vocabulary["tokens"] if token != "  "]
    tokens += ["\n", *sorted({"".join(merge.split(" ")) for merge in GEMMA_MERGES} - set(tokens))]
    kinds = dict(zip(vocabulary["tokens"], vocabulary["token_type"], strict=True))
    types = [kinds.get(token, files.NORMAL) for token in tokens]
    given = {"tokens": tokens, "token_type": types, "scores": [0.0] * len(tokens), "merges": GEMMA_MERGES}
    return {"model": "gemma4", **given}


def test_merges_of_gemma_4_are_the_files() -> None:
    vocabulary = gemma_vocabulary()
    tokenizer = built(vocabulary, add_space_prefix=False, add_bos_token=True).tokenizer
    numbered = {token: number for number, token in enumerate(vocabulary["tokens"])}
    pairs = [tuple(merge.split(" ")) for merge in GEMMA_MERGES]
    special = dict(zip(("pad", "eos", "bos", "unk"), files.SPECIAL, strict=False))
    theirs = GemmaTokenizer(vocab=numbered, merges=pairs, **{f"{name}_token": token for name, token in special.items()})
    draw = random.Random(0)
    texts = ["the and in", " the", "é😀 the", "a  the   b\n\n\n", "\n\tthe", "", "<s>the</s>"]
    texts += ["".join(draw.choice("thean dir \né7") for _ in range(draw.randint(1, 40))) for _ in range(200)]
    for text in texts:
        expected = theirs(text, add_special_tokens=False).input_ids
        assert tokenizer.encode(text).ids == [files.BOS, *expected], text
        assert tokenizer.decode(tokenizer.encode(text).ids) == text or "<s>" in text


def test_what_files_say_of_gemma_4s_begin_and_ends_is_not_heeded() -> None:
    """As in llama.cpp: many files have `<eos>` as a word, and begin no text."""
    vocabulary = gemma_vocabulary()
    at = len(vocabulary["tokens"])
    ends = {"<eos>": files.NORMAL, "<turn|>": files.CONTROL, "<|tool_response>": files.USER_DEFINED}
    vocabulary["tokens"] = [*vocabulary["tokens"], *ends]
    vocabulary["token_type"] = [*vocabulary["token_type"], *ends.values()]
    vocabulary["scores"] = [0.0] * len(vocabulary["tokens"])
    found = built(vocabulary, add_bos_token=False, suppress_tokens=[3])
    assert found.ends == (files.EOS, at, at + 1, at + 2) and found.suppressed == (3,)
    assert found.tokenizer.encode("<eos>").ids == [files.BOS, at]


def test_special_tokens_in_a_text_are_one_token_each() -> None:
    for vocabulary in (files.sentencepiece_vocabulary(), files.bpe_vocabulary()):
        tokenizer = built(vocabulary).tokenizer
        assert tokenizer.encode("<end>the</s>", add_special_tokens=False).ids[::2] == [files.EOT, files.EOS]
        assert (
            tokenizer.decode([files.EOT]) == "" and tokenizer.decode([files.EOT], skip_special_tokens=False) == "<end>"
        )
    assert built(files.bpe_vocabulary()).tokenizer.encode("<user defined>", add_special_tokens=False).ids == [5]
    assert built(files.bpe_vocabulary()).tokenizer.decode([5]) == "<user defined>"  # not special: it is text


@pytest.mark.parametrize(
    ("kind", "flags", "begins", "ends"),
    [
        ("bpe", {"add_bos_token": True}, True, False),
        ("bpe", {"add_bos_token": False}, False, False),
        ("bpe", {"add_bos_token": None}, False, False),
        ("bpe", {"add_bos_token": True, "add_eos_token": True}, True, True),
        ("llama-bpe", {"add_bos_token": None}, True, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("minicpm5", {"add_bos_token": None}, False, False),
        ("sentencepiece", {"add_bos_token": None}, True, False),
        ("sentencepiece", {"add_bos_token": False}, False, False),
    ],
)
def test_a_text_begins_and_ends_as_the_file_says(kind: str, flags: dict[str, Any], begins: bool, ends: bool) -> None:
    vocabulary = {
        "bpe": files.bpe_vocabulary(),
        "llama-bpe": files.bpe_vocabulary("llama-bpe"),
        "minicpm5": files.bpe_vocabulary("minicpm5"),
        "sentencepiece": files.sentencepiece_vocabulary(),
    }[kind]
    ids = built(vocabulary, **flags).tokenizer.encode("the").ids
    assert (ids[0] == files.BOS, ids[-1] == files.EOS) == (begins, ends)
    pair = built(vocabulary, **flags).tokenizer.encode("the", "and").ids
    assert (pair.count(files.BOS), pair.count(files.EOS)) == (2 * begins, 2 * ends)


# What each way to split cuts the same text into.
TEXT = "I'll buy 12345 naïve cars,\n\n  x+=1 中文 HTMLPage"
CUTS = {
    "gpt-2": "I|'ll| buy| 12345| naïve| cars|,|\n\n | x|+=|1| 中文| HTMLPage",
    "smollm": "I|'ll| buy| |1|2|3|4|5| naïve| cars|,|\n\n | x|+=|1| 中文| HTMLPage",
    "llama-bpe": "I|'ll| buy| |123|45| naïve| cars|,\n\n| | x|+=|1| 中文| HTMLPage",
    "qwen2": "I|'ll| buy| |1|2|3|4|5| naïve| cars|,\n\n| | x|+=|1| 中文| HTMLPage",
    "qwen35": "I|'ll| buy| |1|2|3|4|5| naïve| cars|,\n\n| | x|+=|1| 中文| HTMLPage",
    "tekken": "I|'ll| buy| |1|2|3|4|5| naïve| cars|,\n\n| | x|+=|1| 中文| HTMLPage",
    "gpt-4o": "I'll| buy| |123|45| naïve| cars|,\n\n| | x|+=|1| 中文| HTMLPage",
    "seed-coder": "I|'ll| buy| |1|2|3|4|5| naïve| cars|,|\n\n| | x|+=|1| 中文| HTMLPage",
    "minicpm5": "I|'ll| buy| |123|45| naïve| cars|,\n\n| | x|+=|1| 中文| HTMLPage",
    "deepseek-coder": "I|'|ll| buy| |1|2|3|4|5| naïve| cars|,|\n|\n| | x|+=|1| |中文| HTMLPage",
    "deepseek-llm": "I|'|ll| buy| |12345| na|ï|ve| cars|,|\n|\n| | x|+=|1| |中文| HTMLPage",
    "youtu": "I'll| buy| |1|2|3|4|5| naïve| cars|,\n\n| | x|+=|1| |中文| HTMLPage",
    "deepseek-v3": "I|'ll| buy| |123|45| naïve| cars|,\n\n| | x|+=|1| |中文| HTMLPage",
}


@pytest.mark.parametrize("pre", CUTS)
def test_text_is_split_as_the_name_says(pre: str) -> None:
    tokenizer = built(files.bpe_vocabulary(pre)).tokenizer
    cut = [TEXT[slice(*span)] for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)]
    assert "|".join(cut) == CUTS[pre]


@pytest.mark.parametrize(("pre", "cut"), [("llama-bpe", "a| | |5"), ("minicpm5", "a|  |5")])
def test_steps_cut_otherwise_than_one_expression(pre: str, cut: str) -> None:
    tokenizer = built(files.bpe_vocabulary(pre)).tokenizer
    found = tokenizer.pre_tokenizer.pre_tokenize_str("a  5")
    assert "|".join("a  5"[slice(*span)] for _, span in found) == cut


@pytest.mark.parametrize(("pre", "heeded"), [("gpt-2", True), ("smollm", False), ("llama-bpe", False)])
def test_only_a_tokenizer_of_one_step_puts_a_blank_in_front(pre: str, heeded: bool) -> None:
    tokenizer = built(files.bpe_vocabulary(pre), add_space_prefix=True, add_bos_token=False).tokenizer
    assert (tokenizer.encode("the").ids == tokenizer.encode(" the").ids) is heeded


@pytest.mark.parametrize(("architecture", "taken"), [("phi3", True), ("llama", False)])
def test_line_breaks_after_a_turn_are_taken_as_by_the_tokenizer_of_phi3(architecture: str, taken: bool) -> None:
    words = files.sentencepiece_vocabulary() | files.special_keys(add_bos_token=False)
    metadata = {f"tokenizer.ggml.{key}": value for key, value in words.items()}
    found = tokenizer_of(GgufFile(Path("m.gguf"), metadata | {"general.architecture": architecture})).tokenizer
    assert (found.encode("<end>\nthe").ids == found.encode("<end>the").ids) is taken
    assert found.encode("<s>\nthe").ids != found.encode("<s>the").ids


def test_every_way_to_split_is_tested() -> None:
    assert {PRE_TOKENIZERS[pre] for pre in CUTS} == set(PRE_TOKENIZERS.values())


@pytest.mark.parametrize("pre", ["llama-bpe", "minicpm5", "youtu"])
def test_words_stay_whole_where_the_name_says_so(pre: str) -> None:
    vocabulary = files.bpe_vocabulary(pre)
    vocabulary["tokens"] = [*vocabulary["tokens"], "Ġwhole"]
    vocabulary["token_type"] = [*vocabulary["token_type"], files.NORMAL]
    whole = len(vocabulary["tokens"]) - 1
    assert built(vocabulary).tokenizer.encode("a whole").ids[-1] == whole
    assert whole not in built(vocabulary | {"pre": "qwen2"}).tokenizer.encode("a whole").ids


def test_letters_with_marks_are_composed_where_the_original_does() -> None:
    for pre, same in (("qwen2", True), ("mpt", True), ("olmo", True), ("command-r", True), ("llama-bpe", False)):
        tokenizer = built(files.bpe_vocabulary(pre)).tokenizer
        assert (tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids) is same


@pytest.mark.parametrize("case", ["llama 3.2", "qwen2", "gpt2", "phi3 with a window", "gemma3, scaled", "stablelm"])
def test_transformers_loads_the_tokenizer_as_it_was_written(case: str, tmp_path: Path) -> None:
    """Its classes of some families would bring steps of their own."""
    _, architecture, keys, tensors = made(case)
    vocabulary = files.sentencepiece_vocabulary() if architecture in ("phi3", "gemma3") else files.bpe_vocabulary()
    tensors["token_embd.weight"] = np.zeros((len(vocabulary["tokens"]), 64), np.float32)
    if "output.weight" in tensors:
        tensors["output.weight"] = tensors["token_embd.weight"]
    path = files.write_gguf(tmp_path / "m.gguf", architecture, keys, tensors, vocabulary)
    folder = tmp_path / "out"
    folder.mkdir()
    convert(path, folder)
    text = (folder / "tokenizer.json").read_text()
    assert "\n" not in text  # it takes longer to read
    written = json.loads(text)
    loaded = json.loads(load_tokenizer(Base(folder, "m", "", "")).backend_tokenizer.to_str())
    assert loaded == written


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(BaseModelError, match="expected a base with its tokenizer"):
        load_tokenizer(Base(tmp_path, "m", "", "llama"))


def test_all_files_of_the_folder_name_the_same_tokens(tmp_path: Path) -> None:
    """The unknown token is 3, which export must never see: its config field would be one that nobody computes."""
    _, architecture, keys, tensors = made("qwen2")
    specials = files.special_keys(eot_token_id=files.EOT)
    template = {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    path = files.write_gguf(tmp_path / "m.gguf", architecture, keys, tensors, specials=specials, others=template)
    folder = tmp_path / "out"
    folder.mkdir()
    convert(path, folder)
    config, generation = AutoConfig.from_pretrained(folder), GenerationConfig.from_pretrained(folder)
    tokenizer = load_tokenizer(Base(folder, "m", "", ""))
    for one in (config, generation, tokenizer):
        assert (one.bos_token_id, one.pad_token_id) == (files.BOS, files.PAD), type(one)
    assert config.eos_token_id == tokenizer.eos_token_id == files.EOS and tokenizer.unk_token_id == files.UNK
    assert generation.eos_token_id == [files.EOS, files.EOT]
    assert "unk_token_id" not in json.loads((folder / "config.json").read_text())
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    assert tokenizer("the")["input_ids"][0] == files.BOS
    assert tokenizer.chat_template == template["tokenizer.chat_template"]


TURNS = "{% for m in messages %}<start_of_turn>{{ m.content }}<end_of_turn>{% endfor %}"


@pytest.mark.parametrize(
    ("text", "kind", "template", "other", "ends"),
    [
        ("<end_of_turn>", files.CONTROL, TURNS, "<other>", True),
        ("<end_of_turn>", files.USER_DEFINED, TURNS, "<other>", True),
        ("<end_of_turn>", files.NORMAL, TURNS, "<other>", False),  # a text that says so is not this token
        ("<end_of_turn>", files.CONTROL, None, "<other>", False),
        ("<end_of_turn>", files.CONTROL, "{{ messages }}<|im_end|>", "<other>", False),
        ("<|end|>", files.CONTROL, "{{ messages }}<|end|>", "<other>", True),
        ("<|end|>", files.CONTROL, "{{ messages }}<|end|>", "<|return|>", False),  # it ends a part of a turn
        ("<|call|>", files.CONTROL, "{{ messages }}", "<|return|>", True),
        ("<|endoftext|>", files.CONTROL, "{{ messages }}<|im_end|>", "<other>", True),  # Qwen's, of documents
        ("<|end_of_text|>", files.CONTROL, None, "<other>", True),
        ("<|endoftext|>", files.CONTROL, "{{ messages }}", "<|return|>", True),
        ("<|endoftext|>", files.NORMAL, "{{ messages }}", "<other>", False),
    ],
)
def test_the_token_that_ends_a_turn_in_the_template_ends_an_answer(
    text: str, kind: int, template: str | None, other: str, ends: bool
) -> None:
    words = files.bpe_vocabulary() | files.special_keys()
    at = len(words["tokens"])
    words |= {"tokens": [*words["tokens"], text, other], "token_type": [*words["token_type"], kind, files.NORMAL]}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in words.items()}
    given = {} if template is None else {"tokenizer.chat_template": template}
    found = tokenizer_of(GgufFile(Path("m.gguf"), metadata | given))
    assert found.ends == ((files.EOS, at) if ends else (files.EOS,)) and found.chat_template == template


TALK = [("system", "S"), ("user", "U"), ("assistant", " A "), ("user", "V")]


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("v1", "<s> [INST] S\n\nU [/INST]  A </s> [INST] V [/INST]"),
        ("v3", "<s>[INST] S\n\nU[/INST] A</s>[INST] V[/INST]"),
        ("v3-tekken", "<s>[INST]S\n\nU[/INST] A </s>[INST]V[/INST]"),
        ("v7", "<s>[SYSTEM_PROMPT] S[/SYSTEM_PROMPT][INST] U[/INST]  A </s>[INST] V[/INST]"),
        ("v7-tekken", "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U[/INST] A </s>[INST]V[/INST]"),
    ],
)
def test_templates_of_mistral_have_names(name: str, prompt: str) -> None:
    words = {f"tokenizer.ggml.{key}": value for key, value in (files.bpe_vocabulary() | files.special_keys()).items()}
    found = tokenizer_of(GgufFile(Path("m.gguf"), words | {"tokenizer.chat_template": f"mistral-{name}"}))
    messages = [{"role": role, "content": text} for role, text in TALK]
    assert PromptFormat("chat").render(messages, found.chat_template, {"bos_token": "<s>"}) == prompt


def edited(**change: Any) -> dict[str, Any]:
    return {key: value for key, value in (files.bpe_vocabulary() | change).items() if value is not None}


SPM = files.sentencepiece_vocabulary()
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no end": (edited(), {"eos_token_id": None}, "eos_token_id is missing"),
    "an end beyond the vocabulary": (
        edited(),
        {"eos_token_id": 9999},
        "eos_token_id is 9999; expected a token below 272",
    ),
    "a beginning that is not named": (edited(), {"bos_token_id": None}, "add_bos_token is True"),
    "another kind": (edited(model="bert"), {}, "tokenizer.ggml.model is bert; expected gpt2 or llama"),
    "another way to split": (edited(pre="mystery"), {}, "tokenizer.ggml.pre is mystery"),
    "no way to split": (edited(pre=None), {}, "tokenizer.ggml.pre is missing"),
    "no merges": (edited(merges=None), {}, "no tokenizer.ggml.merges"),
    "a merge of one": (edited(merges=["th"]), {}, "merges is a list with 'th'"),
    "a merge of nothing known": (edited(merges=["q zz"]), {}, "merges is a list that cannot be used"),
    "a token twice": (edited(tokens=[*files.bpe_vocabulary()["tokens"][:-1], "th"]), {}, "list with 'th' twice"),
    "types of some": (edited(token_type=[1, 2]), {}, "token_type is a list of 2; expected 272"),
    "no scores": ({key: value for key, value in SPM.items() if key != "scores"}, {}, "no tokenizer.ggml.scores"),
    "scores of some": (SPM | {"scores": [0.5]}, {}, "scores is a list of 1"),
    "blanks removed": (SPM, {"remove_extra_whitespaces": True}, "remove_extra_whitespaces is True"),
    "a token without end": (
        SPM | {"tokens": [*SPM["tokens"][:-1], "a" * 320_000]},
        {},
        "tokens is a list with one of 320000 letters; expected at most 1000",
    ),
    "scores that are no numbers": (SPM | {"scores": [math.nan] * len(SPM["scores"])}, {}, r"scores\[0\] is nan"),
    "a type that nobody knows": (edited(token_type=[9] * 272), {}, r"token_type\[0\] is 9; expected a whole number 0"),
    "a turn's end beyond the vocabulary": (edited(), {"eot_token_id": 9999}, "eot_token_id is 9999; expected a token"),
    "a beginning that reads as two": (
        edited(tokens=["<pad>", "</s>", "a:b", *files.bpe_vocabulary()["tokens"][3:]]),
        {},
        "bos_token_id is 2, the token a:b; expected one without a colon",
    ),
    "merges of one": (gemma_vocabulary() | {"merges": ["the"]}, {}, "merges is a list with 'the'; expected pairs"),
    "no tokens to leave out": (edited(suppress_tokens=5), {}, "suppress_tokens is 5; expected"),
    "a token to leave out that there is not": (edited(suppress_tokens=[272]), {}, r"\[0\] is 272; expected"),
    "a key that nobody knows": (edited(), {"spell_backwards": True}, r"key tokenizer\.ggml\.spell_backwards"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_understood_is_refused_by_name(reason: str) -> None:
    vocabulary, special, message = REFUSED[reason]
    with pytest.raises(BaseModelError, match=message) as caught:
        built(vocabulary, **special)
    assert "\n" not in str(caught.value) and caught.value.expected


@pytest.mark.parametrize("template", [7, ["{{ messages }}"], True])
def test_a_chat_template_that_is_no_text_is_refused(template: Any) -> None:
    words = {f"tokenizer.ggml.{key}": value for key, value in (files.bpe_vocabulary() | files.special_keys()).items()}
    with pytest.raises(BaseModelError, match=r"tokenizer\.chat_template is .*; expected a string"):
        tokenizer_of(GgufFile(Path("m.gguf"), words | {"tokenizer.chat_template": template}))


def test_the_builders_are_those_of_the_table() -> None:
    assert set(gguf_tokenizer.BUILDERS) == {files.bpe_vocabulary()["model"], SPM["model"], gemma_vocabulary()["model"]}
