"""Builds a `tokenizers` tokenizer from a GGUF file's metadata, and the settings of special tokens beside it.

Three kinds exist: byte-level BPE (`gpt2`), whose way of splitting text has a name (`tokenizer.ggml.pre`),
SentencePiece BPE (`llama`), which merges the pair of the best score, and the same with merges of its own (`gemma4`).
Facts: llama.cpp's `src/llama-vocab.cpp`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from streamspec.adapters.base_models.gguf.file import MAX_ENTRIES, GgufFile
from streamspec.adapters.base_models.gguf.keys import Keys
from streamspec.errors import BaseModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
NO_TOKEN = 0xFFFFFFFF  # also -1
SPACE = "▁"  # SentencePiece's
# Keys that do not change which tokens a text gives, or that chat clients alone read.
HARMLESS = ("token_type_count", "add_sep_token")
LONGEST_TOKEN = 1000  # letters; its merges cost the square. Gemma's longest has 31
LONGEST_TEMPLATE = 1 << 20
BEST_SCORE = 1e30

# Ways to split text, in steps: a regular expression whose matches stand alone, or a word for a step of `tokenizers`.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = (rf"{_ENGLISH}|{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}",)
_QWEN2 = (rf"{_ENGLISH}|{_WORDS}|\p{{N}}|{_MARKS}|{_SPACES}",)
_QWEN35 = (
    rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{end}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{end}}"
    rf"|\p{{N}}{{digits}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_TEKKEN = (_CASED.replace("{end}", "").replace("{digits}", ""),)
_GPT4O = (_CASED.replace("{end}", _ENGLISH + "?").replace("{digits}", "{1,3}"),)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES,
)
_SEED = (rf"{_ENGLISH}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
_MINICPM5 = (r"\p{N}{1,3}", rf"{_ENGLISH}|{_WORDS}|\p{{N}}+|{_MARKS}|{_SPACES}")
_YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
    _CASED.replace("{end}", _ENGLISH + "?").replace("{digits}", ""),
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u0800-\u9fa5\uac00-\ud7ff]+", "digits")
_CASED_LETTERS = (  # of alphabets that have two cases
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-"
    "ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴ"
    "ῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-"
    "ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[\u0800-\u9fa5\uac00-\ud7ff]+",
    r"\p{N}+",
)
_GPT2, _DIGITS = ("gpt2",), ("digits", "gpt2")

_SPLITS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "gigachat", "mellum"), _GPT2),
    (("granite-docling", "a.x-4.0"), _GPT2),
    (("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS),
    (("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    (("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3),
    (("qwen2", "stablelm2", "hunyuan", "megrez", "deepseek-r1-qwen", "kormo", "solar-open", "grok-2"), _QWEN2),
    (("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    (("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    (("qwen35",), _QWEN35),
    (("tekken",), _TEKKEN),
    (("seed-coder",), _SEED),
    (("minicpm5",), _MINICPM5),
    (("deepseek-coder",), _DEEPSEEK_CODER),
    (("deepseek-llm",), _DEEPSEEK_LLM),
    (("youtu",), _YOUTU),
)
PRE_TOKENIZERS = {name: steps for names, steps in _SPLITS for name in names}
# Of these, texts begin with bos where the file is silent.
BEGUN = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"})
WHOLE_WORDS = BEGUN | {"minicpm5", "youtu"}  # of these, words that are tokens stay whole whatever the merges say
# Of these, composed letters are written as one, which GGUF has no word for: the published tokenizers of these names do.
COMPOSED = frozenset({"qwen2", "qwen35", "deepseek-r1-qwen", "mpt", "olmo", "command-r"})
KEEPS = frozenset({"<unk>", "<s>", "<|endoftext|>"})  # tokens of Phi-3 that leave blanks after them in the text
# Tokens that end a turn, which many files do not name as such: they count where the chat template writes them.
TURN_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<end_of_utterance>",
)
DOCUMENT_ENDS = ("<|end_of_text|>", "<|endoftext|>")  # no text goes on after them, whatever the template writes

# Templates that files of Mistral's own format have by name; llama.cpp writes prompts of these by code of its own.
_TURNS = (  # of V7: a system prompt has a part of its own
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]_{{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'user' %}[INST]_{{ m.content }}[/INST]{% else %}_{{ m.content }}</s>{% endif %}{% endfor %}"
)
_INSTRUCTIONS = (  # before it: it begins the question
    "{{ bos_token }}{% set at = namespace(inside=false) %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}_{{ ANSWER }}</s>{% set at.inside = false %}{% else %}"
    "{% if not at.inside %}^[INST]_{% set at.inside = true %}{% endif %}"
    "{{ m.content }}{% if m.role == 'system' %}{{ '\\n\\n' }}{% else %}^[/INST]{% endif %}{% endif %}{% endfor %}"
)
NAMED_TEMPLATES = {
    f"mistral-{name}": text.replace("ANSWER", answer).replace("^", before).replace("_{", f"{after}{{")
    for name, text, before, after, answer in (
        ("v1", _INSTRUCTIONS, " ", " ", "m.content"),
        ("v3", _INSTRUCTIONS, "", " ", "m.content.strip()"),
        ("v3-tekken", _INSTRUCTIONS, "", "", "m.content"),
        ("v7", _TURNS, "", " ", "m.content"),
        ("v7-tekken", _TURNS, "", "", "m.content"),
    )
}


# Tokens that end a turn of Gemma 4, of which files say other things.
ENDS_OF_GEMMA = ("<eos>", "<turn|>", "<|tool_response>")


@dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer and what belongs into the files beside it."""

    tokenizer: Tokenizer
    special: dict[str, int]  # bos_token_id, eos_token_id, unk_token_id, pad_token_id: those that the file names
    ends: tuple[int, ...]  # tokens after which a model stops, that of training first
    suppressed: tuple[int, ...]  # tokens that are never to be chosen
    chat_template: str | None

    def named(self) -> dict[str, str]:
        """`bos_token` and so on, as texts."""
        return {key.removesuffix("_id"): str(self.tokenizer.id_to_token(token)) for key, token in self.special.items()}


def tokenizer_of(model: GgufFile) -> GgufTokenizer:
    """Raises BaseModelError for a tokenizer that is not understood or contradicts itself."""
    keys = model.below("tokenizer.ggml")
    kind = keys.word("model")
    if kind not in BUILDERS:
        keys.refuse("model", kind, " or ".join(BUILDERS))
    tokens, types = _vocabulary(keys)
    special, ends = _special(keys, tokens)
    pre = keys.word("pre", "")
    tokenizer = BUILDERS[kind](keys, tokens, types, special)
    strips = kind == "llama" and model.metadata.get("general.architecture") == "phi3"
    more = [tokens.index(text) for text in ENDS_OF_GEMMA if text in tokens] if kind == "gemma4" else []
    _add_tokens(tokenizer, tokens, types, {*special.values(), *more}, strips)
    if tokenizer.get_vocab_size(with_added_tokens=True) != len(tokens):
        raise BaseModelError(
            f"{keys.file}: added tokens beyond the vocabulary", f"{len(tokens)} tokens", "check the file"
        )
    begins = keys.switch("add_bos_token", kind == "llama" or pre in BEGUN) or kind == "gemma4"  # whatever it says
    never, last = "suppress_tokens", len(tokens) - 1
    suppressed = keys.integers(never, 0, last, len(tokens)) if keys.has(never) else ()
    _frame(keys, tokenizer, special, begins, keys.switch("add_eos_token", False))
    prefix = "tokenizer.ggml."  # also skipped: further single tokens, as of the middle of a gap to fill
    keys.skip(*HARMLESS, *(key.removeprefix(prefix) for key in model.metadata if key.endswith("_token_id")))
    keys.finish()
    template = model.below("tokenizer").word("chat_template", None, LONGEST_TEMPLATE) or None
    template = NAMED_TEMPLATES.get(template or "", template)
    ends = tuple(dict.fromkeys([*ends, *more, *_turn_ends(tokens, types, template or "")]))
    return GgufTokenizer(tokenizer, special, ends, tuple(suppressed), template)


def _turn_ends(tokens: list[str], types: list[int], template: str) -> list[int]:
    """Tokens that stand whole in any text and with which the chat template ends a turn, or that end a document."""
    harmony = "<|return|>" in tokens  # there `<|end|>` ends a part of a turn
    named = ["<|call|>"] if harmony else [text for text in TURN_ENDS if text in template]
    found = [tokens.index(text) for text in (*named, *DOCUMENT_ENDS) if text in tokens]
    return [token for token in found if types[token] in (CONTROL, USER_DEFINED) or tokens[token] == "<|call|>"]


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int], special: set[int], strips: bool) -> None:
    """Makes tokens that stand for themselves in any text: special ones, and those that are text. Where the family's
    tokenizer `strips`, they take the blanks and line breaks after them, which GGUF has no word for.
    """
    hidden, shown = [], []
    for number, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        taking = strips and token not in KEEPS
        if kind in (CONTROL, UNKNOWN) or number in special:
            hidden.append(AddedToken(token, rstrip=taking, normalized=False, special=True))
        elif kind == USER_DEFINED:
            shown.append(AddedToken(token, rstrip=taking, normalized=False, special=False))
    tokenizer.add_special_tokens([token for token in hidden if token.content])
    tokenizer.add_tokens([token for token in shown if token.content])


def _vocabulary(keys: Keys) -> tuple[list[str], list[int]]:
    tokens, types = keys.words("tokens"), [NORMAL] * len(keys.values["tokens"])
    if keys.has("token_type"):
        types = list(keys.integers("token_type", 0, BYTE, MAX_ENTRIES))
    if len(types) != len(tokens):
        keys.refuse("token_type", f"a list of {len(types)}", f"{len(tokens)}, one for each token")
    if len(set(tokens)) != len(tokens):
        last = {token: number for number, token in enumerate(tokens)}
        double = next(token for number, token in enumerate(tokens) if last[token] != number)
        keys.refuse("tokens", f"a list with {double!r} twice", "each token once")
    return tokens, types


def _special(keys: Keys, tokens: list[str]) -> tuple[dict[str, int], tuple[int, ...]]:
    """Ids of special tokens, and the tokens that end an answer."""
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
    names |= {"eot": "eot_token_id", "eom": "eom_token_id"}
    found = {}
    for name, key in names.items():
        token = keys.whole(key, NO_TOKEN, -1, NO_TOKEN)
        if token in (-1, NO_TOKEN):
            continue
        if token >= len(tokens):
            keys.refuse(key, token, f"a token below {len(tokens)}")
        found[f"{name}_token_id"] = token
    if "eos_token_id" not in found:
        keys.refuse("eos_token_id", "missing", "the token that ends a text")
    turns = [token for name in ("eot_token_id", "eom_token_id") if (token := found.pop(name, None)) is not None]
    return found, tuple(dict.fromkeys([found["eos_token_id"], *turns]))


def _frame(keys: Keys, tokenizer: Tokenizer, special: dict[str, int], begins: bool, ends: bool) -> None:
    """Puts bos in front of a text and eos after it, where the file says so."""
    used = [name for name, switched in (("bos_token_id", begins), ("eos_token_id", ends)) if switched]
    for name in used:
        if name not in special:
            keys.refuse(f"add_{name.removesuffix('_id')}", True, f"{name} beside it")
        if (text := str(tokenizer.id_to_token(special[name]))).startswith("$") or ":" in text:  # marks of a template
            keys.refuse(name, f"{special[name]}, the token {text}", "one without a colon, and no $ at its start")
    pieces = [(tokenizer.id_to_token(special[name]), special[name]) for name in used]
    before = f"{pieces[0][0]}" if begins else None
    after = f"{pieces[-1][0]}" if ends else None
    single = [piece for piece in (before, "$A", after) if piece]
    pair = [*single, *(f"{piece}:1" for piece in (before, "$B", after) if piece)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=pieces)


def _byte_level(keys: Keys, tokens: list[str], types: list[int], special: dict[str, int]) -> Tokenizer:
    """BPE over bytes written as letters."""
    pre = keys.word("pre", "")
    if pre not in PRE_TOKENIZERS:
        keys.refuse("pre", pre or "missing", f"one of {', '.join(sorted(PRE_TOKENIZERS))}")
    merges = _pairs(keys)
    keys.skip("scores")
    # Tokenizers of several steps do not heed it, nor does llama.cpp.
    prefix = keys.switch("add_space_prefix", False) and PRE_TOKENIZERS[pre] == _GPT2
    keys.only("remove_extra_whitespaces", False)
    tokenizer = Tokenizer(
        _bpe(
            keys,
            vocab={token: number for number, token in enumerate(tokens)},
            merges=merges,
            continuing_subword_prefix="",
            end_of_word_suffix="",
            ignore_merges=pre in WHOLE_WORDS,
        )
    )
    steps: list[Any] = []
    for step in PRE_TOKENIZERS[pre]:
        if step == "digits":
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        elif step != "gpt2":
            steps.append(pre_tokenizers.Split(Regex(step), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex="gpt2" in PRE_TOKENIZERS[pre]))
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if pre in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _pairs(keys: Keys) -> list[tuple[str, str]]:
    """The file's merges."""
    merges = []
    for merge in keys.words("merges"):
        left, _, right = merge.partition(" ")
        if not right or " " in right:
            keys.refuse("merges", f"a list with {merge!r}", "pairs of tokens")
        merges.append((left, right))
    return merges


def _sentencepiece(keys: Keys, tokens: list[str], types: list[int], special: dict[str, int]) -> Tokenizer:
    """BPE whose merges are those that give the token of the best score; unknown letters become bytes."""
    scores = keys.numbers("scores", -BEST_SCORE, BEST_SCORE, MAX_ENTRIES)
    if len(scores) != len(tokens):
        keys.refuse("scores", f"a list of {len(scores)}", f"{len(tokens)}, one for each token")
    keys.skip("merges")
    keys.only("remove_extra_whitespaces", False)
    vocab = {token: number for number, token in enumerate(tokens)}
    plain = {token: scores[number] for token, number in vocab.items() if types[number] == NORMAL}
    if (longest := max(plain, key=len, default="")) and len(longest) > LONGEST_TOKEN:
        keys.refuse("tokens", f"a list with one of {len(longest)} letters", f"at most {LONGEST_TOKEN}")
    vocab = _with_letters(plain, vocab)
    return _of_letters(keys, types, special, vocab, _merges(plain, vocab), keys.switch("add_space_prefix", True))


def _with_letters(plain: dict[str, float], vocab: dict[str, int]) -> dict[str, int]:
    """Names byte tokens by the letters that longer tokens are made of and that are no tokens themselves, as the tab of
    older Gemma; into `plain`, too: their merges begin with them."""
    letters = {
        letter for token in plain if len(token) > 1 for letter in token if letter < "\x80" and letter not in vocab
    }
    named = {byte: letter for letter in letters if (byte := f"<0x{ord(letter):02X}>") in vocab}
    plain |= dict.fromkeys(named.values(), 0.0)
    return {named.get(token, token): number for token, number in vocab.items()}


def _with_merges(keys: Keys, tokens: list[str], types: list[int], special: dict[str, int]) -> Tokenizer:
    """The same with the file's own merges."""
    keys.skip("scores", "pre")
    keys.only("add_space_prefix", False)
    keys.only("remove_extra_whitespaces", False)
    vocab = {token: number for number, token in enumerate(tokens)}
    return _of_letters(keys, types, special, vocab, _pairs(keys), prefix=False)


def _of_letters(
    keys: Keys,
    types: list[int],
    special: dict[str, int],
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    prefix: bool,
) -> Tokenizer:
    """BPE over letters, blanks among them as one of their own; unknown ones become bytes. `prefix`: texts begin with a
    blank."""
    unknown = special.get("unk_token_id")
    tokenizer = Tokenizer(
        _bpe(
            keys,
            vocab=vocab,
            merges=merges,
            unk_token=None if unknown is None else list(vocab)[unknown],
            fuse_unk=True,
            byte_fallback=BYTE in types,
        )
    )
    replace = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(scores: dict[str, float], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to make a token of two, the best score first; among equal ones, as files have whose scores are not
    known, the earlier token first, then the earlier parts. `vocab`: in the order of its numbers."""
    found = []
    for token, score in scores.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in scores and right in scores:
                found.append((-score, vocab[token], vocab[left], vocab[right]))
    found.sort()
    tokens = list(vocab)
    return [(tokens[left], tokens[right]) for _, _, left, right in found]


def _bpe(keys: Keys, **options: Any) -> models.BPE:
    try:
        return models.BPE(**options)
    except Exception as error:  # the library raises bare Exception
        keys.refuse("merges", f"a list that cannot be used ({error})", "merges of tokens")


BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _with_merges}
