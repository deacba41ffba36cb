"""The web page of the server: one file that loads nothing else."""

import importlib.resources


def page() -> str:
    """Returns the page, with its style and script inserted."""
    folder = importlib.resources.files(__package__)
    text, style, script = ((folder / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    return text.replace("/* page.css */", style).replace("/* page.js */", script)
