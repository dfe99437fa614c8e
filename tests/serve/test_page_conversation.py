"""What a person does with a conversation on the page: reads Markdown, copies, edits and sends again, comes back to it
later; on a phone, in the dark, with a keyboard or a screen reader.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.serve.conftest import Running, until, user
from tests.serve.page_in_browser import Open, converse, needs_chromium
from tests.support.thinking_sessions import thinking

pytestmark = needs_chromium
Make = Callable[..., Running]
PHONE = {"width": 340, "height": 600}
MARKDOWN = [
    ("# Title\n\nSome ", True),
    ("**bold", False),
    (" text** and `co", True),
    ("de` and [a link](https://example.org/x) ", False),
    ("[no link](javascript:alert(1)) ![pic](https://example.org/p.png)\n\n", False),
    ("1. one\n2. two\n\n```py\nprint(1)\n", True),
    ("```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n<b>raw</b>", False),
]


def answers(page: Any, tokens: Sequence[tuple[str, bool]]) -> None:
    """Every request is answered with these tokens, each with whether it was drafted."""
    events = []
    for step, (text, drafted) in enumerate(tokens, 1):
        said = {"tokens": [text], "drafted": [drafted], "rows": 2, "committed": 1, "accepted": int(drafted)}
        said |= {"tokens_per_second": 1, "tokens_per_step": step}
        events.append({"choices": [{"delta": {"content": text}, "finish_reason": None}], "streamspec": said})
    record = events[-1]["streamspec"] | {"tokens": [], "drafted": [], "rows": 0, "finish_reason": "stop"}
    record |= {"committed": 0, "accepted": 0, "reused_tokens": 0, "prompt_tokens": 1, "speculation": "on"}
    events.append({"choices": [{"delta": {"content": ""}, "finish_reason": "stop"}], "streamspec": record})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))


def names(page: Any) -> list[str]:
    """Titles of the conversations that are kept."""
    return list(page.locator("#kept .title").all_text_contents())


def test_a_thought_is_folded_before_the_answer_and_goes_back_with_it(visit: Open) -> None:
    server = Running(thinking("<think>\nOslo, <b>or</b> Rome?\n</think>\n\nOslo."))
    try:
        page = visit(server)
        converse(page, "where?", 100)
        thought = page.locator(".answer details")
        assert thought.locator(".reasoning").text_content() == "Oslo, <b>or</b> Rome?"
        assert not thought.locator(".reasoning").is_visible() and page.locator(".rendered").inner_text() == "Oslo."
        thought.locator("summary").click()
        assert thought.locator(".reasoning").is_visible() and thought.locator("b").count() == 0
        page.get_by_label("Thinking").select_option("none")
        with page.expect_request("**/v1/chat/completions") as asked:
            converse(page, "sure?", 100)
        sent = json.loads(asked.value.post_data)
        assert sent["messages"][1] == {
            "role": "assistant",
            "content": "Oslo.",
            "reasoning_content": "Oslo, <b>or</b> Rome?",
        }
        assert sent["reasoning_effort"] == "none"
        page.reload()
        page.locator("#kept .title").first.click()
        assert page.locator(".answer details .reasoning").first.text_content() == "Oslo, <b>or</b> Rome?"
    finally:
        server.stop()


def test_an_answer_is_read_as_markdown_and_drafted_tokens_stay_marked(running: Make, visit: Open) -> None:
    page = visit(running(adapters={}))
    answers(page, MARKDOWN)
    converse(page, "hello")
    shown = page.locator(".answer .rendered")
    assert shown.locator("h3").text_content() == "Title" and shown.locator("strong").text_content() == "bold text"
    assert shown.locator("p code").text_content() == "code" and shown.locator("pre").text_content() == "print(1)"
    assert shown.locator("ol li").all_text_contents() == ["one", "two"]
    assert shown.locator("td").all_text_contents() == ["1", "2"]
    assert shown.locator("a").evaluate_all("all => all.map(a => a.href)") == ["https://example.org/x"]
    assert shown.locator("img, b").count() == 0 and "<b>raw</b>" in shown.text_content()
    spans = shown.locator("span[data-step]").evaluate_all(
        "all => all.map(one => [one.textContent, one.classList.contains('drafted')])"
    )
    for text, drafted in (("Title", True), ("bold", False), (" text", True), ("co", True), ("de", False), ("1", False)):
        assert [text, drafted] in spans, text
    page.get_by_label("Markdown").uncheck()
    assert shown.is_hidden() and page.locator(".answer .text").inner_text() == "".join(text for text, _ in MARKDOWN)


def test_marks_find_their_way_through_syntax_that_is_not_shown(running: Make, visit: Open) -> None:
    """Whatever the split into tokens: what is shown of a token has its mark."""
    page = visit(running(adapters={}))
    source = "## A b\n\n* **x** y\n* [z](https://e.org/zyx) end\n\nlast *word*"
    for size in (1, 2, 3, 7):
        pieces = [source[i : i + size] for i in range(0, len(source), size)]
        answers(page, [(piece, number % 2 == 0) for number, piece in enumerate(pieces)])
        converse(page, "hello")
        spans = page.locator(".answer .rendered").last.locator("span[data-step]")
        shown = spans.evaluate_all("all => all.map(one => [one.textContent, Number(one.dataset.step)])")
        assert "".join(text for text, _ in shown).replace(" ", "") == "AbxyzendlastwordA"[:-1]
        assert all(text in pieces[step - 1] for text, step in shown)


def test_an_answer_and_its_code_are_copied_as_they_were_written(running: Make, visit: Open) -> None:
    page = visit(running(adapters={}), permissions=["clipboard-read", "clipboard-write"])
    answers(page, MARKDOWN)
    converse(page, "hello")
    page.get_by_role("button", name="Copy", exact=True).click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "".join(text for text, _ in MARKDOWN)
    page.get_by_role("button", name="Copy code").click()
    until(lambda: page.evaluate("navigator.clipboard.readText()") == "print(1)")


def test_a_message_is_edited_and_sent_again(running: Make, visit: Open) -> None:
    page = visit(running(adapters={}))
    converse(page, "say one", 9)
    converse(page, "say two", 9)
    edit = page.get_by_role("button", name="Edit").first
    edit.click()
    page.get_by_label("Message, written anew").fill("say other")
    page.get_by_role("button", name="Cancel").click()
    assert page.locator(".question .text").all_text_contents() == ["say one", "say two"]
    edit.click()
    page.get_by_label("Message, written anew").fill("say three")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Send again").click()
    page.get_by_role("button", name="Regenerate").wait_for()
    body = json.loads(asked.value.post_data)
    assert body["messages"] == user("say three") and body["prediction"] == {"type": "content", "content": "one one o"}
    assert page.locator(".question .text").all_text_contents() == ["say three"]
    assert page.locator(".answer .text").all_text_contents() == ["three thr"]


def test_turns_return_where_no_other_answer_comes(running: Make, visit: Open) -> None:
    server = running(adapters={})
    page = visit(server)
    converse(page, "say one", 9)
    converse(page, "say two", 9)
    server.server.stop()
    server.thread.join(5)

    def check() -> None:
        page.locator("#error").get_by_text("the server cannot be reached").wait_for()
        page.get_by_role("button", name="Regenerate").wait_for()
        assert page.locator(".answer .text").all_text_contents() == ["one one o", "two two t"]
        kept = page.evaluate("Object.values(localStorage).join()")
        assert all(f'"asked":"say {word}"' in kept for word in ("one", "two"))

    page.get_by_role("button", name="Regenerate").click()
    check()
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Message, written anew").fill("say three")
    page.get_by_role("button", name="Send again").click()
    check()
    assert page.get_by_label("Message, written anew").input_value() == "say three"
    assert page.get_by_label("Message", exact=True).input_value() == ""


def test_conversations_are_kept_in_the_browser_go_on_and_are_deleted(running: Make, visit: Open) -> None:
    page = visit(running(adapters={}))
    page.get_by_label("System prompt").fill("be kind")
    converse(page, "say first", 9)
    page.get_by_role("button", name="New conversation").click()
    converse(page, "say second", 9)
    assert names(page) == ["say second", "say first"]
    drafted = page.locator(".answer .token.drafted").count()
    page.reload()
    assert names(page) == ["say second", "say first"] and page.locator(".turn").count() == 0
    page.get_by_role("button", name="say second", exact=True).click()
    assert page.locator(".answer .token.drafted").count() == drafted
    page.get_by_role("button", name="say first", exact=True).click()
    assert page.locator(".answer .text").all_text_contents() == ["first fir"]
    assert page.get_by_label("System prompt").input_value() == "be kind"
    with page.expect_request("**/v1/chat/completions") as asked:
        converse(page, "and then", 9)
    said = [message["content"] for message in json.loads(asked.value.post_data)["messages"]]
    assert said == ["be kind", "say first", "first fir", "and then"]
    assert names(page) == ["say first", "say second"]
    page.get_by_role("button", name="Delete say second").click()
    assert names(page) == ["say first"]


def test_nothing_is_kept_where_that_is_not_wanted(running: Make, visit: Open) -> None:
    page = visit(running(adapters={}))
    converse(page, "say secret", 9)
    assert "secret" in page.evaluate("JSON.stringify(localStorage)")
    page.get_by_label("Keep in this browser").uncheck()
    assert "secret" not in page.evaluate("JSON.stringify(localStorage)")
    converse(page, "say secret", 9)
    page.reload()
    assert names(page) == [] and not page.get_by_label("Keep in this browser").is_checked()
    assert "secret" not in page.evaluate("JSON.stringify(localStorage)")


def test_the_oldest_conversations_give_way(running: Make, visit: Open) -> None:
    page = visit(running(adapters={}))
    page.evaluate(
        """async () => {
            const { keep, kept } = await import("/page/history.js");
            const turns = [{ asked: "x".repeat(150000), pieces: [], drafted: "" }];
            for (let id = 0; id < 60; id++) keep({ id, title: String(id), turns: turns.slice(0, 1) });
        }"""
    )
    page.reload()
    assert names(page)[0] == "59" and 5 <= len(names(page)) <= 13


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [None, PHONE], ids=["desk", "phone"])
def test_axe_finds_nothing(running: Make, visit: Open, scheme: str, size: dict[str, int] | None) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    options: dict[str, Any] = {"color_scheme": scheme, "bypass_csp": True, "reduced_motion": "reduce"}
    page = visit(running(adapters={}), **options | ({} if size is None else {"viewport": size}))
    answers(page, MARKDOWN)
    converse(page, "hello", None)
    states: list[Callable[[], None]] = [
        lambda: None,
        lambda: page.get_by_role("button", name="Edit").click(),
        lambda: page.evaluate("document.getElementById('ask-token').showModal()"),
    ]
    if size is not None:
        states.insert(2, lambda: page.get_by_role("button", name="Panel").click())
    for reach in states:
        reach()
        found = axe.run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]})
        assert found.response["violations"] == [], found.generate_report()


def test_a_phone_has_everything_within_its_width(running: Make, visit: Open) -> None:
    page = visit(running(adapters={}), viewport=PHONE)
    answers(page, [*MARKDOWN, ("\n\n```\n" + "long " * 60 + "\n```\n", True)])
    converse(page, "hello", None)
    page.get_by_role("button", name="Edit").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.evaluate("document.getElementById('conversation').scrollWidth") <= PHONE["width"]
    page.get_by_role("button", name="Panel").click()
    page.get_by_role("button", name="hello", exact=True).click()
    assert page.locator("#panel").is_hidden() and page.locator(".turn").count() == 2


def test_everything_is_reached_with_the_keyboard(running: Make, visit: Open) -> None:
    page = visit(running(adapters={}))
    converse(page, "say word", 9)
    page.get_by_role("button", name="Edit").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.tagName") == "TEXTAREA"
    page.keyboard.press("End")
    page.keyboard.type("s")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Regenerate").wait_for()
    assert page.locator(".answer .text").text_content() == "words wor"
    page.get_by_role("button", name="Edit").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    assert page.locator("form.rewrite").count() == 0
