"""Turns a prompt into the text the model sees: raw with a separator, or through the model's chat template.

The format is saved with adapter and bundle and used alike by train, generate and bench: a drafter trained on one format
is useless in another. Templates are untrusted: `streamspec.prompt.template_sandbox` renders them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any

from streamspec.errors import ConfigError, DataError
from streamspec.prompt.control_tokens import ControlTokens
from streamspec.prompt.message_content import text_of

Message = Mapping[str, Any]
KINDS = ("raw", "chat")
ROLES = {"developer": "system"}  # names of OpenAI's API for roles of templates
LISTED = "{'type': 'text'"  # where a template prints a part as it is
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names of a message's field with its thought
SURROGATE = re.compile("[\ud800-\udfff]")
MAX_TEMPLATE = 1 << 16  # characters; the longest of published models have 40,000


@dataclass(frozen=True)
class PromptFormat:
    """`raw`: the prompt and then `separator`. `chat`: the chat template with a generation prompt; `separator` is
    unused.
    """

    kind: str = "raw"
    separator: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"prompt format {self.kind!r}", " or ".join(KINDS), "choose one of them")
        if not isinstance(self.separator, str):
            raise ConfigError(f"separator {self.separator!r}", "a string", "correct the prompt format")

    @classmethod
    def given(cls, kind: str | None, separator: str | None) -> PromptFormat | None:
        """Returns the format that the options `--format` and `--separator` ask for, None where neither is given."""
        return None if kind is None and separator is None else cls(kind or "raw", separator or "")

    @property
    def add_special_tokens(self) -> bool:
        """Whether the tokenizer adds its own special tokens: templates bring theirs along."""
        return self.kind == "raw"

    def render(
        self,
        prompt: str | Sequence[Message],
        template: str | None = None,
        specials: Mapping[str, str] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        control: ControlTokens | None = None,
    ) -> str:
        """Returns the text for the tokenizer, or, with `control`, the marked text that it encodes.

        `prompt` is a string or a list of messages (`role`, `content` and what else the template reads, such as
        `tool_calls`), in any shape that OpenAI's API has for text (`plain_message`). `specials` holds `bos_token`,
        `eos_token` and the like for the template, `tools` the JSON schemas of functions that may be called. Without
        `add_generation_prompt` the last message is not followed by the beginning of an answer. Raises DataError on
        malformed messages, where the template refuses them and where the format leaves out tools or calls, ConfigError
        where the template is missing or broken.
        """
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages = plain_messages(asked)
        if self.kind == "raw":
            given = "tools" if tools else "tool_calls" if any(m.get("tool_calls") for m in messages) else None
            if given:
                raise DataError(f"{given} with the prompt format raw", "the format chat", "leave them out")
            return "".join((m["content"] or "") + self.separator for m in messages)
        names, plain = [function_name(tool) for tool in tools or ()], [_for_template(message) for message in messages]
        if control is not None:
            plain, tools = control.marked_messages(plain), control.marked(tools)
        text = _in_its_spelling(plain, template, specials, tools, add_generation_prompt)
        if missing := [name for name in names if name not in text]:
            found = f"the chat template leaves out the tool {missing[0]}"
            raise DataError(found, "a template that knows tools", "leave tools out")
        return text


def function_name(call: Mapping[str, Any]) -> str:
    """The name of the function that a tool call, or a tool's schema, is about. Raises DataError without one."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise DataError(f"a tool {str(call)[:60]!r}", '{"type": "function", "function": {"name": ...}}', "name it")
    return name


def _in_its_spelling(
    messages: list[Message], template: str | None, specials: Mapping[str, str] | None, tools: Any, prompt: bool
) -> str:
    """Renders messages in the first spelling that the template accepts and shows the last question and all tool calls
    of; where there is none, in the first that it accepts. Raises what `_accepted` raises."""
    wanted = [name for message in messages for name in map(function_name, message.get("tool_calls") or ())]
    wanted += [m["content"].strip() for m in messages if m["role"] == "user" and m["content"]][-1:]
    first = ""
    for text in _accepted(messages, template, specials, tools, prompt):
        if all(part in text for part in wanted) and LISTED not in text:
            return text
        first = first or text
    return first


def _accepted(
    messages: list[Message], template: str | None, specials: Mapping[str, str] | None, tools: Any, prompt: bool
) -> Iterator[str]:
    """Yields what the template writes, of each spelling that it accepts. Templates expect different things of text, of
    a message without it, of arguments and of tools without a description; most accept all of these. Raises the first
    error where it accepts none: DataError also where it shows some calls of a message alone."""
    failures, accepted = list[DataError | ConfigError](), False
    for described in (False, True)[: 1 + bool(tools)]:
        if described and not failures:  # descriptions were not missed
            break
        rest = template, specials, [*map(_described, tools)] if described else tools, prompt
        for told in _tellings(messages, template or ""):
            for spelt in _spellings(told):
                try:
                    text, left_out = render_chat(spelt, *rest), _left_out(spelt, *rest)
                except (ConfigError, DataError) as error:
                    failures.append(error)
                    continue
                if left_out:
                    found = f"the chat template leaves out a call of {left_out}"
                    failures.append(DataError(found, "one call in a message", "send calls one by one"))
                    break
                accepted = True
                yield text
    if not accepted:
        raise failures[0]


def _tellings(messages: list[Message], template: str) -> Iterator[list[Message]]:
    """Yields the messages as they are, and as templates take them that know less of calls."""
    yield messages
    thinks = any(name in template for name in THOUGHTS)  # else the words would be lost in the thought
    for change in (_one_by_one, _words_in_thoughts)[: 1 + thinks]:
        changed = change(messages)
        if changed != messages:
            yield changed
        messages = changed


def _spellings(messages: list[Message]) -> Iterator[list[Message]]:
    """Yields the messages with null contents left out, as transformers has them, as null and as
    empty text; then the same with the arguments of tool calls as JSON text; then with texts as lists
    of parts, which some templates of multimodal models expect."""
    silent = any(message["content"] is None for message in messages)
    calling = any(message.get("tool_calls") for message in messages)
    for written in (messages, [_with_calls(message, _text_of) for message in messages])[: 1 + calling]:
        if silent:
            yield [{k: v for k, v in m.items() if k != "content" or v is not None} for m in written]
        yield written
        if silent:
            yield [{**m, "content": m["content"] or ""} for m in written]
    yield [{**m, "content": [{"type": "text", "text": m["content"] or ""}]} for m in messages]


def _one_by_one(messages: list[Message]) -> list[Message]:
    """Returns messages with one call in each, its results after it: some templates know no others."""
    told, waiting = list[Message](), dict[Any, list[Message]]()  # results, by the ids of calls that came before them
    for message in _numbered(messages):
        if message["role"] == "tool" and (results := waiting.get(message.get("tool_call_id"))) is not None:
            results.append(message)
            continue
        told, waiting = told + [said for group in waiting.values() for said in group], {}
        calls = message.get("tool_calls") or ()
        if len(calls) < 2 or len({call.get("id") for call in calls}) < len(calls):
            told.append(message)
            continue
        for i, call in enumerate(calls):
            before = {"role": "assistant", "content": None} if i else message
            waiting[call.get("id")] = [{**before, "tool_calls": [call]}]
    return told + [said for group in waiting.values() for said in group]


def _numbered(messages: list[Message]) -> list[Message]:
    """Returns messages with ids where several calls in one have none. Results answer them in turn, if as many."""
    out, count = [*messages], 0
    for at, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        if len(calls) < 2 or any(call.get("id") for call in calls):
            continue
        ids = [f"id{count + i:07d}" for i in range(len(calls))]  # other lengths some templates refuse
        count += len(calls)
        out[at] = {**message, "tool_calls": [{**call, "id": i} for call, i in zip(calls, ids, strict=True)]}
        results = list(takewhile(lambda m: m["role"] == "tool", messages[at + 1 :]))
        if len(results) == len(ids):
            out[at + 1 : at + 1 + len(ids)] = [
                {"tool_call_id": i, **result} for i, result in zip(ids, results, strict=True)
            ]
    return out


def _words_in_thoughts(messages: list[Message]) -> list[Message]:
    """Returns messages with the words before calls at the end of the thought: some templates take one of them alone."""
    return [
        {**m, "content": None, **dict.fromkeys(("thinking", "reasoning_content"), f"{m['thinking']}\n\n{m['content']}")}
        if m.get("tool_calls") and m.get("content") and m.get("thinking")
        else m
        for m in messages
    ]


def _left_out(
    messages: Sequence[Message], template: str | None, specials: Mapping[str, str] | None, tools: Any, prompt: bool
) -> str:
    """Returns the name of a function a call of which a template does not show, though it shows another one of the same
    message; "" where there is none. It is asked about a small chat with a message of that shape, once for each."""
    for n, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            continue
        shape = json.dumps(
            [_shape(message), bool(tools), any(each["role"] == "user" for each in messages[n:])], default=str
        )
        try:
            hidden = _hidden(shape, template, tuple((specials or {}).items()))
        except (ConfigError, DataError):  # it takes no such chat
            hidden = next((i for at, i in _hidden_in(messages, template, specials, tools, prompt) if at == n), None)
        if hidden is not None:
            return function_name(calls[hidden])
    return ""


def _shape(message: Message) -> Message:
    """Returns a message with calls without what it says."""
    said = {name: "x" if isinstance(value, str) and value else value for name, value in message.items()}
    content = [{"type": "text", "text": "x"}] if isinstance(message.get("content"), list) else said.get("content")
    calls = [
        _with_arguments(call, lambda given: {} if isinstance(given, dict) else "{}") for call in said["tool_calls"]
    ]
    named = [{**call, "id": f"id{i:07d}"} if call.get("id") else call for i, call in enumerate(calls)]
    return said | ({"content": content} if "content" in said else {}) | {"role": "assistant", "tool_calls": named}


@lru_cache(maxsize=256)
def _hidden(shape: str, template: str | None, specials: tuple[tuple[str, str], ...]) -> int | None:
    """Returns the place of a call that a template does not show of a message, though it shows another. `shape`: JSON of
    the message, whether there are tools, and whether a question follows."""
    message, tools, later = json.loads(shape)
    asked = {"role": "user", "content": "x"}
    results = [
        {"role": "tool", "content": "x", "name": "fn", **({"tool_call_id": call["id"]} if call.get("id") else {})}
        for call in message["tool_calls"]
    ]
    chat = [asked, message, *results, *([{"role": "assistant", "content": "x"}, asked] if later else [])]
    listed = [{"type": "function", "function": {"name": "fn", "description": "x", "parameters": {}}}] * tools
    return next((i for _, i in _hidden_in(chat, template, dict(specials), listed, True)), None)


def _hidden_in(messages: Sequence[Message], *rest: Any) -> Iterator[tuple[int, int]]:
    """Yields the places of messages and of their calls that a template does not show, beside others of the message."""
    probes = list[Message]()
    for n, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        functions = [{**call.get("function", call), "name": f"fn{n}of{i}shown"} for i, call in enumerate(calls)]
        numbered = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
        probes.append({**message, "tool_calls": numbered} if calls else message)
    text = render_chat(probes, *rest)
    for n, message in enumerate(messages):
        count = len(message.get("tool_calls") or ())
        hidden = [(n, i) for i in range(count) if f"fn{n}of{i}shown" not in text]
        yield from hidden if len(hidden) < count else ()


def _described(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tool, which has a name, with a description, if an empty one."""
    inner = tool.get("function", tool)
    described = {"name": "", "description": "", **inner} | {"description": inner.get("description") or ""}
    return described if inner is tool else {**tool, "function": described}


def _for_template(message: Message) -> Message:
    """The message as transformers has it: arguments of tool calls as objects, though OpenAI's API writes them as JSON
    text; reasoning under both of its names.
    """
    thought = next((message[name] for name in THOUGHTS if message.get(name)), None)
    if thought is not None:
        message = {"thinking": thought, **message, "reasoning_content": thought}
    return _with_calls(message, _object_of)


def _with_calls(message: Message, spelt: Callable[[Any], Any]) -> Message:
    """The message with the arguments of its tool calls `spelt`."""
    calls = message.get("tool_calls")
    if not isinstance(calls, (list, tuple)):
        return message
    return {**message, "tool_calls": [_with_arguments(call, spelt) for call in calls]}


def _with_arguments(call: Any, spelt: Callable[[Any], Any]) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if isinstance(function, Mapping):
        return {**call, "function": _with_arguments(function, spelt)}
    return (
        {**call, "arguments": spelt(call["arguments"])} if isinstance(call, Mapping) and "arguments" in call else call
    )


def _object_of(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments or "{}")
        if SURROGATE.search(written := json.dumps(parsed, ensure_ascii=False)):  # which a model may spell
            parsed = json.loads(SURROGATE.sub("\ufffd", written))
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _text_of(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def render_chat(
    messages: Sequence[Message],
    template: str | None,
    specials: Mapping[str, str] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Renders messages with a Hugging Face chat template. Arguments and errors as for `PromptFormat.render`."""
    if not template:
        raise ConfigError(
            "the prompt format is chat but there is no chat template", "chat_template.jinja", "use the raw format"
        )
    if len(template) > MAX_TEMPLATE:
        raise ConfigError(
            f"the chat template has {len(template)} characters", f"at most {MAX_TEMPLATE}", "use another template"
        )
    from streamspec.prompt.template_sandbox import BrokenTemplate, TemplateRefusal, render

    try:
        return render(
            template,
            {
                "bos_token": "",
                "eos_token": "",
                "tools": list(tools) if tools else None,  # templates ask whether they are none, as in transformers
                "documents": None,
                **(specials or {}),
                "messages": list(messages),
                "add_generation_prompt": add_generation_prompt,
            },
        )
    except TemplateRefusal as error:
        raise DataError(f"the chat template refused the messages: {error}", "", "change the messages") from None
    except Exception as error:  # an untrusted template can make Jinja fail with any error, assertions included
        why = str(error) if isinstance(error, BrokenTemplate) else f"{type(error).__name__} {error}"
        raise ConfigError(
            f"the chat template failed: {why}", "a working template", "restore chat_template.jinja"
        ) from None


def plain_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns messages as templates take them. Raises DataError (`plain_message`)."""
    return [plain_message(message, f"message {i}") for i, message in enumerate(messages)]


def plain_message(message: Any, where: str) -> dict[str, Any]:
    """Returns a message in one of the shapes that OpenAI's API has for it: `content` as text, null only beside calls or
    a thought, a refusal as the content that it stands for, `developer` as `system`, and without fields that are null or
    an empty list. Raises DataError for anything else; `where` names the message."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(f"{where} is {str(message)[:60]!r}", "an object with role and content", "correct the messages")
    fields = {name: value for name, value in message.items() if value not in (None, [])}
    _check_calls(message, fields.get("tool_calls", []), where)
    content, refusal = text_of(message.get("content"), where), text_of(fields.pop("refusal", None), where)
    if content and refusal:
        raise DataError(f"{where} with content and refusal", "one of them", "leave one out")
    content = refusal if content is None else refusal or content
    if content is None and not any(fields.get(name) for name in ("tool_calls", *THOUGHTS)):
        raise DataError(f"{where} without content", "text as its content", "correct the messages")
    return fields | {"role": ROLES.get(fields["role"], fields["role"]), "content": content}


def _check_calls(message: Message, calls: Any, where: str) -> None:
    """Raises DataError for calls that are no list, and for an id of a call, or of the one answered, that is no text."""
    if not isinstance(calls, list):
        raise DataError(f"{where} with tool_calls that are no list", "a list of calls", "correct the messages")
    ids = [message.get("tool_call_id"), *(call.get("id") for call in calls if isinstance(call, Mapping))]
    if not all(isinstance(id_, (str, int, type(None))) for id_ in ids):
        raise DataError(f"{where} with an id that is no text", "a string", "correct the messages")
