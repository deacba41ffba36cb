"""Fills the tables of the READMEs from recorded JSON: `python -m tests.programs.readme_tables`.

Sources: `configs/results/*.json` (`--record` of `train.py`, `sweep.py` and `evaluate.py`),
`configs/results/benchmarks/growth.json` and `{train,decode}_CPU.json` there (`scripts/benchmark.py --record`), and
`tests/programs/equivalences.json` (`python -m tests.programs.equivalences`), `tests/programs/families.json`
(`python -m tests.programs.families`), `tests/programs/int8.json` (`python -m tests.programs.int8`) and
`configs/results/benchmarks/quality_*.json` (`python -m tests.programs.quality`). A test compares the READMEs with them.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.programs.many_languages import SYSTEMS
from tests.programs.many_languages import table as languages_table
from tformer_jax.cli.config_file import read_config
from tformer_jax.config import flat
from tformer_jax.lab.benchmarks.growth import HEADINGS, growth_cells
from tformer_jax.report.sweeps import format_mean

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "configs" / "results" / "benchmarks"
SWEEPS = ROOT / "configs" / "results" / "sweeps"
SCORES = "bleu", "chrf"
METRICS = {"bleu": "BLEU", "chrf": "chrF", "exact_match": "exact match", "accuracy": "accuracy", "loss": "loss"}
CPUS = {"zen5": "AMD EPYC, Zen 5", "zen4": "AMD EPYC, Zen 4", "intel": "Intel Xeon"}
"""CPUs of the benchmarks, by the last part of the record's name."""
CPUS_OF_TRAINING = CPUS | {f"{name}_bfloat16": f"{CPUS[name]}, bfloat16 products" for name in ("zen5", "intel")}
PROCESSORS = {
    "AMD EPYC (family 25, model 1)": ", AMD Zen 3",
    "AMD EPYC (family 25, model 17)": ", AMD Zen 4",
    "AMD EPYC (family 26, model 2)": ", AMD Zen 5",
    "Intel(R) Xeon(R) Processor": ", Intel Xeon",
}
"""Processors by recorded name; early records name no generation."""
PEERS = "torch.compile", "PyTorch, eager"
STRATEGIES = {1: "greedy", 4: "beam 4"}


def results_table() -> str:
    """One row per recorded result: of a run, of a sweep over seeds, or of an evaluation of a run."""
    rows = [_result_row(_read(path)) for path in sorted((ROOT / "configs" / "results").glob("*.json"))]
    return _table(("command", "hardware", "steps", "tokens", "time", "held-out result"), rows)


def _result_row(result: dict[str, Any]) -> tuple[str, ...]:
    if {"split", "test_set"} & result.keys():  # of evaluate.py
        flags = result["command"].partition("evaluate.py ")[2].partition(" --record")[0]
        minutes = f"{result['seconds'] / 60:.1f} min"
        return f"`evaluate.py {flags}`", _hardware(result), "", "", minutes, _metrics(result["metrics"])
    config = re.search(r"--config configs/(\S+)", result["command"])[1]
    runs, spread, title = [result], {}, f"`{' '.join([config, *_overrides(result['command'], config)])}`"
    metrics = result.get("test")
    if metrics is None:  # of sweep.py
        (group,) = result["groups"]
        runs, metrics = [{**result.get("common", {}), **run} for run in result["runs"]], group["mean"]
        if len(runs) > 1:
            title, spread = f"{title}, {len(runs)} seeds", group["deviation"]
    changes = dict.fromkeys(change["setting"] for run in runs for change in run.get("changed_settings", ()))
    title += "".join(f", resumed with {change}" for change in changes)
    tokens, seconds = (sum(run[name] for run in runs) / len(runs) for name in ("tokens", "seconds"))
    cells = f"{runs[0]['steps']:,}", f"{tokens / 1e6:.1f} M", f"{seconds / 60:.1f} min"
    return title, _hardware(runs[0]), *cells, _metrics(metrics, spread)


def _overrides(command: str, config: str) -> list[str]:
    """Returns the settings of a command that differ from those of its config."""
    given = re.findall(r"--config\.([\w.]+)=(\S+)", command)
    of_config = {name: str(value) for name, value in flat(read_config(f"configs/{config}")).items()} if given else {}
    return [f"--config.{name}={value}" for name, value in given if of_config[name] != value]


def _hardware(result: dict[str, Any]) -> str:
    """Returns the number and kind of CPU cores, or the number and kind of the GPUs or TPUs."""
    hardware = result["hardware"]
    if not hardware["devices"].endswith(" cpu"):
        return hardware["devices"]
    cores = hardware["cores"]
    return f"{cores} {'core' if cores == 1 else 'cores'}{PROCESSORS.get(hardware['processor'], '')}"


def _metrics(values: dict[str, float], spread: dict[str, float] | None = None) -> str:
    return ", ".join(
        f"{METRICS[name]} {value:.4g}" + (f" ± {spread[name]:.2g}" if spread else "")
        for name, value in values.items()
        if name in METRICS
    )


def choices_table() -> str:
    """One row per group of each `choice_*.json`: means of the validation metrics over the seeds."""
    rows = []
    for path in sorted(SWEEPS.glob("choice_*.json")):
        record = _read(path)
        config = re.search(r"--config configs/(\S+)", record["command"])[1]
        present = {name: str(value) for name, value in flat(read_config(f"configs/{config}")).items()}
        for group in record["groups"]:
            of_group = [run["validation"] for run in record["runs"] if set(group["settings"]) <= set(run["settings"])]
            means = {name: sum(run[name] for run in of_group) / len(of_group) for name in of_group[0]}
            settings = dict(setting.split("=") for setting in group["settings"])
            chosen = all(float(present[name]) == float(value) for name, value in settings.items())
            text = ", ".join(f"`{setting}`" for setting in group["settings"]) + (" (chosen)" if chosen else "")
            rows.append((f"`{config}`", text, str(len(of_group)), _metrics(means)))
    return _table(("config", "settings", "seeds", "validation"), rows)


def train_table() -> str:
    """One row per CPU and case of `benchmark.py train`."""
    records = _by_cpu("train", CPUS_OF_TRAINING)
    rows = []
    for cpu, (_, record) in records.items():
        for case in record["cases"]:
            faster = [_times(case, peer) for peer in PEERS]
            milliseconds, share = case["milliseconds"]["tformer_jax"], _share_of_peak(case)
            step = f"{milliseconds:,.{milliseconds < 100:d}f} ms"
            size = f"{case['rows']} x {case['length']}"
            rows.append((cpu, f"`{case['case']}`", size, step, f"{100 * share:.0f} %", *faster))
    titles = (
        "CPU",
        "case",
        "rows x tokens",
        "step time",
        "share of peak matmul FLOP/s",
        "speedup over `torch.compile`",
        "over eager PyTorch",
    )
    cases = [case for _, record in records.values() for case in record["cases"]]
    peaks = [_peaks(cases, system) for system in ("tformer_jax", *PEERS)]
    memory = "Peak memory: {} GiB; with `torch.compile` {}, with eager PyTorch {}.".format(*peaks)
    return f"{_table(titles, rows)}\n\n{memory}\n{_sources(records)}"


def _share_of_peak(case: dict[str, Any]) -> float:
    """Returns our FLOP/s in a step, divided by the rate of the fastest matrix product of any system."""
    peak: float = max(map(max, case["products"]["flops_per_second"].values()))
    return case["flops_per_second"]["tformer_jax"] / peak


def decode_table() -> str:
    """One row per CPU and case of `benchmark.py decode`."""
    records = _by_cpu("decode", CPUS)
    rows = []
    for cpu, (_, record) in records.items():
        for case in record["cases"]:
            ratios = (_times(case, peer) for peer in ("CTranslate2", "Hugging Face", "its jitted loop"))
            speed = f"{case['tokens_per_second']['tformer_jax']:,.0f}"
            rows.append((cpu, case["work"], STRATEGIES[case["beams"]], speed, *ratios))
    titles = (
        "CPU",
        "workload",
        "strategy",
        "tokens/s",
        "speedup over CTranslate2",
        "over Hugging Face",
        "over a jitted loop",
    )
    return f"{_table(titles, rows)}\n\n{_sources(records)}"


def many_languages_table() -> str:
    """One row per direction of `tests.programs.many_languages`."""
    record = _read(BENCHMARKS / "many_languages_debian.json")
    counts = {system: len(scores["chrf"]["seeds"]) for system, scores in record["scores"].items()}
    seeds = ", ".join(f"{count} of {SYSTEMS[system]}" for system, count in counts.items())
    source = f"Trained on {' and '.join(record['trained_on'])}, seeds: {seeds}."
    link = _link("many_languages_debian.json", record, "")
    return "\n".join(
        (*languages_table(record["scores"]), "", source, f"Recorded by `tests.programs.many_languages`: {link}.")
    )


def multi30k_directions_table() -> str:
    """One row per direction of `translate_multi30k.py:many`: this model, and a model of the direction alone."""
    results = ROOT / "configs" / "results"
    many, rows = _read(results / "translate_multi30k_many.json"), []
    for name in map(str, read_config("configs/translate_multi30k.py:many").data.wanted_directions):
        config = f"translate_multi30k_{name.replace('-', '_')}".removesuffix("_en_de")
        alone = _read(results / f"{config}.json")
        pairs = [(many["groups"][0]["mean"][f"{key}:{name}"], alone["groups"][0]["mean"][key]) for key in SCORES]
        rows.append((name, *(f"{score:.1f}" for pair in pairs for score in pair), str(len(alone["runs"]))))
    titles = ("direction", "BLEU: one model", "each alone", "chrF: one model", "each alone", "seeds of each alone")
    return _table(titles, rows)


def quality_tables() -> str:
    """One table per record of `tests.programs.quality`: a row per strategy."""
    records = sorted(BENCHMARKS.glob("quality_*.json"))
    title = "**Strategies of decoding**, by `python -m tests.programs.quality`:" if records else ""
    return "\n\n".join([title, *map(_quality_table, records)])


def _quality_table(path: Path) -> str:
    record = _read(path)
    rows = [
        (name, *(f"{actual[metric]:.1f}" for metric in ("chrf", "bleu", "ter")), f"{actual['tokens_per_second']:,.0f}")
        for name, actual in record["strategies"].items()
    ]
    table = _table((f"`{record['name']}`", "chrF", "BLEU", "TER", "tokens/s"), rows)
    (_, chosen), (split, scored) = record["examples"].items()
    choice = f"samples with {record['chosen']}, chosen on {chosen:,} validation examples"
    return f"{table}\n\n{scored:,} {split} examples; {choice}; {_hardware(record)}: {_link(path.name, record, '')}."


def growth_table() -> str:
    """One row per size of `benchmark.py growth`."""
    record = _read(BENCHMARKS / "growth.json")
    rows = [
        (f"{name} {value}", *cells)
        for name, cases in record["growths"].items()
        for value, *cells in growth_cells(name, cases)
    ]
    titles = ("size", *HEADINGS)
    cpu = f"{record['hardware']['cores']} cores of an {record['hardware']['processor']}"
    return f"{_table(titles, rows)}\n\nRecorded on {cpu}: {_link('growth.json', record, '../configs/')}."


def gpu_table() -> str:
    """One row per size of `tests.programs.gpu_attention`, then the comparison of a step with PyTorch."""
    attention, train = (_read(BENCHMARKS / f"{name}_h200.json") for name in ("attention", "gpt2"))
    systems = list(next(iter(attention["milliseconds"].values())))
    rows = [
        (size.replace("x", " x "), *(f"{times[system]:.2f} ms" for system in systems))
        for size, times in attention["milliseconds"].items()
    ]
    titles = ("B x T x N x H", *(f"`{system}`" for system in systems[:-1]), "PyTorch")
    (case,) = train["cases"]
    steps = ", ".join(f"{name} {milliseconds:.1f} ms" for name, milliseconds in case["milliseconds"].items())
    share = 100 * _share_of_peak(case)
    size = f"`{case['case']}` in {case['dtype']}, {case['rows']} x {case['length']} tokens"
    links = ", ".join(
        _link(f"{name}_h200.json", record, "../configs/")
        for name, record in zip(("attention", "gpt2"), (attention, train), strict=True)
    )
    device = attention["hardware"]["devices"].removeprefix("1 x ")
    step = f"A step of {size}: {steps}; here {share:.0f} % of the peak."
    return f"{_table(titles, rows)}\n\n{step}\nRecorded on an {device}: {links}."


def ladder_table(name: str) -> str:
    """One row per rung of `configs/ladder.py`, from the record `name`."""
    record = _read(SWEEPS / name)
    metric = record["metric"]
    rows = []
    for group in record["groups"]:
        settings = dict(part.split("=") for part in group["settings"])
        of_test = format_mean(group["mean"][metric], group["interval"][metric])
        at_equal_time = format_mean(*(group["at_equal_seconds"][part] for part in ("mean", "interval")))
        sizes = f"{group['parameters']:,}", f"{group['tokens_per_second']:,.0f}"
        rows.append((f"`{settings['variant']}`", of_test, at_equal_time, settings["optim.learning_rate"], *sizes))
    seconds = f"validation after {record['equal_seconds']:.0f} s"
    titles = ("rung", f"held-out {METRICS[metric]}", seconds, "learning rate", "parameters", "tokens/s")
    hardware = record["common"]["hardware"]
    source = f"Recorded on {hardware['cores']} cores of an {hardware['processor']}: [`{name}`](results/sweeps/{name})."
    return f"{_table(titles, rows)}\n\n{source}"


def equivalences_table() -> str:
    """One row per option and oracle, with the largest difference."""
    actual: dict[tuple[str, str], float] = {}
    for comparisons in _read(Path(__file__).with_name("equivalences.json")).values():
        for option, oracle, difference in comparisons:
            actual[option, oracle] = max(actual.get((option, oracle), 0.0), difference)
    rows = [(f"`{option}`", oracle, f"{difference:.0e}") for (option, oracle), difference in sorted(actual.items())]
    return _table(("option", "equal to", "largest difference"), rows)


def families_table() -> str:
    """One row per published checkpoint, with what its tests found."""
    columns = "architecture", "tokenizer", "logits", "outputs", "export", "ctranslate2"
    record = _read(Path(__file__).with_name("families.json"))
    rows = [
        (
            name,
            f"`{actual['architecture']}`",
            actual["tokenizer"],
            f"{actual['logits']:.0e}",
            *map(actual.get, columns[3:]),
        )
        for name, actual in record.items()
    ]
    titles = "published config", "`model_type`", "tokenizer", "logits", "equal outputs", "equal exports", "CTranslate2"
    return _table(titles, rows)


def int8_table() -> str:
    """One row per system with weights of float32 or int8."""
    record = _read(Path(__file__).with_name("int8.json"))
    rows = [
        (name, f"{row['bytes'] / 2**20:.1f} MiB", f"{row['tokens_per_second']:,.0f}", f"{row['bleu']:.2f}")
        for name, row in record["systems"].items()
    ]
    where = f"{_hardware(record)}, revision {record['git_revision'][:7]}"
    return f"{_table(('weights', 'size', 'tokens/s', 'BLEU'), rows)}\n\nRecorded on {where}."


TABLES = {
    "README.md": {
        "results": results_table,
        "train": train_table,
        "decode": decode_table,
    },
    "configs/README.md": {
        "choices": choices_table,
        "ladder_shakespeare": functools.partial(ladder_table, "ladder_shakespeare.json"),
        "many_languages": many_languages_table,
        "multi30k_directions": multi30k_directions_table,
        "quality": quality_tables,
        "ladder_multi30k": functools.partial(ladder_table, "ladder_multi30k.json"),
    },
    "scripts/README.md": {"growth": growth_table, "gpu": gpu_table, "int8": int8_table},
    "tformer_jax/README.md": {"families": families_table},
    "tests/README.md": {"equivalences": equivalences_table},
}
"""The functions that write the tables, by file and by the name in the markers of the table."""


def filled(name: str) -> str:
    """Returns the text of a README with its tables rewritten."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for mark, table in TABLES[name].items():
        before, start, rest = text.partition(f"<!-- {mark} -->\n")
        _, end, after = rest.partition(f"<!-- end of {mark} -->")
        text = f"{before}{start}{table()}\n{end}{after}"
    return text


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows)).replace(" --- ", "---")


def _times(case: dict[str, Any], peer: str) -> str:
    return f"{case['times_as_fast'][peer]:.2f}" if peer in case["times_as_fast"] else ""


def _by_cpu(benchmark: str, cpus: Mapping[str, str]) -> dict[str, tuple[str, Any]]:
    """Returns names and contents of a benchmark's records, by CPU."""
    names = {cpu: f"{benchmark}_{part}.json" for part, cpu in cpus.items()}
    return {cpu: (name, _read(BENCHMARKS / name)) for cpu, name in names.items()}


def _peaks(cases: Sequence[dict[str, Any]], system: str) -> str:
    peaks = [case["systems"][system]["peak_bytes"] / 2**30 for case in cases]
    return f"{min(peaks):.1f} to {max(peaks):.1f}"


def _sources(records: dict[str, tuple[str, Any]]) -> str:
    (cores,) = {record["hardware"]["cores"] for _, record in records.values()}
    links = [_link(name, record) for name, record in records.values()]
    return "\n".join((f"Recorded on {cores} cores:", ",\n".join(links) + "."))


def _link(name: str, record: dict[str, Any], folder: str = "configs/") -> str:
    revision, _, changed = record["git_revision"].partition("-")
    return (
        f"[`{name}`]({folder}results/benchmarks/{name}) (revision {revision[:7]}{', with changes' if changed else ''})"
    )


if __name__ == "__main__":
    for file in TABLES:
        (ROOT / file).write_text(filled(file), encoding="utf-8")
