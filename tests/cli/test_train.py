"""The training command: config files, overrides, and one sentence for each error."""

import subprocess
import sys
from pathlib import Path

import pytest

from tformer_jax.base.errors import UserError
from tformer_jax.cli import train
from tformer_jax.cli.common import check_writable
from tformer_jax.cli.config_file import read_config
from tformer_jax.cli.train import main
from tformer_jax.config import kinds

ROOT = Path(__file__).resolve().parents[2]
CLDR = str(ROOT / "configs" / "translate_cldr.py")


def test_overrides_reach_the_config():
    overrides = [
        "--config.train.steps=7",
        "--config.model.head_dim=16",
        "--config.data.bucket_lengths=(8, 64)",
        "--config.optim.learning_rate=1",
    ]
    cfg = read_config(CLDR + ":en-fr", overrides)
    assert cfg.name == "translate_cldr_en_fr"
    assert (cfg.train.steps, cfg.model.head_dim, cfg.data.bucket_lengths) == (7, 16, (8, 64))
    assert cfg.optim.learning_rate == 1.0


def test_none_unsets_a_setting():
    assert read_config(CLDR).optim.learning_rate is not None
    for unset in (["--config.optim.learning_rate=None"], ["--config.optim.learning_rate", "None"]):
        cfg = read_config(CLDR, ["--config.optim.schedule=inverse_sqrt", "--config.optim.final_fraction=0.1", *unset])
        assert (cfg.optim.learning_rate, cfg.optim.schedule) == (None, "inverse_sqrt")


@pytest.mark.parametrize(
    "second", [["--config.seed=2"], ["--config.seed", "2"], ["--config.seed=None"], ["-config.seed=1"]]
)
def test_a_setting_is_written_once(second):
    """Regression test: the last one counted, without a word."""
    with pytest.raises(UserError, match="--config.seed is written twice; write it once"):
        read_config(CLDR, ["--config.seed=1", *second])


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["--config.model.dimm=3"], "unknown setting 'model.dimm'; did you mean 'model.dim'?"),
        (["-config.modle.dim=3"], "unknown setting 'modle.dim'; did you mean 'model'?"),
        (["--config.model.dim=None"], "model.dim=None: must be int, not None"),
        (["--config.model.dim=wide"], "model.dim='wide': must be a whole number, such as 1000"),
        (["--config.optim.learning_rate_factors=*embedding=None"], "learning_rate_factors=.*embedding=None"),
        (["--config.model.scan_layers=yes"], "model.scan_layers='yes': must be True or False"),
        (["--config.data.fields=(2,1)"], r"data.fields=\(2, 1\): must hold str, not int; write \('2', '1'\)"),
        (["--config.model.norm=layer"], "model.norm='layer': is not a known value; did you mean 'layernorm'?"),
        (["--resum"], "unknown flag '--resum'; settings are written --config.SECTION.SETTING=VALUE"),
        (["en-fr"], "unexpected argument 'en-fr'; settings are written --config.SECTION.SETTING=VALUE"),
    ],
)
def test_mistakes_on_the_command_line(overrides, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        read_config(CLDR, overrides)
    assert "\n" not in str(caught.value)


def test_a_missing_config_lists_the_available_ones(tmp_path):
    (tmp_path / "there.py").write_text("")
    with pytest.raises(UserError, match=r"config file .*here.py does not exist; in .* are .*there.py"):
        read_config(str(tmp_path / "here.py"))


FILE = """from tformer_jax.config import Config, to_config_dict
def get_config():
    config = to_config_dict(Config())
    config.seed = 1
    return config
"""


@pytest.mark.parametrize(
    ("variant", "written", "instead", "sentence"),
    [
        ("", ".seed", ".model.dropuot", r"here.py: unknown setting 'dropuot'; did you mean 'dropout'\?"),
        ("", ".seed", ".xyz", 'here.py, line 4: AttributeError: \'Key "xyz" does not exist and cannot be added'),
        ("", "return config", "return {}", "here.py: get_config must return to_config_dict.*, not dict"),
        ("", "get_config", "make", "here.py has no function get_config"),
        ("", "get_config()", "get_config(variant)", "here.py needs a variant after a colon"),
        (":a", "", "", "here.py has no variants: leave out the colon"),
        ("", "seed = 1", "seed = int('a')", "here.py, line 4: ValueError: invalid literal for int"),
        ("", "import Config", "import Confgi", "here.py, line 1: ImportError: cannot import name 'Confgi'"),
        ("", "def get", "def (", "here.py, line 2: SyntaxError: invalid syntax"),
        ("", "seed", "\udcff", "here.py, line 4: SyntaxError: .*utf-8"),
    ],
)
def test_mistakes_in_a_config_file(variant, written, instead, sentence, tmp_path):
    path = tmp_path / "here.py"
    path.write_text(FILE.replace(written, instead), encoding="utf-8", errors="surrogateescape")
    with pytest.raises(UserError, match=sentence) as caught:
        read_config(f"{path}{variant}")
    assert "\n" not in str(caught.value)


def test_a_config_file_may_have_a_dataclass(tmp_path):
    extra = "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass A:\n    n: int = 2\n"
    (tmp_path / "here.py").write_text(extra + FILE.replace("= 1", "= A().n"))
    assert read_config(str(tmp_path / "here.py")).seed == 2


def test_a_config_file_may_import_a_file_beside_it(tmp_path, monkeypatch):
    (tmp_path / "beside_here.py").write_text("SEED = 7\n")
    (tmp_path / "here.py").write_text("from beside_here import SEED\n" + FILE.replace("= 1", "= SEED"))
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    assert read_config(str(tmp_path / "here.py")).seed == 7
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize("form", ["beside_here.py", "beside_here/__init__.py", "beside_here/inner.py"])
def test_config_files_of_two_folders_import_their_own_files(form, tmp_path, monkeypatch):
    """Regression test: the second had the seed of the first."""
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    module = "beside_here.inner" if "inner" in form else "beside_here"
    for seed in (3, 4):
        folder = tmp_path / str(seed)
        (folder / form).parent.mkdir(parents=True)
        (folder / form).write_text(f"SEED = {seed}\n")
        (folder / "here.py").write_text(f"from {module} import SEED\n" + FILE.replace("= 1", "= SEED"))
    assert [read_config(str(tmp_path / seed / "here.py")).seed for seed in ("3", "4", "3")] == [3, 4, 3]


def test_modules_that_register_kinds_remain(tmp_path, monkeypatch):
    for name in ("modules", "path"):
        monkeypatch.setattr(sys, name, getattr(sys, name).copy())
    monkeypatch.setattr(kinds, "ACTIVATIONS", kinds.Kinds(kinds.ACTIVATIONS))
    register = (
        "from tformer_jax.config import kinds\ndef double(x): return 2 * x\nkinds.ACTIVATIONS['double'] = double\n"
    )
    (tmp_path / "own_double.py").write_text(register)
    (tmp_path / "own_other.py").write_text("SEED = 2\n")
    (tmp_path / "here.py").write_text("import own_double\n" + FILE)
    (tmp_path / "imports.py").write_text(
        "import own_other\n" + FILE.replace("Config()", "Config(imports=('own_other',))")
    )
    read_config(str(tmp_path / "here.py"))
    assert sys.modules["own_double"].double is kinds.ACTIVATIONS["double"]
    assert read_config(str(tmp_path / "imports.py")).imports == ("own_other",) and "own_other" in sys.modules


def test_missing_data_says_what_to_download(tmp_path, monkeypatch):
    monkeypatch.delenv("TFORMER_DATA", raising=False)
    arguments = ["--config", str(ROOT / "configs" / "translate_multi30k.py"), "--run", str(tmp_path / "run")]
    with pytest.raises(UserError, match="task 1 of the GitHub repository multi30k/dataset.*--data DIR"):
        main(arguments)
    with pytest.raises(UserError, match=r"train.en.gz does not exist \(it comes from task 1"):
        main([*arguments, "--data", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_a_profile_needs_enough_steps_and_a_local_folder(tmp_path, monkeypatch):
    arguments = ["--config", CLDR, "--profile", "--run"]
    problem = "train.steps=14: must be at least 15 for --profile, which skips the first 10"
    with pytest.raises(UserError, match=problem):
        main([*arguments, str(tmp_path / "run"), "--config.train.steps=14"])
    monkeypatch.setattr(train, "is_remote", lambda _: True)
    with pytest.raises(UserError, match="--profile cannot write to .*run: profile 15 steps with a local --run"):
        main([*arguments, str(tmp_path / "run"), "--config.train.steps=15"])
    assert list(tmp_path.iterdir()) == []


def test_the_script_ends_with_one_sentence_and_a_status():
    command = [sys.executable, "scripts/train.py", "--config", "configs/translate_cldr.py", "--config.train.stepz=3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: unknown setting 'train.stepz'; did you mean 'train.steps'?\n"
    assert done.stdout == ""


def test_a_result_that_could_not_be_recorded_is_refused_before_training(tmp_path):
    check_writable(tmp_path / "new" / "folder" / "result.json")
    assert (tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").write_text("")
    assert not list((tmp_path / "new" / "folder").iterdir())
    for path in (
        tmp_path / "new",
        tmp_path / "file" / "result.json",
        tmp_path / ("x" * 250),
        Path("/proc/result.json"),
    ):
        with pytest.raises(UserError, match=f"--record {path}: cannot"):
            check_writable(path)


def test_a_record_is_not_in_the_run_folder(tmp_path):
    """Regression test: the folder was replaced, and the record could not be written after the training."""
    flags = ["--config", "configs/translate_cldr.py", "--run", str(tmp_path / "run")]
    for name in ("run/record.json", "run/records/record.json"):
        with pytest.raises(UserError, match=f"--record {tmp_path}/{name}: is in the run folder"):
            train.main([*flags, "--record", str(tmp_path / name)])
    assert not (tmp_path / "run").exists()


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    """The run may have ended with an error of its own, which must not be replaced."""
    train.write_report(tmp_path)
    assert "is not a run folder" in caplog.text
