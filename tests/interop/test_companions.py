"""Files that an import stores for exports: only names of companions are written."""

import pytest

from tformer_jax.base.errors import UserError
from tformer_jax.interop import companions

FILES = {
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tool.jinja": "{{ tools }}",
    "modules.json": "[]",
    "sentence_bert_config.json": "{}",
    "1_Pooling/config.json": "{}",
}


def test_what_is_read_is_written(tmp_path):
    for name, text in FILES.items():
        (tmp_path / "old" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "old" / name).write_text(text)
    stored = companions.read(tmp_path / "old")
    assert stored["files"] == FILES
    (tmp_path / "new").mkdir()
    companions.write(tmp_path / "new", stored, 8)
    assert companions.read(tmp_path / "new") == stored


@pytest.mark.parametrize(
    "name", ["../x.txt", "../modules.json", "../1_Pooling/config.json", "/1_Pooling/config.json", "config.json", ".."]
)
def test_other_names_are_refused(name, tmp_path):
    (tmp_path / "export").mkdir()
    absolute = f"{tmp_path}{name}" if name.startswith("/") else name
    with pytest.raises(UserError, match=r"imported.json of the run names the file .*, which is not written: remove it"):
        companions.write(tmp_path / "export", {"files": {absolute: "x"}}, 8)
    assert list(tmp_path.rglob("*")) == [tmp_path / "export"]
