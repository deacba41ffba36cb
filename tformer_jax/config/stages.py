"""Stages of training: texts such as `general 4, domain 1 until step 2000`, each a mixture and where it ends."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tformer_jax.config.fields import nearest

STAGE = re.compile(
    r"(?P<previous>linearly to +)?(?P<mixture>.+?)(?: +with +(?P<with>.+?)|(?P<without> +without +transforms))?"
    r"(?: +until +step +(?P<step>\S+)| +for +(?P<tokens>\S+) +tokens?"
    r"| +for +(?P<epochs>\S+) +epochs? +of +(?P<source>.+))?"
)
WEIGHT = re.compile(r"(?P<name>.+?)(?: +(?P<begin>[\d.]\S*)(?: +to +(?P<end>[\d.]\S*))?)?")
TEMPERATURE = "temperature"
FORMS = (
    "write a mixture such as 'general 4, domain 1', 'general 4 to 1, domain 0 to 3', 'linearly to domain 1' or "
    "'temperature 5', perhaps 'with typos, case' or 'without transforms', followed by 'until step 2000', 'for 5000000 "
    "tokens' or 'for 2 epochs of domain'"
)


class Weight(NamedTuple):
    """The weight of a source at the beginning and at the end of a stage."""

    name: str
    begin: float
    end: float


class End(NamedTuple):
    """Where a stage ends."""

    unit: str
    """"step" (of training), "tokens" (in the stage) or "epochs" (of `source`, in the stage)."""
    number: float
    source: str = ""


class Stage(NamedTuple):
    """A mixture of sources, and where it ends."""

    text: str
    weights: tuple[Weight, ...]
    """Weights by source; or one entry named `TEMPERATURE`, whose numbers are temperatures."""
    from_previous: bool
    """Whether weights change linearly from the weights at the end of the previous stage."""
    end: End | None
    """None: at the end of training."""
    transforms: tuple[str, ...] | None
    """Kinds of the entries of `data.transforms` that change its examples; None: all."""

    @classmethod
    def parse(cls, text: str) -> "Stage":
        """Reads a text such as `general 4, domain 1 until step 2000`.

        Raises:
            ValueError: it has another form or an invalid number, or its weights or its end make no sense.
        """
        parts = STAGE.fullmatch(text.strip())
        if parts is None:
            raise ValueError(FORMS)
        weights = tuple(map(_read_weight, parts["mixture"].split(",")))
        end = next((End(unit, _read_number(parts[unit])) for unit in ("step", "tokens", "epochs") if parts[unit]), None)
        if end is not None and parts["source"]:
            end = end._replace(source=parts["source"].strip())
        chosen = tuple(name.strip() for name in (parts["with"] or "").split(",") if name.strip())
        transforms = chosen if parts["with"] or parts["without"] else None
        stage = cls(text, weights, bool(parts["previous"]), end, transforms)
        stage._check()
        return stage

    @property
    def by_temperature(self) -> bool:
        """Whether sources are weighted by their sizes and a temperature."""
        return self.weights[0].name == TEMPERATURE

    @property
    def is_linear(self) -> bool:
        """Whether weights change within the stage."""
        return self.from_previous or any(weight.begin != weight.end for weight in self.weights)

    def _check(self) -> None:
        names = [weight.name for weight in self.weights]
        if TEMPERATURE in names and (len(names) > 1 or min(self.weights[0][1:]) < 1):
            raise ValueError("a temperature is at least 1 and stands alone: write 'temperature 5'")
        for weight in self.weights:
            if names.count(weight.name) > 1:
                raise ValueError(f"{weight.name!r} occurs twice: write it once")
            if weight.begin == weight.end == 0:
                raise ValueError(f"{weight.name!r} has weight 0: leave it out, or write 'to' another weight")
            if self.from_previous and weight.begin != weight.end:
                raise ValueError("'linearly to' begins with the previous weights: write each weight without 'to'")
        if not any(weight.begin for weight in self.weights) or not any(weight.end for weight in self.weights):
            raise ValueError("all weights are 0 at the beginning or at the end: write one above 0")
        if self.end is None:
            return
        if self.end.number <= 0 or (self.end.unit != "epochs" and self.end.number % 1):
            whole = "a number above 0" if self.end.unit == "epochs" else "a whole number above 0"
            raise ValueError(f"the number of {self.end.unit} is {self.end.number:g}: write {whole}")


def _read_weight(text: str) -> Weight:
    parts = WEIGHT.fullmatch(text.strip())
    if parts is None:
        raise ValueError(f"a weight has no source: {FORMS}")
    begin = _read_number(parts["begin"] or "1")
    return Weight(parts["name"], begin, begin if parts["end"] is None else _read_number(parts["end"]))


def _read_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number: {FORMS}") from None


def find_source(name: str, names: Sequence[str]) -> int:
    """Returns the index of a source by its full name or, if unique, its file name up to the first dot.

    A source is a direction or an entry of `data.train`.

    Raises:
        ValueError: there is no such source; the message names the nearest.
    """
    short = [each.rpartition("/")[2].partition(".")[0] for each in names]
    if name in names:
        return list(names).index(name)
    if short.count(name) == 1:
        return short.index(name)
    if name in short:
        alike = " and ".join(repr(each) for each, part in zip(names, short, strict=True) if part == name)
        raise ValueError(f"{name!r} may be {alike}: write one of these")
    unique = [part for part in short if part and short.count(part) == 1]
    raise ValueError(f"unknown source {name!r}{nearest(name, dict.fromkeys([*unique, *names]))}")


def read_stages(data: Any) -> tuple[Stage, ...]:
    """Returns the stages of `data.stages`."""
    return tuple(map(Stage.parse, data.stages))


def check_stages(data: Any) -> None:
    """Raises `ConfigError` for stages that make no sense, or do not fit other settings."""
    if data.weights or data.temperature != 1 or data.upsampling is not None:
        problem = "have their weights and temperatures; leave out data.weights, temperature and upsampling"
        raise data.error("stages", problem)
    names = [str(direction) for direction in data.wanted_directions] if data.multilingual else data.train
    last_step = 0
    for number, text in enumerate(data.stages):
        try:
            stage = Stage.parse(text)
            for problem in (*_problems(data, stage, number, last_step), *_problems_of_sources(stage, names)):
                raise ValueError(problem)
        except ValueError as error:
            raise data.error("stages", f"stage {number + 1}, {text!r}: {error}") from None
        last_step = int(stage.end.number) if stage.end and stage.end.unit == "step" else last_step


def _problems_of_sources(stage: Stage, names: Sequence[str]) -> Iterator[str]:
    """Yields what is wrong with the sources of a stage, if their `names` are known; raises `ValueError` for others."""
    if not names:
        return
    drawn = {find_source(weight.name, names) for weight in stage.weights if not stage.by_temperature}
    source = stage.end.source if stage.end else ""
    if source and find_source(source, names) not in drawn and not (stage.by_temperature or stage.from_previous):
        yield f"it draws nothing from {source!r}; write one of its sources"


def _problems(data: Any, stage: Stage, number: int, last_step: int) -> Iterator[str]:
    """Yields what is wrong with a stage; the stages before it end at step `last_step` or later."""
    is_last, end = number == len(data.stages) - 1, stage.end
    kinds_of_transforms = [transform.kind for transform in data.transforms]
    if not kinds_of_transforms and stage.transforms is not None:
        yield "data.transforms is empty: list the transforms of all stages there"
    for name in stage.transforms or ():
        if name not in kinds_of_transforms:
            yield f"data.transforms has no {name!r}{nearest(name, kinds_of_transforms)}"
    if stage.from_previous and not number:
        yield "there is no previous stage; write the weights at the beginning, as in 'general 4 to 1'"
    if is_last and stage.is_linear:
        yield "the last stage has no end, so that its weights cannot change: add a stage with the weights at its end"
    if is_last and end is not None:
        yield "the last stage lasts until train.steps: leave out its end"
    if not is_last and end is None:
        yield "only the last stage has no end: write 'until step', 'for ... tokens' or 'for ... epochs of'"
    if end is not None and end.unit == "step" and end.number <= last_step:
        yield f"it ends before it begins, after step {last_step}"
    if end is not None and end.unit == "tokens" and end.number < data.tokens_per_batch:
        yield f"a batch has up to {data.tokens_per_batch:,} tokens; write at least as many"


def step_range(after: int, last: int | None) -> str:
    """Returns the steps from `after` to `last` as text; None: the stage is not reached."""
    if last is None:
        return "not reached"
    return f"steps {after + 1:,} to {last:,}" if after + 1 < last else f"step {max(after + 1, last):,}"
