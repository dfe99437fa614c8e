"""The web page in a real Chromium: over real tiny bundles what it shows is what the API said, over fake sessions how it
is stopped, refused and attacked.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamspec.export import export_swappable
from streamspec.runtime import Sampling, load
from streamspec.serve import Limits
from streamspec.serve.api.chat_responses import ResponseBuilder
from tests.serve.conftest import TOKEN, Running, until, user
from tests.serve.page_in_browser import Open, converse, needs_chromium, said, write
from tests.support.fake_serve_session import FakeServeSession, Shared
from tests.support.tiny_bundles import tiny_adapter, tiny_base

pytestmark = needs_chromium
INJECTED = '<img/src="x"onerror="window.harmed=1">'  # the fake model says single words
Make = Callable[..., Running]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every chunk that a server has sent."""
    chunks: list[dict[str, Any]] = []
    push = ResponseBuilder.push
    monkeypatch.setattr(ResponseBuilder, "push", lambda self, chunk: chunks.append(push(self, chunk)) or chunks[-1])
    return chunks


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A real bundle with two adapters, of which one knows no chat."""
    folder = tmp_path_factory.mktemp("page")
    base = tiny_base(folder / "base", chat=True)
    adapters = [tiny_adapter(folder / "chatty", base, kind="chat"), tiny_adapter(folder / "terse", base)]
    export_swappable(base, adapters, folder / "bundle", "fp32", progress=lambda line: None)
    session = load(folder / "bundle", threads=1, tree=8)
    running = Running(
        session, adapters={name: name for name in session.adapters}, limits=Limits(sessions=2, timeout=60)
    )
    yield running
    running.stop()


def newest(sent: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is said of speculation in each chunk of the newest answer."""
    return [chunk["streamspec"] for chunk in sent if chunk["id"] == sent[-1]["id"]]


def pick(page: Any, model: str) -> None:
    page.get_by_label("Model").select_option(model)


def drafting(visit: Open, server: Running) -> Any:
    """A page with an answer of the model that drafts."""
    page = visit(server)
    pick(page, "chatty")
    converse(page, "abcabd", 30)
    return page


def test_an_answer_is_the_apis_and_its_drafted_tokens_are_marked(
    server: Running, visit: Open, sent: list[dict[str, Any]]
) -> None:
    page = drafting(visit, server)
    calls = newest(sent)
    want = server.client().chat.completions.create(
        model="chatty", messages=user("abcabd"), max_tokens=30, temperature=0
    )
    assert said(page) == want.choices[0].message.content != ""
    tokens = [pair for call in calls for pair in zip(call["tokens"], call["drafted"], strict=True) if pair[0]]
    shown = page.locator(".answer .token").evaluate_all(
        "tokens => tokens.map(token => [token.textContent, token.classList.contains('drafted')])"
    )
    assert shown == [list(pair) for pair in tokens] and {drafted for _, drafted in tokens} == {True, False}
    background = "tokens => tokens.map(token => getComputedStyle(token).backgroundColor)"
    (colour,) = set(
        page.locator(".drafted:not(.drafted + .drafted) .ink, .drafted + .drafted").evaluate_all(background)
    )
    assert colour not in page.locator(".token:not(.drafted)").evaluate_all(background)
    page.get_by_label("Mark drafted tokens").uncheck()
    assert set(page.locator(".answer .text *").evaluate_all(background)) == {"rgba(0, 0, 0, 0)"}


def test_the_figures_are_the_servers_and_the_plot_has_every_step(
    server: Running, visit: Open, sent: list[dict[str, Any]]
) -> None:
    page = drafting(visit, server)
    calls = newest(sent)
    record = calls[-1]
    shown = float(page.locator("#rate").text_content())  # Python and JavaScript round 180.25 to different sides
    assert shown == pytest.approx(record["tokens_per_second"], abs=0.0501)
    assert page.locator("#tokens").text_content() == str(record["new_tokens"])
    assert (
        page.locator("#per-step").text_content() == f"{record['tokens_per_step']:.2f}"
        and page.locator("#known").text_content() == f"{record['reused_tokens']} of {record['prompt_tokens']}"
    )
    assert page.locator("#speculation").text_content() == f"speculation: {record['speculation']}"
    steps = [call for call in calls if call["rows"]]
    assert len(steps) == record["steps"] + record["plain_steps"] > 1
    assert [page.locator(f"#plot {bars}").get_attribute("d").count("M") for bars in ("path.rows", "path.accepted")] == [
        len(steps),
        sum(call["accepted"] > 0 for call in steps),
    ]
    page.locator("#plot").focus()
    for step in steps[:3]:
        page.keyboard.press("ArrowRight")
        assert (
            f"{step['rows']} row" in page.locator("#readout").text_content()
            and f"{step['accepted']} accepted" in page.locator("#readout").text_content()
        )
        assert page.locator(".token.looked-at").count() == sum(map(bool, step["tokens"]))


def test_a_conversation_goes_on_from_what_is_in_the_cache(
    server: Running, visit: Open, sent: list[dict[str, Any]]
) -> None:
    page = visit(server)
    pick(page, "chatty")
    page.get_by_label("System prompt").fill("be kind")
    converse(page, "hello")
    first = newest(sent)[-1]
    converse(page, "and then?", 10)
    again = newest(sent)[-1]
    talk = [
        {"role": "system", "content": "be kind"},
        *user("hello"),
        {"role": "assistant", "content": page.locator(".answer .text").first.text_content()},
        *user("and then?"),
    ]
    want = server.client().chat.completions.create(model="chatty", messages=talk, max_tokens=10, temperature=0)
    assert said(page) == want.choices[0].message.content and again["prompt_tokens"] == want.usage.prompt_tokens
    assert first["reused_tokens"] < first["prompt_tokens"] <= again["reused_tokens"]
    kept = said(page)
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Regenerate").click()
    page.get_by_role("button", name="Regenerate").wait_for()
    assert (
        json.loads(asked.value.post_data)["messages"] == talk
        and said(page) == kept
        and page.locator(".answer").count() == 2
    )
    page.get_by_role("button", name="New conversation").click()
    assert page.locator(".turn").count() == 0
    with page.expect_request("**/v1/chat/completions") as asked:
        converse(page, "hello")
    assert json.loads(asked.value.post_data)["messages"] == talk[:2]


def test_without_speculation_nothing_is_marked_and_the_text_is_the_same(
    server: Running, visit: Open, sent: list[dict[str, Any]]
) -> None:
    page = drafting(visit, server)
    fast = said(page)
    assert page.locator(".drafted").count() > 0
    page.get_by_role("button", name="New conversation").click()
    page.get_by_label("Speculation").uncheck()
    converse(page, "abcabd", 30)
    record = newest(sent)[-1]
    assert (
        said(page) == fast
        and page.locator(".drafted").count() == 0
        and page.locator("#plot path.accepted").get_attribute("d") == ""
    )
    assert page.locator("#speculation").text_content() == f"speculation: {record['speculation']}" and record[
        "speculation"
    ].startswith("off (")


def test_the_adapter_is_the_one_that_was_chosen(server: Running, visit: Open, sent: list[dict[str, Any]]) -> None:
    page = visit(server)
    until(lambda: page.get_by_label("Model").locator("option").all_text_contents() == ["base", "chatty", "terse"])
    answers = {}
    for name in ("base", "terse", "chatty"):
        pick(page, name)
        converse(page, "abcabd")
        assert newest(sent)[-1]["adapter"] == (None if name == "base" else name)
        answers[name] = said(page)
        assert page.locator(".answer > h2").last.text_content() == name
        page.get_by_role("button", name="New conversation").click()
    assert answers["terse"] != answers["chatty"] and all(answers.values())


@pytest.mark.parametrize("how", ["button", "key", "new conversation", "page closed"])
def test_stop_ends_the_generation_at_once_and_the_session_is_free(running: Make, visit: Open, how: str) -> None:
    server = running(step=0.03, limits={"sessions": 1}, adapters={})
    page = visit(server)
    write(page, "say word", 500)
    page.locator(".answer .token").nth(3).wait_for(state="attached")
    assert page.get_by_role("button", name="Send").is_hidden() and page.locator("#model").is_disabled()
    began = time.monotonic()
    if how == "key":
        page.keyboard.press("Escape")
    elif how == "page closed":
        page.close()
    else:
        page.get_by_role("button", name="Stop" if how == "button" else "New conversation").click()
    until(lambda: not server.server.pool.requests, 1.0)
    assert time.monotonic() - began < 1
    if how == "page closed":
        page = visit(server)
    elif how == "new conversation":
        assert page.locator(".turn").count() == 0
    else:
        assert page.locator(".note").text_content().startswith("stopped · ") and said(page).startswith("word")
    converse(page, "say next", 9)
    assert said(page) == "next next"


def test_a_turn_that_was_stopped_before_its_first_token_is_none(running: Make, visit: Open) -> None:
    server = running(still=True, adapters={})
    page = visit(server)
    write(page, "say word")
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Send").wait_for()
    assert page.locator(".turn").count() == 0 and page.get_by_label("Message").input_value() == "say word"
    until(lambda: not server.server.pool.requests, 1.0)


def test_a_refusal_is_one_line_and_the_message_is_not_lost(running: Make, visit: Open) -> None:
    server = running()
    page = visit(server)
    write(page, "a long one " * 1000)
    page.locator("#error").wait_for()
    assert "11000 tokens" in page.locator("#error").text_content() and "\n" not in page.locator("#error").text_content()
    assert page.get_by_label("Message").input_value() == "a long one " * 1000 and page.locator(".turn").count() == 0
    converse(page, "say word", 9)
    assert said(page) == "word word" and page.locator("#error").is_hidden()
    server.shared.fails = RuntimeError("broken")
    write(page, "say more")
    page.locator("#error").wait_for()
    assert (
        page.locator("#error").text_content() == "an error inside the server; see its log"
        and "broken off" in page.locator(".note").last.text_content()
    )
    server.server.stop()
    server.thread.join(5)
    assert page.locator("#tokens").text_content() == "1"
    write(page, "anybody?")
    page.get_by_text("the server cannot be reached").wait_for()
    assert page.locator("#tokens").text_content() == "1"  # of the answer that is the newest again


@pytest.mark.parametrize("bypass", [False, True], ids=["with its policy", "without a policy"])
def test_markup_from_a_model_or_a_person_is_only_text(running: Make, visit: Open, bypass: bool) -> None:
    """Without a policy too, which would hide a mistake."""
    server = running(adapters={})
    page = visit(server, bypass_csp=bypass)
    converse(page, f"<script>window.harmed=1</script> {INJECTED}", 2 * len(INJECTED) + 1)
    assert said(page) == f"{INJECTED} {INJECTED}" and page.locator(".question .text").text_content().endswith(INJECTED)
    assert page.locator("#conversation").evaluate("node => node.querySelectorAll('img, script').length") == 0
    assert page.evaluate("window.harmed") is None
    if not bypass:  # and the policy would have stopped it
        page.evaluate("html => { document.getElementById('conversation').innerHTML = html }", INJECTED)
        until(lambda: page.evaluate("true") and visit.wrong)
        assert (
            "Content Security Policy" in visit.wrong.pop()
            and not visit.wrong
            and page.evaluate("window.harmed") is None
        )


@pytest.mark.parametrize("drafted", [False, True])
def test_markup_in_one_token_an_error_or_a_name_is_only_text(running: Make, visit: Open, drafted: bool) -> None:
    """The fake model's tokens are letters, which harm nobody alone: here whole tags come, as one token each."""
    page = visit(running(adapters={}), bypass_csp=True)
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": INJECTED}, {"id": "other"}]}))
    said_of_call = {
        "tokens": [INJECTED],
        "drafted": [drafted],
        "rows": 2,
        "committed": 1,
        "accepted": int(drafted),
        "tokens_per_second": 1,
        "tokens_per_step": 1,
    }
    chunk = {"choices": [{"delta": {"content": INJECTED}, "finish_reason": None}], "streamspec": said_of_call}
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in (chunk, chunk, {"error": {"message": INJECTED}}))
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    page.reload()
    converse(page, "hello")
    assert (
        said(page) == 2 * INJECTED
        and page.locator("#error").text_content()
        == page.locator(".answer > h2").text_content()
        == page.locator("#serving").text_content()
        == INJECTED
    )
    assert page.locator("main img").count() == 0 and page.evaluate("window.harmed") is None


def test_blocks_of_code_are_set_as_code(running: Make, visit: Open) -> None:
    page = visit(running(adapters={}))
    converse(page, "say ```a", 19)
    assert said(page) == "```a ```a ```a ```a"
    assert page.locator(".token.code").all_text_contents() == [*"`a ```", *"`a ```"] and page.locator(
        ".token:not(.code)"
    ).all_text_contents() == [*"``", *"a ``", "a"]


def test_the_token_comes_with_the_address_and_leaves_it(running: Make, visit: Open) -> None:
    server = running(token="a+%/?token", adapters={})
    page = visit(server, "a%2B%25%2F%3Ftoken")
    converse(page, "say word", 9)
    assert page.url == f"{server.url}/" and page.evaluate("history.length") <= 2
    page.reload()
    converse(page, "say next", 9)
    assert said(page) == "next next"


def test_without_a_token_the_page_asks_for_one(running: Make, visit: Open) -> None:
    server = running(adapters={})
    page = visit(server, None)
    dialog = page.get_by_role("dialog")
    dialog.wait_for()
    dialog.get_by_label("Token").fill("a-wrong-token")
    page.keyboard.press("Enter")
    dialog.wait_for()
    dialog.get_by_text("Not that one").wait_for()
    assert dialog.get_by_label("Token").input_value() == ""
    dialog.get_by_label("Token").fill(TOKEN)
    page.keyboard.press("Enter")
    dialog.wait_for(state="hidden")
    until(lambda: page.locator("#model option").count())
    converse(page, "say word", 9)
    assert said(page) == "word word"
    page.evaluate("sessionStorage.setItem('streamspec-token', 'one-that-is-old')")
    write(page, "say next")
    dialog.wait_for()
    assert page.get_by_label("Message").input_value() == "say next"
    page.evaluate("token => { location.hash = `token=${token}` }", TOKEN)  # as when the link is opened again
    until(lambda: page.evaluate("location.hash") == "")
    dialog.wait_for(state="hidden")


def test_a_narrow_window_has_everything(running: Make, visit: Open) -> None:
    page = visit(running(adapters={}), viewport={"width": 340, "height": 600})
    assert page.locator("#panel").is_hidden()
    write(page, "say " + "word" * 30)
    page.get_by_role("button", name="Regenerate").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 340
    page.get_by_role("button", name="Panel").click()
    assert page.get_by_label("Temperature").is_visible() and page.locator("#plot path.rows").get_attribute("d")
    page.keyboard.press("Escape")
    assert page.locator("#panel").is_hidden()


def test_a_phone_shows_the_name_that_was_given_and_all_of_it_after_a_tap(running: Make, visit: Open) -> None:
    page = visit(running(adapters={}), viewport={"width": 360, "height": 640}, has_touch=True)
    given = "the-assistant-of-our-support-team-" + "x" * 60
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": given}, {"id": "small"}]}))
    page.reload()
    name, is_cut = page.locator("#serving"), "name => name.scrollWidth > name.clientWidth"
    until(lambda: name.text_content() == given)
    box = name.bounding_box()
    assert name.evaluate(is_cut) and box["width"] > 120 and name.get_attribute("title") == given
    assert name.evaluate("name => getComputedStyle(name).textOverflow") == "ellipsis"
    name.tap()
    assert not name.evaluate(is_cut) and name.bounding_box()["height"] > 2 * box["height"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    name.tap()
    assert name.evaluate(is_cut) and name.bounding_box() == box
    page.get_by_role("button", name="Panel").click()
    pick(page, "small")
    assert name.text_content() == name.get_attribute("title") == "small"


def test_the_page_is_small_and_needs_nobody(visit: Open, running: Make) -> None:
    folder = Path(__file__).parents[2] / "streamspec" / "serve" / "page"
    assert sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) < 110_000  # half of it marked's
    server = running()
    page = visit(server, None)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    page.get_by_role("dialog").wait_for()
    assert len(asked) > 5 and all(url.startswith(server.url) for url in asked)
    assert (
        set(page.locator("script").evaluate_all("all => all.map(one => one.textContent)")) == {""}
        and page.locator("style, [style]").count() == 0
    )


def test_the_temperature_is_the_models_until_it_is_moved(running: Make, visit: Open) -> None:
    shared = Shared()
    shared.gate.set()
    session = FakeServeSession(shared)
    session.sampling = Sampling(temperature=0.65, top_k=20)
    page = visit(running(session=session, adapters={}))
    until(lambda: page.locator("#degrees").text_content() == "0.65")
    assert page.locator("#others").text_content() == "top_k 20" and page.locator("#others").is_visible()
    converse(page, "say a")
    page.locator("#temperature").fill("0")
    assert page.locator("#degrees").text_content() == "0" and page.locator("#others").is_hidden()
    converse(page, "say b")
    assert [options.sampling for options in shared.options] == [session.sampling, Sampling()]
