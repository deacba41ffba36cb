"""Tests the server's page as a user would, in a headless Chromium, with the tests' fake engine.

python -m tests.programs.page --record tests/programs/page.json

Requires `pip install playwright` and a Chromium: Debian's (apt install chromium), or the one named by --chromium.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests import commands
from tests.report.checks import WIDTHS, texts_have_contrast, the_page_fits_its_width

DELAY = 0.05
"""Seconds per letter."""
KEY = "secret"
NO_ATTENTION = "--no-attention=the layers have a state"
Check = Callable[[Any, bool], None]
"""Takes the page, and whether the model translates."""


def type_and_start(page: Any, text: str, count: int = 1, length: int = 100) -> None:
    """The first steps of a user."""
    page.get_by_label("Text to").fill(text)
    if page.locator("#settings").is_visible():
        page.locator("#settings").evaluate("(settings) => { settings.open = true; }")
        page.get_by_label("Number of outputs").fill(str(count))
        page.get_by_label("Maximum length, in tokens").fill(str(length))
    page.locator("#start").click()


def outputs(page: Any) -> list[str]:
    """Returns the texts shown."""
    return page.locator("#outputs li p").all_text_contents()


def ended(page: Any, status: str) -> None:
    """Waits for a status line."""
    page.get_by_role("status").filter(has_text=status).wait_for(timeout=20_000)


def the_output_grows_while_it_is_made(page: Any, translates: bool) -> None:
    page.evaluate(
        """() => {
          window.seen = [];
          const note = () => window.seen.push(document.getElementById("outputs").textContent);
          new MutationObserver(note).observe(document.getElementById("outputs"), { childList: true, subtree: true });
        }"""
    )
    type_and_start(page, "abcdefghijklmnopqrst")
    ended(page, "Done.")
    assert outputs(page) == ["tsrqponmlkjihgfedcba"]
    grown = {text for text in page.evaluate("window.seen") if text and "tsrqponmlkjihgfedcba".startswith(text)}
    assert len(grown) > 8, grown


def several_outputs_appear(page: Any, translates: bool) -> None:
    page.locator("#settings").evaluate("(settings) => { settings.open = true; }")
    page.get_by_label("Temperature").fill("1") if not translates else None
    type_and_start(page, "abc", count=3)
    ended(page, "Done.")
    actual = outputs(page)
    assert len(actual) == 3 and len(set(actual)) == 3 and all(text.endswith("cba") for text in actual), actual
    notes = page.locator("#outputs small:nth-child(1)").all_text_contents()
    assert notes == (["score 0.0000", "score −0.2500", "score −0.5000"] if translates else ["", "", ""]), notes


def stop_stops(page: Any, translates: bool) -> None:
    for press in (lambda: page.get_by_role("button", name="Stop").click(), lambda: page.keyboard.press("Escape")):
        type_and_start(page, "a" * 90)
        page.locator("#outputs li p").filter(has_text="aaa").wait_for()
        press()
        ended(page, "Stopped.")
        before = outputs(page)
        time.sleep(10 * DELAY)
        assert outputs(page) == before and 3 <= len(before[0]) < 90, before
        assert "tformer_pages_used 0.0\n" in page.evaluate("fetch('metrics').then((answer) => answer.text())")
    assert page.get_by_role("button", name="Stop").is_disabled()


def a_refusal_is_shown(page: Any, translates: bool) -> None:
    type_and_start(page, "abc", count=12)
    error = page.get_by_role("alert")
    error.filter(has_text="12 outputs need more than 8 rows").wait_for()
    type_and_start(page, "abc")
    ended(page, "Done.")
    assert error.text_content() == ""
    assert outputs(page) == ["cba"]


def a_cut_output_says_so(page: Any, translates: bool) -> None:
    type_and_start(page, "abcdef", length=2)
    ended(page, "Done.")
    assert page.get_by_text("truncated at the maximum length").is_visible()


def text_is_shown_as_text(page: Any, translates: bool) -> None:
    type_and_start(page, "".join(reversed("<img src=x onerror=alert(1)>\n 漢字")))
    ended(page, "Done.")
    assert outputs(page) == ["<img src=x onerror=alert(1)>\n 漢字"]


def the_keyboard_is_enough(page: Any, translates: bool) -> None:
    box = page.get_by_label("Text to")
    box.fill("abc")
    box.press("Control+Enter")
    ended(page, "Done.")
    assert outputs(page) == ["cba"]
    box.press("Shift+Tab")
    focused = []
    for _ in range(8):
        page.keyboard.press("Tab")
        focused.append(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", focused[-1]
    example = "a longer text\n" * 9
    assert focused == ["text", "abc", example.strip(), "start", "Settings", *focused[5:]], focused
    assert "Show attention" in focused, focused


def everything_has_a_label(page: Any, translates: bool) -> None:
    page.locator("#settings").evaluate("(settings) => { settings.open = true; }")
    fields = page.locator("input:visible, textarea:visible")
    assert fields.count() == 4
    assert all(field.evaluate("(field) => field.labels.length") == 1 for field in fields.all())


def the_model_is_described(page: Any, translates: bool) -> None:
    assert page.get_by_role("heading", name="fake").is_visible()
    assert page.locator("#task").text_content() == (
        "Translation, English to Traditional Chinese" if translates else "Language model"
    )
    assert page.locator("#metrics").text_content() == "BLEU31.42"
    facts = page.locator("#facts").text_content()
    assert facts == "Scores on the test split · 1.05 M parameters · 2 layers", facts


def examples_start(page: Any, translates: bool) -> None:
    page.get_by_role("button", name="abc", exact=True).press("Enter")
    ended(page, "Done.")
    assert outputs(page) == ["cba"]
    assert page.locator("#reference").text_content() == "Reference of the test splitcba"
    type_and_start(page, "abd")
    ended(page, "Done.")
    assert not page.locator("#reference").is_visible()


def tokens_show_their_alternatives(page: Any, translates: bool) -> None:
    type_and_start(page, "cd a")
    ended(page, "Done.")
    tokens = page.get_by_role("option")
    assert tokens.all_text_contents() == ["a", " ", "d", "c"]
    assert {token.get_attribute("class") for token in tokens.all()} == {"p2"}, "exp(-1) is between 0.1 and 0.5"
    tokens.nth(1).click()

    def rows() -> list[list[str]]:
        actual = page.locator("#outputs tr").all()
        return [[cell for cell in row.locator("th, td").all_text_contents() if cell] for row in actual]

    others = ["all others", "49.7 %"]  # 1 - exp(-1) - exp(-2)
    assert rows() == [["▁", "36.8 %"], ["!", "13.5 %"], others], rows()
    assert page.locator("caption").text_content() == "Token 2 of 4 after “a”"
    page.keyboard.press("ArrowRight")
    assert rows() == [["d", "36.8 %"], ["e", "13.5 %"], others], rows()
    assert page.locator(".chosen").text_content() == "d36.8 %"
    page.keyboard.press("Home")
    assert page.locator("caption").text_content() == "Token 1 of 4"
    assert page.locator("[role=option][tabindex='0']").count() == 1


def words_show_their_sources(page: Any, translates: bool) -> None:
    """The fake engine links the words in the opposite order."""
    if not translates:
        return
    type_and_start(page, "ab c d")
    page.get_by_label("Text to").fill("the next text")
    ended(page, "Done.")
    assert page.locator(".sources").text_content() == "ab c d "
    assert page.locator(".aligned").count() == 0
    for token, word in ((0, "d"), (2, "c"), (5, "ab")):  # of "d c ba"
        page.get_by_role("option").nth(token).hover()
        assert page.locator(".aligned").all_text_contents() == [word]


def some_texts_run_from_right_to_left(page: Any, translates: bool) -> None:
    type_and_start(page, "\u05d0\u05d1\u05d2")  # Hebrew letters
    ended(page, "Done.")
    assert page.locator("#outputs p").evaluate("(line) => getComputedStyle(line).direction") == "rtl"
    page.get_by_role("option").first.focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("caption").text_content().startswith("Token 2 of 6")


def classes_have_probabilities(page: Any, translates: bool) -> None:
    page.get_by_role("button", name="abc", exact=True).click()
    ended(page, "Done.")
    assert outputs(page) == ["long"]
    rows = [row.locator("th, td:last-child").all_text_contents() for row in page.locator("#outputs tr").all()]
    assert rows == [["long", "60.0 %"], ["short", "20.0 %"], ["other", "20.0 %"]], rows
    assert page.locator("#reference").text_content() == "Reference of the test splitshort"
    assert page.locator("#task").text_content() == "Classification into 3 classes"
    page.get_by_role("button", name="Show attention").click()
    page.frame_locator("iframe").get_by_text("abc to").wait_for()


def attention_is_shown(page: Any, translates: bool) -> None:
    type_and_start(page, "abc")
    ended(page, "Done.")
    page.get_by_role("button", name="Show attention").press("Enter")
    page.frame_locator("iframe").get_by_text("abc to cba").wait_for()
    assert page.evaluate("document.querySelector('iframe').contentDocument") is None, "it is another origin"
    type_and_start(page, "abc")
    ended(page, "Done.")
    assert page.locator("iframe").count() == 0


def a_conversation_goes_on(page: Any, translates: bool) -> None:
    """The fake engine answers with the prompt backwards, and the prompt has the earlier turns."""
    assert page.locator("#task").text_content() == "Chat"
    type_and_start(page, "ab")
    ended(page, "Done.")
    first = "\n:tnatsissA\nba\n:resU"
    assert outputs(page) == [first]
    type_and_start(page, "c")
    ended(page, "Done.")
    (second,) = outputs(page)
    assert second.startswith("\n:tnatsissA\nc\n:resU\n") and second.endswith("ba\n:resU"), second
    assert page.locator("#turns li").all_text_contents() == ["ab", first, "c", second]
    page.get_by_role("button", name="New conversation").click()
    assert page.locator("#turns li").count() == 0
    type_and_start(page, "ab")
    ended(page, "Done.")
    assert outputs(page) == [first]


def missing_attention_is_explained(page: Any, translates: bool) -> None:
    type_and_start(page, "abc")
    ended(page, "Done.")
    assert page.locator("#shown").text_content() == "No attention: the layers have a state."
    assert page.get_by_role("button", name="Show attention").count() == 0


def a_lost_server_is_said(page: Any, translates: bool) -> None:
    page.context.set_offline(True)
    type_and_start(page, "abc")
    page.get_by_role("alert").filter(has_text="The server does not respond.").wait_for()
    page.context.set_offline(False)


def it_fits_and_can_be_read(page: Any, translates: bool) -> None:
    type_and_start(page, "a_very_long_word" * 3)
    ended(page, "Done.")
    the_page_fits_its_width(page)
    texts_have_contrast(page)


def the_key_is_asked_for(page: Any, translates: bool) -> None:
    the_page_fits_its_width(page)
    texts_have_contrast(page)
    error = page.get_by_role("alert")
    assert "requires its API key" in error.text_content()
    give_key(page, f"{KEY}?")
    assert "requires its API key" in error.text_content()
    assert page.locator("#metrics").text_content() == ""
    give_key(page, KEY)
    assert error.text_content() == ""
    the_model_is_described(page, translates)
    type_and_start(page, "abc")
    ended(page, "Done.")
    assert outputs(page) == ["cba"]


def give_key(page: Any, key: str) -> None:
    """Types an API key and waits until the page has used it."""
    page.get_by_label("API key").fill(key)
    with page.expect_response("**/info"):
        page.keyboard.press("Tab")
    page.locator("#start:enabled").wait_for()


CHECKS: tuple[Check, ...] = (
    the_model_is_described,
    examples_start,
    the_output_grows_while_it_is_made,
    several_outputs_appear,
    tokens_show_their_alternatives,
    words_show_their_sources,
    some_texts_run_from_right_to_left,
    stop_stops,
    a_refusal_is_shown,
    a_cut_output_says_so,
    text_is_shown_as_text,
    the_keyboard_is_enough,
    everything_has_a_label,
    attention_is_shown,
    a_lost_server_is_said,
)


class Server(NamedTuple):
    """A server, and the checks of its page."""

    flags: tuple[str, ...]
    checks: tuple[Check, ...]
    of_layouts: Check = it_fits_and_can_be_read
    """The check for each width and color scheme."""


SERVERS = {
    "seq2seq": Server(("--family=seq2seq",), CHECKS),
    "decoder_lm": Server(("--family=decoder_lm",), CHECKS),
    "classifier": Server(("--family=classifier",), (classes_have_probabilities, a_lost_server_is_said)),
    "conversations": Server(("--family=decoder_lm", "--chat"), (a_conversation_goes_on,)),
    "no attention": Server((NO_ATTENTION,), (missing_attention_is_explained,)),
    "API key": Server(("--family=seq2seq", f"--api-key={KEY}"), (), the_key_is_asked_for),
}
LAYOUTS = [(width, scheme) for width in WIDTHS for scheme in ("light", "dark")]


def main() -> None:
    """Prints and records the checks; exits with 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="default: the one on the PATH")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--screenshots", type=Path, metavar="DIR", help="where screenshots of the page go")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        actual = {name: check(name, browser, options.screenshots) for name in SERVERS}
        if options.record:
            commands.write_record(options.record, "tests.programs.page", chromium=browser.version, checked=actual)
        browser.close()
    raise SystemExit(any(result != "passed" for results in actual.values() for result in results.values()))


def check(name: str, browser: Any, screenshots: Path | None) -> dict[str, str]:
    """Returns the outcome of each check of a server's page."""
    flags, checks, of_layouts = SERVERS[name]
    runs = {each.__name__: (each, LAYOUTS[0]) for each in checks}
    runs |= {f"{of_layouts.__name__} ({', '.join(layout)})": (of_layouts, layout) for layout in LAYOUTS}
    command = [sys.executable, "-m", "tests.serving.fake_engine", "--port=0", f"--delay={DELAY}", *flags]
    with tempfile.TemporaryDirectory() as folder:
        process = commands.start(command, Path(folder))
        url = process.stdout.readline().split(" at ")[1].split(";")[0]
        actual = {
            title: outcome(each, name, browser, url, layout, screenshots) for title, (each, layout) in runs.items()
        }
        process.terminate()
        process.wait(20)
    for title, result in actual.items():
        print(f"{name}: {title.replace('_', ' ')}: {result}", flush=True)
    return actual


def is_mistake(message: Any) -> bool:
    """Whether a console message tells of a mistake of the page; the browser itself reports responses with an error."""
    return message.type in ("error", "warning") and not message.text.startswith("Failed to load resource")


def outcome(
    check: Check,
    server: str,
    browser: Any,
    url: str,
    layout: tuple[str, str],
    screenshots: Path | None,
) -> str:
    """Returns "passed", or why a check fails on a new page of this width and color scheme."""
    width, height = WIDTHS[layout[0]]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=layout[1])
    mistakes: list[str] = []
    page.on("pageerror", lambda error: mistakes.append(str(error)))
    page.on("console", lambda message: mistakes.append(message.text) if is_mistake(message) else None)
    page.on("dialog", lambda dialog: mistakes.append(dialog.message))
    page.on("request", lambda request: None if request.url.startswith(url) else mistakes.append(request.url))
    page.goto(url)
    page.locator(":is(#facts, #error):not(:empty)").first.wait_for()
    try:
        check(page, "--family=seq2seq" in SERVERS[server].flags)
        assert not mistakes, mistakes
        result = "passed"
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    if screenshots:
        page.screenshot(path=screenshots / f"{server}_{check.__name__}_{'_'.join(layout)}.png", full_page=True)
    page.close()
    return result


if __name__ == "__main__":
    main()
