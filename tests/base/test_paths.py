"""Files and folders are replaced atomically; devices, pipes and the targets of links are not lost."""

import errno
import os
import threading

import pytest

from tformer_jax.base.errors import UserError
from tformer_jax.base.paths import as_path, replacing, replacing_folder, resolved, write_text


def test_the_target_of_a_link_is_replaced(tmp_path):
    """Regression test: the link became a file."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "file")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "disk" / "file").read_text() == "new"


def test_a_pipe_is_written_to(tmp_path):
    """Regression test: a file replaced it, as it did devices."""
    pipe, actual = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: actual.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "text")
    reader.join()
    assert actual == ["text"] and pipe.is_fifo()


def test_a_failed_write_names_its_file(tmp_path):
    with pytest.raises(OSError) as caught, replacing(tmp_path / "file"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(tmp_path / "file")


def test_a_block_that_fails_replaces_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").touch()
    (tmp_path / "file").write_text("old")
    for replaced in (replacing_folder(tmp_path / "folder"), replacing(tmp_path / "file")):
        with pytest.raises(KeyError), replaced:
            raise KeyError
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "old"]


def test_a_loop_of_links_is_named(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(UserError, match="a cannot be resolved .*: name another path"):
        resolved(tmp_path / "a")


def test_a_leading_tilde_is_the_home_folder(tmp_path, monkeypatch):
    """Regression test: a folder named ~ was made."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert as_path("~/runs/a") == tmp_path / "runs" / "a" == as_path(tmp_path / "runs" / "a")
    assert str(as_path("a/~")) == "a/~"
