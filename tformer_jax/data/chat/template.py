"""Chat templates: Jinja programs that write a conversation as one text, as in transformers.

They run in the sandbox of jinja2, with the variables, filters and functions of transformers. Special tokens that a
message spells are marked while the template runs, so that they stay ordinary text.
"""

import dataclasses
import datetime
import functools
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tformer_jax.base.checks import import_extra
from tformer_jax.base.errors import UserError, first_line
from tformer_jax.base.json_files import read_json
from tformer_jax.data.chat.messages import MARKS, Chat

PLAIN = """\
{% if tools %}
{{ raise_exception('it has no place for tools') }}
{% endif %}
{% for message in messages %}
{% if message['content'] is not defined or message['content'] is none %}
{{ raise_exception('it has no place for a message without content') }}
{% endif %}
{% if message['role'] == 'assistant' %}
Assistant:
{% generation %}
{{ message['content'] }}{{ eos_token }}{% endgeneration %}

{% else %}
{{ message['role'] | capitalize }}:
{{ message['content'] }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ 'Assistant:\\n' }}
{%- endif %}"""
"""The template of a tokenizer that has none."""
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
SPELLED, START, END, UNUSED = MARKS[:4]
"""Marks within a spelled special token, around what `{% generation %}` encloses, and in place of a content."""
TEMPLATE_FILE = "chat_template.jinja"
FILES = (TEMPLATE_FILE, "tokenizer_config.json")
"""Files of a checkpoint that may have its template; the first one is read."""


class Rendered(NamedTuple):
    """A conversation as a text."""

    text: str
    """With `SPELLED` after the first character of each special token that a message spells."""
    spans: tuple[tuple[int, int], ...] = ()
    """Start and end of each text that `{% generation %}` encloses."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A template, and the names of special tokens that it may write."""

    text: str
    tokens: tuple[tuple[str, str], ...] = ()
    """Names of special tokens by the variable, such as `eos_token`."""
    date: str = ""
    """What `strftime_now` takes for today, so that a conversation is always the same text; "": it is not called."""

    @classmethod
    def make(cls, text: str, tokens: Mapping[str, str]) -> "ChatTemplate":
        """Returns a template that is written today; it is compiled when it is used."""
        date = datetime.date.today().isoformat() if "strftime_now" in text else ""
        return cls(text, tuple(sorted(tokens.items())), date)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ChatTemplate":
        """Restores a template from its fields."""
        return cls(values["text"], tuple((name, token) for name, token in values["tokens"]), values["date"])

    @property
    def has_spans(self) -> bool:
        """Whether the template says with `{% generation %}` what the assistant writes."""
        return GENERATION.search(self.text) is not None

    def render(self, chat: Chat, spelled: re.Pattern[str], *, prompt: bool = False) -> Rendered:
        """Writes a conversation as a text.

        Args:
            spelled: matches the names of special tokens.
            prompt: end with the beginning of an answer.

        Raises:
            UserError: the template is not valid or refuses the conversation, or jinja2 is not installed.
        """
        try:
            return self._render(chat, spelled, prompt)
        except UserError:
            written = chat.with_written_arguments()
            if written == chat:
                raise
        return self._render(written, spelled, prompt)  # some templates join the arguments of calls with texts

    def _render(self, chat: Chat, spelled: re.Pattern[str], prompt: bool) -> Rendered:
        given = {"messages": list(chat.messages), "tools": chat.tools}
        variables = _mark(given, spelled) | {"documents": None, "add_generation_prompt": prompt}
        today = datetime.date.fromisoformat(self.date or "2000-01-01")
        program = _compile(self.text)
        try:
            raw = program.render(variables | dict(self.tokens), strftime_now=today.strftime)
        except Exception as error:  # a template is a program, which may fail in any way
            raise UserError(f"the chat template refuses the conversation: {first_line(error, 200)}") from error
        return _without_marks(raw)


def read_template(path: Path) -> str:
    """Returns the template in a file of Jinja, in a tokenizer_config.json, or in the folder of a checkpoint.

    Raises:
        UserError: there is none.
    """
    if path.is_dir():
        path = next((path / name for name in FILES if (path / name).is_file()), path / FILES[0])
    if not path.is_file():
        raise UserError(f"data.chat_template: {path} does not exist")
    try:
        is_json = path.suffix == ".json"
        text = default_template(read_json(path).get("chat_template")) if is_json else path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"data.chat_template: {path} is not UTF-8: save it as UTF-8") from None
    if not text:
        raise UserError(f"data.chat_template: {path} has no template")
    return text


def default_template(value: Any) -> str | None:
    """Returns the template in the field of tokenizer_config.json, which may list several by name; None: none is it."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) and value else None


def _mark(value: Any, spelled: re.Pattern[str]) -> Any:
    """Returns a JSON value whose texts have `SPELLED` within the special tokens that they spell.

    Names of fields are such texts, too, unless they are identifiers, by which templates read fields.
    """
    if isinstance(value, str):
        return spelled.sub(lambda match: match[0][0] + SPELLED + match[0][1:], value)
    if isinstance(value, Mapping):
        names = (name if str(name).isidentifier() else _mark(name, spelled) for name in value)
        return dict(zip(names, (_mark(part, spelled) for part in value.values()), strict=True))
    return [_mark(part, spelled) for part in value] if isinstance(value, list) else value


def _without_marks(raw: str) -> Rendered:
    """Returns a text without `START` and `END`, and their places."""
    parts = re.split(f"[{START}{END}]", raw)
    ends = list(itertools.accumulate(map(len, parts), initial=0))
    return Rendered("".join(parts), tuple(zip(ends[1:-1:2], ends[2:-1:2], strict=True)))


@functools.lru_cache(maxsize=16)
def _compile(text: str) -> Any:
    """Compiles a template as transformers does, but for its marks."""
    jinja2 = import_extra("a chat template", "jinja2", "chat")
    sandbox, ext = (import_extra("a chat template", f"jinja2.{name}", "chat") for name in ("sandbox", "ext"))

    class Generation(ext.Extension):  # type: ignore[name-defined]
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("enclose"), [], [], body).set_lineno(line)

        def enclose(self, caller: Any) -> str:
            return f"{START}{caller()}{END}"

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    try:
        return environment.from_string(text)
    except jinja2.exceptions.TemplateSyntaxError as error:
        raise UserError(f"the chat template is not valid in line {error.lineno}: {error.message}") from error
