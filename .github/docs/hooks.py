"""Adds the Markdown files of the repository, a page per module, and the files and folders that pages link to."""

import os
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (".github", "configs", "scripts", "tests", "tformer_jax")
PACKAGE = ROOT / "tformer_jax"
LINK = re.compile(r"(?<=\]\()[^)#\s:]+")


def on_files(files, config):
    """Adds pages, and what they link to."""

    def add(path, **content):
        uri = page_of(path)
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, **(content or {"abs_src_path": str(path)})))

    pages = [*ROOT.glob("*.md"), *(path for name in FOLDERS for path in sorted((ROOT / name).rglob("*.md")))]
    for path in pages:
        add(path)
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        add(path, content=f"---\ntitle: {name.rpartition('.')[2]}\n---\n::: {name}\n")
    targets = ((page.parent / link).resolve() for page in pages for link in LINK.findall(page.read_text("utf-8")))
    for target in filter(Path.exists, targets):
        inside = sorted(target.glob("[!._]*.*")) if target.is_dir() else [target]
        for path in inside:
            add(path)
        if target.is_dir():
            links = "\n".join(f"- [{path.name}]({path.name})" for path in inside)
            add(target, content=f"# {target.relative_to(ROOT)}\n\n{links}\n")
    return files


def on_page_markdown(markdown, page, **_):
    """Replaces links to modules and folders by links to their pages, and lets `<details>` hold Markdown."""
    here = ROOT / os.path.dirname(page.file.src_uri)

    def replaced(match):
        target = (here / match[0]).resolve()
        return os.path.relpath(ROOT / page_of(target), here) if target.exists() else match[0]

    return LINK.sub(replaced, markdown).replace("<details>", '<details markdown="1">')


def page_of(path):
    """Returns the path on the site of a file or folder of the repository."""
    if path.is_dir():
        pages = (path / "README.md", *([path / "__init__.py"] if path.is_relative_to(PACKAGE) else []))
        path = next(filter(Path.exists, pages), path / "index.md")
    if path.suffix == ".py" and path.is_relative_to(PACKAGE):
        name = "api" if path.parent == PACKAGE and path.stem == "__init__" else path.stem.replace("__init__", "index")
        path = path.with_name(f"{name}.md")
    return path.relative_to(ROOT).as_posix()
