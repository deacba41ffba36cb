"""Bash completes commands, flags, configs and settings from what `tformer completion` prints."""

import subprocess

import pytest

from tformer_jax.cli import completion

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "tformer.bash"
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("builtins.print", lines.append)
        patch.setattr("sys.argv", ["tformer", "completion"])
        completion.main([])
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tra"], ["train", "translate"]),
        (["train", "--res"], ["--resume"]),
        (["translate", "--config.model.di"], ["--config.model.dim="]),
        (["train", "--config", "translate_c"], ["translate_cldr"]),
        (["train", "--config.model.moe.num_exp"], ["--config.model.moe.num_experts="]),
        (["train", "runs/"], []),
        (["serve", "--no-w"], ["--no-warm-up"]),
        (["vocabulary", "extend", "--tokens"], ["--tokens"]),
        (["benchmark", "train", "--oper"], ["--operations"]),
    ],
)
def test_completions_of_the_last_word(script, words, expected):
    typed = " ".join(words)
    asked = f"source {script}; COMP_WORDS=(tformer {typed}); COMP_CWORD={len(words)}; _tformer; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=False)
    assert done.stdout.split() == expected, done.stderr
