"""Tests the server's page as a user would, in a headless Chromium, with the tests' fake engine.

python -m tests.page --record tests/page.json

Requires `pip install playwright` and a Chromium: Debian's (apt install chromium), or the one named by --chromium.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import commands

DELAY = 0.05
"""Seconds per letter."""


def type_and_start(page: Any, text: str, alternatives: int = 1, length: int = 100) -> None:
    """The first steps of a user."""
    page.get_by_label("Text to").fill(text)
    page.get_by_label("Alternatives").fill(str(alternatives))
    page.get_by_label("Longest output, in tokens").fill(str(length))
    page.get_by_role("button", name="Translate").or_(page.get_by_role("button", name="Continue")).click()


def outputs(page: Any) -> list[str]:
    """Returns the texts shown."""
    return page.locator("#outputs li p").all_text_contents()


def ended(page: Any, status: str) -> None:
    """Waits for a status line."""
    page.get_by_role("status").filter(has_text=status).wait_for(timeout=20_000)


def the_output_grows_while_it_is_made(page: Any, translates: bool) -> None:
    type_and_start(page, "abcdefghijklmnopqrst")
    seen: set[str] = set()
    while page.get_by_role("status").text_content() != "Done.":
        seen |= set(outputs(page))
        time.sleep(DELAY / 4)
    assert outputs(page) == ["tsrqponmlkjihgfedcba"]
    assert len(seen) > 8 and all("tsrqponmlkjihgfedcba".startswith(part) for part in seen), seen


def alternatives_appear(page: Any, translates: bool) -> None:
    page.get_by_label("Temperature").fill("1") if not translates else None
    type_and_start(page, "abc", alternatives=3)
    ended(page, "Done.")
    found = outputs(page)
    assert len(found) == 3 and len(set(found)) == 3 and all(text.endswith("cba") for text in found), found
    notes = page.locator("#outputs li small").all_text_contents()
    assert notes == (["score 0.0000", "score -0.2500", "score -0.5000"] if translates else ["", "", ""]), notes


def stop_stops(page: Any, translates: bool) -> None:
    for press in (lambda: page.get_by_role("button", name="Stop").click(), lambda: page.keyboard.press("Escape")):
        type_and_start(page, "a" * 90)
        page.locator("#outputs li p").filter(has_text="aaa").wait_for()
        press()
        ended(page, "Stopped.")
        before = outputs(page)
        time.sleep(10 * DELAY)
        assert outputs(page) == before and 3 <= len(before[0]) < 90, before
        assert "tformer_pages_used 0\n" in page.evaluate("fetch('metrics').then((answer) => answer.text())")
    assert page.get_by_role("button", name="Stop").is_disabled()


def a_refusal_is_shown(page: Any, translates: bool) -> None:
    type_and_start(page, "abc", alternatives=12)
    error = page.get_by_role("alert")
    error.filter(has_text="12 outputs need more than 8 slots").wait_for()
    type_and_start(page, "abc")
    ended(page, "Done.")
    assert error.text_content() == ""
    assert outputs(page) == ["cba"]


def a_cut_output_says_so(page: Any, translates: bool) -> None:
    type_and_start(page, "abcdef", length=2)
    ended(page, "Done.")
    assert "cut at the longest length" in page.locator("#outputs li small").text_content()


def text_is_shown_as_text(page: Any, translates: bool) -> None:
    type_and_start(page, "".join(reversed("<img src=x onerror=alert(1)>\n 漢字")))
    ended(page, "Done.")
    assert outputs(page) == ["<img src=x onerror=alert(1)>\n 漢字"]


def the_keyboard_is_enough(page: Any, translates: bool) -> None:
    box = page.get_by_label("Text to")
    box.fill("abc")
    page.get_by_label("Alternatives").fill("1")
    box.press("Control+Enter")
    ended(page, "Done.")
    assert outputs(page) == ["cba"]
    box.press("Shift+Tab")
    focused = []
    for _ in range(8):
        page.keyboard.press("Tab")
        focused.append(page.evaluate("document.activeElement.id"))
    assert focused[:3] == ["text", "alternatives", "length"] and "start" in focused, focused


def everything_has_a_label(page: Any, translates: bool) -> None:
    fields = page.locator("input:visible, textarea:visible")
    assert fields.count() == (3 if translates else 4)
    assert all(field.evaluate("(field) => field.labels.length") == 1 for field in fields.all())


def attention_is_shown(page: Any, translates: bool) -> None:
    type_and_start(page, "abc")
    ended(page, "Done.")
    page.get_by_role("button", name="Attention").press("Enter")
    page.frame_locator("iframe").get_by_text("abc to cba").wait_for()
    assert page.evaluate("document.querySelector('iframe').contentDocument") is None, "it is another origin"
    type_and_start(page, "abc")
    ended(page, "Done.")
    assert page.locator("iframe").count() == 0


def a_lost_server_is_said(page: Any, translates: bool) -> None:
    page.context.set_offline(True)
    type_and_start(page, "abc")
    page.get_by_role("alert").filter(has_text="The server does not answer.").wait_for()
    page.context.set_offline(False)


CHECKS: tuple[Callable[[Any, bool], None], ...] = (
    the_output_grows_while_it_is_made,
    alternatives_appear,
    stop_stops,
    a_refusal_is_shown,
    a_cut_output_says_so,
    text_is_shown_as_text,
    the_keyboard_is_enough,
    everything_has_a_label,
    attention_is_shown,
    a_lost_server_is_said,
)


def main() -> None:
    """Prints and records the checks; exits with 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="default: the one on the PATH")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="where pictures of the page go")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        found = {family: check(family, browser, options.pictures) for family in ("seq2seq", "decoder_lm")}
        if options.record:
            commands.write_record(options.record, "tests.page", chromium=browser.version, checked=found)
        browser.close()
    raise SystemExit(any(result != "passed" for results in found.values() for result in results.values()))


def check(family: str, browser: Any, pictures: Path | None) -> dict[str, str]:
    """Returns the outcome of each check against a server of this model family."""
    found = {}
    command = [sys.executable, "-m", "tests.serving.fake_engine", "--port=0", f"--family={family}", f"--delay={DELAY}"]
    with tempfile.TemporaryDirectory() as folder:
        process = commands.start(command, Path(folder))
        url = process.stdout.readline().split(" at ")[1].split(";")[0]
        for one in CHECKS:
            page = browser.new_page()
            mistakes: list[str] = []
            page.on("pageerror", lambda error, mistakes=mistakes: mistakes.append(str(error)))
            page.on("dialog", lambda dialog, mistakes=mistakes: mistakes.append(dialog.message))
            page.goto(url)
            page.get_by_role("heading", name="fake").wait_for()
            try:
                one(page, family == "seq2seq")
                assert not mistakes, mistakes
                found[one.__name__] = "passed"
            except Exception as error:
                found[one.__name__] = f"{type(error).__name__}: {error}"
            if pictures:
                page.screenshot(path=pictures / f"{family}_{one.__name__}.png")
            page.close()
            print(f"{family}: {one.__name__.replace('_', ' ')}: {found[one.__name__]}", flush=True)
        process.terminate()
        process.wait(20)
    return found


if __name__ == "__main__":
    main()
