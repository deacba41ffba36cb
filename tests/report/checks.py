"""What a reader does with a report, a page of attention or the page of explanations, in a browser."""

import csv
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS, HEADS = 10_000, 3
"""Of the long report, and of each layer of the page of attention."""
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
SECTIONS = ("curves", "evaluation", "outputs", "events", "config", "environment", "parameters", "files")
CONTRAST = """() => {
  const parse = (text) => {  // rgb(...), or color(srgb ...) of a mixture, from 0 to 1
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    const unit = text.startsWith("color") ? 255 : 1;
    return { r: r * unit, g: g * unit, b: b * unit, a };
  };
  const mix = (top, under, c) => top.a * top[c] + (1 - top.a) * under[c];
  const over = (top, under) => Object.fromEntries(["r", "g", "b"].map((c) => [c, mix(top, under, c)]));
  const light = (color) => ["r", "g", "b"].map((c) => color[c] / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, index) => sum + v * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (node) => {
    if (!node) return { r: 255, g: 255, b: 255 };
    return over(parse(getComputedStyle(node).backgroundColor), behind(node.parentElement));
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.checkVisibility() || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(node.tagName)) continue;
    const style = getComputedStyle(node);
    const under = behind(node);
    const front = over(parse(node instanceof SVGElement ? style.fill : style.color), under);
    const [high, low] = [light(front), light(under)].sort((a, b) => b - a);
    found.push([(high + 0.05) / (low + 0.05), node.tagName, node.textContent.trim().slice(0, 30)]);
  }
  return found.sort((a, b) => a[0] - b[0])[0];
}"""
"""Returns the lowest contrast of a text with what is behind it (WCAG 2), and the text."""


def until(page: Any, condition: str) -> None:
    """Waits until a condition in JavaScript holds; the page's policy forbids Playwright's own way, `eval`."""
    end = time.monotonic() + 20
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        time.sleep(0.05)


def all_parts_are_there(page: Any) -> None:
    for name in SECTIONS:
        assert page.locator(f"section#{name} h2").is_visible(), name
    for text in ("BLEU", "spike", "encoder/layers_*/ffn", "AMD EPYC"):
        assert page.get_by_text(text, exact=True).first.is_visible(), text
    for group in ("Worst", "Random", "Best"):
        assert page.locator("summary", has_text=group).is_visible(), group
    assert page.locator("mark.missing").count() > 5 < page.locator("mark.extra").count()


def every_chart_is_drawn_when_it_is_seen(page: Any) -> None:
    plots = page.locator(".plot")
    assert plots.count() >= 8
    for plot in plots.all():
        plot.scroll_into_view_if_needed()
        plot.locator(".scatterlayer .trace").first.wait_for(state="attached", timeout=20_000)
    empty = page.evaluate("charts.filter((c) => !at(`chart-${c.key}`).querySelector('.trace path')).map((c) => c.key)")
    assert empty == []


def the_page_fits_its_width(page: Any) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def texts_have_contrast(page: Any) -> None:
    for details in page.locator("details").all():
        details.evaluate("(one) => { one.open = true; }")
    for plot in page.locator(".plot").all():
        plot.scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    ratio, *where = page.evaluate(CONTRAST)
    assert ratio >= 4.5, (ratio, where)


def every_control_is_reached_by_keyboard(page: Any) -> None:
    wanted = page.evaluate(
        """[...document.querySelectorAll("a[href], button, input, summary, [tabindex='0']")]
        .filter((one) => one.checkVisibility() && !(one.type === "radio" && !one.checked)).length"""
    )
    page.locator("body").press("Home")
    seen = set()
    for _ in range(wanted):
        page.keyboard.press("Tab")
        place, outlined = page.evaluate(
            """() => {
              const one = document.activeElement;
              const shown = one.type === "radio" ? one.nextElementSibling : one;
              const place = [...document.querySelectorAll("*")].indexOf(one);
              return [place, getComputedStyle(shown).outlineStyle !== "none"];
            }"""
        )
        assert outlined, page.evaluate("document.activeElement.outerHTML.slice(0, 80)")
        seen.add(place)
    assert len(seen) == wanted


def the_link_of_the_section_in_view_is_marked(page: Any) -> None:
    marked = "document.querySelector('nav.page a[aria-current]')?.hash"
    page.evaluate("root.style.scrollBehavior = 'auto'")
    for share, name in ((0.5, "curves"), (0.15, "evaluation"), (0.25, "curves")):
        page.evaluate(f"scrollBy(0, at('evaluation').getBoundingClientRect().top - {share} * innerHeight)")
        until(page, f"{marked} === '#{name}'")


def keys_zoom_all_curves(page: Any) -> None:
    def ranges() -> list[list[float]]:
        return [page.evaluate(f"at('chart-{key}').layout.xaxis.range") for key in ("loss", "learning_rate")]

    for key in ("learning_rate", "loss"):
        page.locator(f"#chart-{key}").focus()
        until(page, f"drawn.has('{key}') && at('chart-{key}').layout")
    whole = ranges()
    page.locator("#chart-loss").press("+")
    closer = ranges()
    assert all(near[0] > far[0] and near[1] < far[1] for near, far in zip(closer, whole, strict=True))
    page.locator("#chart-loss").press("ArrowRight")
    assert all(moved[0] > near[0] for moved, near in zip(ranges(), closer, strict=True))
    page.locator("#chart-loss").press("0")
    assert ranges() == whole


def a_drag_zooms(page: Any) -> None:
    plot = page.locator("#chart-loss")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 62, steps=4)
    page.mouse.up()
    until(page, "view.range !== null")
    low, high = page.evaluate("at('chart-learning_rate').layout.xaxis.range")
    assert STEPS * 0.2 < low < high < STEPS * 0.8


def axes_and_smoothing_are_right(page: Any) -> None:
    first = "at('chart-loss').data[0]"
    assert page.evaluate(f"{first}.x.at(-1)") == STEPS
    page.get_by_label("Tokens", exact=True).check()
    until(page, f"{first}.x.at(-1) === {900 * STEPS}")
    page.get_by_label("Time", exact=True).check()
    until(page, f"Math.abs({first}.x.at(-1) - {STEPS / 4 / 60}) < 1e-6")
    assert page.evaluate("smooth([4, null, 8, 0], 0.5)") == [4, None, (0.5 * 2 + 0.5 * 8) / 0.75, 2.5 / 0.875]
    before = page.evaluate("at('chart-loss').data.length")
    page.locator("#smoothing").press("End")
    until(page, f"at('chart-loss').data.length === {before + 1}")


def axes_show_no_negative_values_of_other_metrics(page: Any) -> None:
    """Regression test: the axis of a metric that is always 0 went from -1 to 1."""
    below_zero = """() => charts.filter((chart) => drawn.has(chart.key) && !chart.log
      && !chart.traces.some((trace) => trace.y.some((value) => value < 0))
      && at(`chart-${chart.key}`)._fullLayout.yaxis.range[0] < 0).map(({ key }) => key)"""
    assert page.evaluate(below_zero) == []


def constants_are_within_their_axis(page: Any) -> None:
    """Regression test: a constant learning rate of 2e-5 was drawn at the zero of an axis up to 1."""
    far = """() => charts.filter((chart) => drawn.has(chart.key) && !chart.log).filter((chart) => {
      const values = chart.traces.flatMap((trace) => trace.y).filter((value) => value !== null);
      return values[0] > 0 && values.every((value) => value === values[0])
        && at(`chart-${chart.key}`)._fullLayout.yaxis.range[1] > 3 * values[0];
    }).map(({ key }) => key)"""
    assert page.evaluate(far) == []


def small_numbers_have_no_prefix(page: Any) -> None:
    """Regression test: a learning rate of 1e-5 was shown as 10µ."""
    ticks = page.locator(".plot .ytick text").all_text_contents()
    assert ticks and not any(text.endswith(("\u03bc", "\u00b5", "m", "n")) for text in ticks), ticks


def the_theme_switches(page: Any) -> None:
    color = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(color)
    page.locator("#theme").press("Enter")
    assert page.evaluate(color) != before
    page.locator("#theme").press("Enter")
    assert page.evaluate(color) == before


def downloads_hold_all_records(page: Any) -> None:
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Train metrics").press("Enter")
    rows = list(csv.DictReader(io.StringIO(Path(waiting.value.path()).read_text(encoding="utf-8"))))
    assert waiting.value.suggested_filename == "run_train.csv"
    assert len(rows) == STEPS
    assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))


def _paper_can_be_read(page: Any) -> None:
    assert page.evaluate("[...document.querySelectorAll('details')].every((one) => one.open)")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    until(page, f"({CONTRAST})()[0] >= 4.5")
    until(page, "[...document.querySelectorAll('.main-svg')].every((one) => one.clientWidth <= 680)")


def paper_is_light_and_open(page: Any) -> None:
    page.emulate_media(media="print")
    until(page, "root.dataset.printing === 'yes'")
    until(page, "drawn.size === charts.length")
    assert not page.locator(".controls").is_visible() and not page.locator("nav.page").is_visible()
    _paper_can_be_read(page)
    page.emulate_media(media="screen")
    until(page, "root.dataset.printing === 'no'")
    assert page.locator(".controls").is_visible()


CHECKS: tuple[Callable[[Any], None], ...] = (
    all_parts_are_there,
    every_chart_is_drawn_when_it_is_seen,
    the_page_fits_its_width,
    texts_have_contrast,
    every_control_is_reached_by_keyboard,
    the_link_of_the_section_in_view_is_marked,
    keys_zoom_all_curves,
    a_drag_zooms,
    axes_and_smoothing_are_right,
    the_theme_switches,
    downloads_hold_all_records,
    paper_is_light_and_open,
)


def maps_show_the_chosen_head(page: Any) -> None:
    for kind in ("encoder", "decoder", "cross"):
        page.locator(f"#map-{kind}").scroll_into_view_if_needed()
        page.locator(f"#map-{kind} .heatmaplayer image").wait_for(state="attached", timeout=20_000)
    shown = "at('map-decoder').data[0].z"
    assert page.evaluate(f"{shown}[0][1]") is None
    mean = page.evaluate(shown)
    page.locator("#decoder-layer").select_option("0")
    page.locator("#decoder-head").select_option("1")
    until(page, f"{shown}[1][0] !== {mean[1][0]}")
    assert abs(sum(weight or 0 for weight in page.evaluate(shown)[2]) - 1) < 1e-3


def all_heads_open(page: Any) -> None:
    page.locator("#cross summary", has_text="All heads").click()
    place = page.locator("#heads-cross-1")
    place.scroll_into_view_if_needed()
    until(page, f"document.querySelectorAll('#heads-cross-1 .heatmaplayer image').length === {HEADS}")
    place.locator(".nsewdrag").nth(2).click()
    until(page, "at('cross-layer').value === '1' && at('cross-head').value === '2'")


def paper_has_all_maps(page: Any) -> None:
    page.locator("#decoder-layer").select_option("0")
    page.emulate_media(media="print")
    until(page, "root.dataset.printing === 'yes'")
    until(page, "[...document.querySelectorAll('.map, .heads, .norms')].every((one) => one.querySelector('image'))")
    _paper_can_be_read(page)
    assert page.locator("#decoder-layer").is_visible() and page.locator("#decoder-layer").input_value() == "0"
    page.emulate_media(media="screen")
    until(page, "root.dataset.printing === 'no'")
    assert not page.evaluate("[...document.querySelectorAll('details')].some((one) => one.open)")
    until(page, "document.documentElement.scrollWidth <= innerWidth && at('map-cross').clientWidth > 0.8 * innerWidth")


ATTENTION = (
    maps_show_the_chosen_head,
    all_heads_open,
    paper_has_all_maps,
    the_page_fits_its_width,
    texts_have_contrast,
)


def pictures_are_drawn_when_they_are_seen(page: Any) -> None:
    figures = page.locator(".figure")
    assert figures.count() > 40
    for figure in figures.all():
        figure.scroll_into_view_if_needed()
        figure.locator(".heatmaplayer image, .scatterlayer .trace").first.wait_for(state="attached", timeout=20_000)
    assert page.locator(".formula math").count() > 20


def paper_has_all_pictures(page: Any) -> None:
    page.emulate_media(media="print")
    until(page, "root.dataset.printing === 'yes' && drawn.size === figures.length")
    _paper_can_be_read(page)
    assert not page.locator(".numbers").first.is_visible()


EXPLAIN = (
    pictures_are_drawn_when_they_are_seen,
    paper_has_all_pictures,
    the_page_fits_its_width,
    texts_have_contrast,
    every_control_is_reached_by_keyboard,
    the_theme_switches,
)


def choices_survive_a_reload(page: Any) -> None:
    shown = "[view.axis, view.smoothing, root.dataset.theme, at('smoothing').value, at('smoothing-value').textContent]"
    with page.expect_navigation(timeout=60_000):
        page.get_by_label("Tokens", exact=True).check()
        page.locator("#smoothing").press("End")
        page.locator("#theme").press("Enter")
        chosen = page.evaluate(shown)
    page.locator("html[data-drawn]").wait_for(state="attached")
    assert page.evaluate(shown) == chosen
    assert page.get_by_label("Tokens", exact=True).is_checked()


WATCHED = (choices_survive_a_reload,)
QUICK = (
    every_chart_is_drawn_when_it_is_seen,
    axes_show_no_negative_values_of_other_metrics,
    constants_are_within_their_axis,
    small_numbers_have_no_prefix,
    the_page_fits_its_width,
    texts_have_contrast,
)
"""Checks of the other reports."""
