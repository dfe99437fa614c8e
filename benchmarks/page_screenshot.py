"""Takes a screenshot of the web page with a real conversation: docs/images/page.png.

    streamspec export --base smollm2-135m --adapter benchmarks/adapters/chat --out chat --precision int8
    python benchmarks/page_screenshot.py chat --out docs/images/page.png

Serves the bundle on a free port, sends a message in a headless Chromium and waits for the answers.
"""

from __future__ import annotations

import argparse
import shutil
import threading
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from streamspec.runtime import load
from streamspec.serve import Server

QUESTIONS = ["Write a Python function that adds two numbers.", "And one that multiplies them?"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    options = parser.parse_args()
    server = Server(load(options.bundle), port=0, name=options.bundle.name)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=options.chromium, args=["--no-sandbox", "--disable-gpu"]
            )
            page = browser.new_page(viewport={"width": 1280, "height": 960}, color_scheme="light")
            page.goto(f"{server.url}/#token={server.token}")
            for question in QUESTIONS:
                converse(page, question)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=options.out)
            browser.close()
    finally:
        server.stop()
        thread.join()


def converse(page: Page, question: str) -> None:
    page.get_by_label("Message").fill(question)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Regenerate").wait_for(timeout=180_000)


if __name__ == "__main__":
    main()
