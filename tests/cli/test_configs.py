"""The configs that come with the package are listed, and found by name."""

import dataclasses
import re
from pathlib import Path

import pytest

from tformer_jax.base.errors import UserError
from tformer_jax.cli import configs
from tformer_jax.cli.config_file import read_config, shipped_configs
from tformer_jax.config import save

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs"


def test_every_config_is_listed_with_what_it_does(capsys):
    configs.main([])
    listed = dict(re.findall(r"^(\w+) +(.+)\.$", capsys.readouterr().out, re.MULTILINE))
    assert listed.keys() == {path.stem for path in FOLDER.glob("*.py")}
    assert listed["lm_tiny_shakespeare"] == "Character-level language model of Tiny Shakespeare"


@pytest.mark.parametrize("name", ["lm_tiny_shakespeare", "lm_tiny_shakespeare.py"])
def test_a_config_is_found_by_name_unless_a_file_has_it(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert read_config(f"{name}:cpu") == read_config(f"{FOLDER}/lm_tiny_shakespeare.py:cpu")
    own = "from tformer_jax.config import Config, to_config_dict\n"
    Path(name).write_text(f"{own}def get_config():\n    return to_config_dict(Config(name='own'))\n")
    assert read_config(name).name == "own"


def test_the_config_of_an_imported_run_trains_its_parameters(tmp_path):
    """Regression test: the documented command trained new ones."""
    save(read_config("lm_tiny_shakespeare:cpu"), tmp_path / "config.json")
    assert read_config(str(tmp_path)).train.start_from is None
    (tmp_path / "imported.json").write_text("{}")
    assert read_config(str(tmp_path)).train.start_from == str(tmp_path)
    assert read_config(str(tmp_path), ["--config.train.start_from=None"]).train.start_from is None


def test_a_function_imports_files_beside_its_config(tmp_path):
    (tmp_path / "beside_a_config.py").write_text("NAME = 'own'\n")
    body = "    import beside_a_config\n\n    return to_config_dict(Config(name=beside_a_config.NAME))\n"
    (tmp_path / "own.py").write_text(
        f"from tformer_jax.config import Config, to_config_dict\n\n\ndef get_config():\n{body}"
    )
    assert read_config(str(tmp_path / "own.py")).name == "own"


def test_a_copied_config_that_lacks_a_file_beside_it_says_what_to_copy(tmp_path):
    source = shipped_configs()["translate_tatoeba_zh"]
    (tmp_path / "mine.py").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    sentence = f"mine.py, line .*: No module named 'bases'; copy {source.parent / 'bases'} beside the config"
    with pytest.raises(UserError, match=sentence):
        read_config(str(tmp_path / "mine.py"))


def test_an_invalid_setting_of_a_file_has_its_line(tmp_path):
    """Regression test: a setting of another variant was named without a place."""
    lines = ("from tformer_jax.config import Config, ModelConfig", "", "OTHER = Config(model=ModelConfig(dim=-1))")
    (tmp_path / "own.py").write_text("\n".join(lines))
    with pytest.raises(UserError, match="own.py, line 3: model.dim=-1: must be"):
        read_config(str(tmp_path / "own.py"))


def test_a_misspelled_name_is_refused():
    sentence = "translate_cdlr does not exist; did you mean 'translate_cldr'.*; `tformer configs` lists"
    with pytest.raises(UserError, match=sentence):
        read_config("translate_cdlr")


def test_each_library_has_one_oldest_version():
    """`.ci/run` installs the lower bounds together."""
    bounds = re.findall(r'"([\w-]+)(?:\[[\w,]+\])?>=([\d.]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert len(dict(bounds)) == len(set(bounds)) > 40


def test_the_config_of_a_run_is_a_config(tmp_path):
    """Regression test: its JSON was run as Python."""
    cfg = read_config("translate_cldr")
    save(cfg, tmp_path / "config.json")
    changed = ["--config.train.steps=7"]
    for name in (tmp_path, tmp_path / "config.json"):
        assert read_config(str(name), changed) == dataclasses.replace(
            cfg, train=dataclasses.replace(cfg.train, steps=7)
        )
    with pytest.raises(UserError, match="config.json has no variants: leave out the colon"):
        read_config(f"{tmp_path / 'config.json'}:en-fr", [])
