"""The README.md of an exported folder: a model card with the languages, data and scores that the run's folder records.

https://huggingface.co/docs/hub/model-cards describes the fields before its text.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

import tformer_jax as tj
from tformer_jax.base.numbers import counted
from tformer_jax.config.task import task_of
from tformer_jax.data.tokenizers.huggingface import CHECKPOINT
from tformer_jax.data.tokenizers.language_tags import tagged_language
from tformer_jax.inference.languages import own_direction
from tformer_jax.interop import generation
from tformer_jax.report import sections
from tformer_jax.report.run import RunFiles, load_all
from tformer_jax.runs import run_folder
from tformer_jax.runs.weights import UNTRAINED

UNKNOWN = "unknown"
PIPELINES = {
    "translate": "translation",
    "generate": "text-generation",
    "classify": "text-classification",
    "fill_mask": "fill-mask",
}
"""The hub's names of what a model does, by the verb of its task."""
LIBRARIES = {"huggingface": "transformers", "ctranslate2": "ctranslate2", "peft": "peft"}
"""The hub's names of libraries, by the format of an export."""
TEXT = "TEXT"
"""What stands for a text in programs."""
TRANSFORMERS = """from transformers import {auto}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{base}")
model = {auto}.from_pretrained("{base}")
{adapter}"""
LANGUAGE = """tokenizer.src_lang = {language}
"""
INPUTS = """inputs = tokenizer({text}, return_tensors="pt")
"""
TAGGED_INPUTS = """tags = tokenizer.convert_tokens_to_ids({source})
inputs = {{"input_ids": torch.tensor([tags + tokenizer("TEXT")["input_ids"]])}}
"""
TAGGED_OUTPUTS = """start = [model.config.decoder_start_token_id, *tokenizer.convert_tokens_to_ids({target})]
inputs["decoder_input_ids"] = torch.tensor([start])
"""
OWN_OUTPUTS = ", {setting}=tokenizer.convert_tokens_to_ids({target})"
ADAPTER = """model = PeftModel.from_pretrained(model, "{folder}")
"""
GENERATION = """output = model.generate(**inputs{options})[0]
print(tokenizer.decode(output, skip_special_tokens=True))
"""
CTRANSLATE2 = """import ctranslate2
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{folder}")
{language}model = ctranslate2.{kind}("{folder}")
tokens = {tags}tokenizer.convert_ids_to_tokens(tokenizer({text})["input_ids"])
output = model.{method}([tokens], {options})[0].{field}[0]
print(tokenizer.decode(tokenizer.convert_tokens_to_ids(output), skip_special_tokens=True))
"""


def write(
    folder: Path,
    name: str,
    run: tj.Run,
    origin: dict[str, Any],
    *,
    auto: str,
    kind: str,
    base: str = "",
    license_name: str | None = None,
    adds_tags: bool = False,
    quantization: str | None = None,
) -> None:
    """Writes README.md to a folder.

    Args:
        name: final name of the folder.
        origin: `imported.json` of the run, or {}.
        auto: class of transformers that loads the model.
        kind: format of the export, a key of `LIBRARIES`.
        base: name or folder of the checkpoint that an adapter changes.
        license_name: identifier of the licence on the hub; None: it is not known.
        adds_tags: whether the tokenizer of transformers adds language tags to texts.
        quantization: type to which the weights were rounded.
    """
    (loaded,) = load_all([run.path])
    languages, named = _languages(run), base if kind == "peft" else str(origin.get("checkpoint", ""))
    fields = {
        "language": sorted({re.split("[_-]", name)[0] for name in languages}),
        "license": license_name or UNKNOWN,
        "library_name": LIBRARIES[kind],
        "pipeline_tag": PIPELINES.get(task_of(run.config).verb or "", ""),
        "base_model": "" if Path(named).is_absolute() else named,
    }
    head = [f"{name}: {json.dumps(value)}" for name, value in fields.items() if value]
    facts = _facts(run, loaded, origin, license_name)
    if quantization:
        facts["Weights"] = f"rounded to {quantization} after training; scores are of the weights before that"
    parts = [
        "\n".join(("---", *head, "---")),
        f"# {run.config.name}",
        _table(("", ""), facts.items()),
        *(_scores(loaded) if run.step is None else ()),
        f"## Use\n\n```python\n{_program(name, run, auto, kind, base, adds_tags=adds_tags)}```",
        _provenance(run, loaded, origin),
    ]
    (folder / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _languages(run: tj.Run) -> list[str]:
    """Returns the languages of a translator; [] for other models, and if its settings do not say."""
    if not task_of(run.config).pairs:
        return []
    if own := own_direction(run.config.data):
        return [own.source, own.target]
    return list(dict.fromkeys((*run.languages.sources, *run.languages.targets)))


def _facts(run: tj.Run, loaded: RunFiles, origin: dict[str, Any], license_name: str | None) -> dict[str, str]:
    cfg, model = run.config, run.config.model
    sizes = {name: loaded.corpus.get(f"the number of {name} examples") for name in ("train", "validation", "test")}
    shown = [f"{size:,} {name}" for name, size in sizes.items() if isinstance(size, int) and size > 0]
    own, languages = own_direction(cfg.data), _languages(run)
    facts = {
        "Languages": f"{own.source} to {own.target}" if own else ", ".join(languages),
        "Labels": ", ".join(run.labels or ()),
        "Parameters": f"{sum(leaf.size for leaf in jax.tree.leaves(run.params)):,}",
        "Layers": " + ".join(map(str, model.depths)),
        "Width": f"{model.dim:,}",
        "Vocabulary": f"{model.vocab_size:,} tokens",
        "Longest text": f"{model.max_length:,} tokens",
        "Checkpoint it was imported from": Path(str(origin.get("checkpoint", ""))).name if origin else "",
        "Adapter in it": Path(str(origin.get("adapter", ""))).name,
        "Started from": Path(cfg.train.start_from).name if cfg.train.start_from else "",
        "Data": f"`{cfg.data.source}`" + (f": {', '.join(shown)} examples" if shown else ""),
        "Training": ", ".join(_training(loaded, run.step)),
        "Licence": license_name or "unknown: it depends on the licences of the data and of the initial weights",
    }
    if run_folder.weights_of(run.path, run.step)["kind"] in UNTRAINED:
        del facts["Data"], facts["Training"]
    return {name: text for name, text in facts.items() if text}


def _training(loaded: RunFiles, step: int | None) -> list[str]:
    """Returns steps, tokens and seed, as far as they are recorded up to `step` or the end."""
    facts = sections.facts(loaded)
    texts = {
        "steps": f"{loaded.step if step is None else step:,} of {counted(loaded.config['train.steps'], 'step')}",
        "tokens": f"{facts['tokens']} tokens" if step is None else sections.ABSENT,
        "seed": f"seed {facts['seed']}",
    }
    return [text for name, text in texts.items() if sections.ABSENT not in (facts[name], text)]


def _scores(loaded: RunFiles) -> list[str]:
    """Returns the section with the metrics of both splits and their signatures; [] without metrics."""
    rows = []
    for title, (row, *_) in sections.metric_rows([loaded]).items():
        values = (row.validation if row.saved is None else row.saved, row.test)
        rows.append((title, *(sections.format_metric(value, row.name) for value in values)))
    if not rows:
        return []
    signatures = [f"{name}: `{text}`" for name, texts in sections.signatures([loaded]).items() for text in texts]
    return ["\n\n".join(("## Scores", _table(("", "validation", "test"), rows), *signatures))]


def _program(folder: str, run: tj.Run, auto: str, kind: str, base: str, *, adds_tags: bool = False) -> str:
    """Returns a Python program that uses the exported folder."""
    tags = _tags(run, adds_tags=adds_tags)
    if kind == "ctranslate2":
        return _converted_program(folder, run, tags)
    adapter = ADAPTER.format(folder=folder) if kind == "peft" else ""
    text = TRANSFORMERS.format(base=base if adapter else folder, auto=auto, adapter=adapter)
    inputs, options = _inputs(tags)
    options += ", tokenizer=tokenizer" if run.config.decode.stop else ""
    result = GENERATION.format(options=options) if run.config.model.model_class.decodes else "print(model(**inputs))\n"
    imports = ("import torch\n" if "torch." in inputs else "") + ("from peft import PeftModel\n" if adapter else "")
    return f"{imports}{text}{inputs}{result}"


def _inputs(tags: "Tags") -> tuple[str, str]:
    """Returns the lines of a program that make its inputs, and the arguments of `generate` that name a language."""
    if tags.source is not None:
        lines = TAGGED_INPUTS.format(source=json.dumps(tags.source))
    else:
        language = LANGUAGE.format(language=json.dumps(tags.language)) if tags.language else ""
        lines = language + INPUTS.format(text=json.dumps(tags.text, ensure_ascii=False))
    if tags.language and len(tags.target) == 1:
        return lines, OWN_OUTPUTS.format(setting=tags.setting, target=json.dumps(tags.target[0]))
    return lines + (TAGGED_OUTPUTS.format(target=json.dumps(tags.target)) if tags.target else ""), ""


def _converted_program(folder: str, run: tj.Run, tags: "Tags") -> str:
    """Returns a Python program that uses the exported folder in CTranslate2."""
    cfg, target, pair = run.config.decode, run.tokenizers.target, run.config.model.model_class.reads_source
    V = run.config.model.size("vocab_size")
    never = generation.suppressed_fields(target.special, target.vocab_size, V).get("bad_words_ids", [])
    tokens = {token: text for text, token in target.vocabulary()[1].items()} | target.special.name_of
    names = [[tokens[token] for token in word] for word in never]
    longest = cfg.max_new_tokens or run.config.model.max_length
    options: dict[str, Any] = {"beam_size": cfg.width, "max_decoding_length" if pair else "max_length": longest}
    options |= {"length_penalty": cfg.length_alpha} if cfg.width > 1 else {}
    options |= {"min_decoding_length" if pair else "min_length": cfg.min_new_tokens} if cfg.min_new_tokens else {}
    options |= {"repetition_penalty": cfg.repetition_penalty} if cfg.repetition_penalty != 1 else {}
    options |= {"no_repeat_ngram_size": cfg.no_repeat_ngram} if cfg.no_repeat_ngram else {}
    if cfg.strategy == "sample":
        top = {"sampling_topk": cfg.top_k or 0, "sampling_topp": 1.0 if cfg.top_p is None else cfg.top_p}
        options |= {**top, "sampling_temperature": cfg.temperature}
    options |= {"suppress_sequences": names} if names else {}
    options |= {"target_prefix": [tags.target]} if tags.target else {}
    if not pair:
        ends = [tokens[token] for token in target.special.eos]
        options |= {"include_prompt_in_result": False, "end_token": ends}
    return CTRANSLATE2.format(
        folder=folder,
        language=LANGUAGE.format(language=json.dumps(tags.language)) if tags.language else "",
        tags=f"{json.dumps(tags.source)} + " if tags.source else "",
        text=json.dumps(tags.text, ensure_ascii=False),
        kind="Translator" if pair else "Generator",
        method="translate_batch" if pair else "generate_batch",
        field="hypotheses" if pair else "sequences",
        options=", ".join(f"{name}={value!r}" for name, value in options.items()),
    )


class Tags(NamedTuple):
    """The tags of a direction in a program; by default, there are none."""

    source: list[str] | None = None
    """Names of the tags that the program puts before the tokens of a source; None: it puts none."""
    target: Sequence[str] = ()
    """Names of the tags with which an output starts."""
    language: str = ""
    """Language whose tag the tokenizer of transformers adds to a source; "": it adds none."""
    setting: str = "forced_bos_token_id"
    """Setting of transformers for the tag of an output, if `language` is not empty."""
    text: str = TEXT
    """The source, which may start with tags."""


def _tags(run: tj.Run, *, adds_tags: bool) -> Tags:
    """Returns the tags of the first direction; `adds_tags` is as for `write`."""
    if not run.config.data.multilingual:
        return Tags()
    language, targets = run.languages.sources[0], run.languages.targets
    ids = run.languages.tags(next((name for name in targets if name != language), targets[0]), language)
    source, target = run.tokenizers.source, run.tokenizers.target
    read, written = (
        [str(side.special.name(i)) for i in tags] for side, tags in zip((source, target), ids, strict=True)
    )
    if adds_tags and len(read) == 1:
        setting = "decoder_start_token_id" if target.special.tags_last else Tags().setting
        return Tags(target=written, language=tagged_language(read[0]) or "", setting=setting)
    tagged = " ".join((*read, TEXT))
    if source.kind == CHECKPOINT and source.encode(tagged) == [*ids[0], *source.encode(TEXT)]:
        return Tags(target=written, text=tagged)
    return Tags(read, written)


def _provenance(run: tj.Run, loaded: RunFiles, origin: dict[str, Any]) -> str:
    """Returns the section with the command, packages and revision that made the run, and checksums of its origin."""
    made = loaded.provenance
    versions = [f"{name} {version}" for name, version in made.get("packages", {}).items()]
    revision = made.get("git_revision")
    lines = [f"```bash\n{made['command']}\n```"] if "command" in made else []
    lines += [", ".join([*versions, *([f"revision {revision}"] if revision else [])])]
    lines += ["\n".join(f"- SHA-256 of `{name}`: `{digest}`" for name, digest in origin.get("sha256", {}).items())]
    return "\n\n".join(("## How it was made", *filter(None, lines)))


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a table in Markdown."""
    head = tuple(head)
    lines = [head, ("---",) * len(head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
