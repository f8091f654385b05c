"""C sources become libraries once, whole, and of this user; where that fails, callers do without."""

import os
import shutil
import stat

import pytest

from megarl.platform import native

SOURCE = "int answer(void) { return 42; }\n"

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None and shutil.which("gcc") is None, reason="no C compiler")


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path / "cache"))
    native.compiled.cache_clear()
    path = tmp_path / "answer.c"
    path.write_text(SOURCE)
    yield path
    native.compiled.cache_clear()


def libraries(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache" / "native").iterdir())


@needs_compiler
def test_a_source_is_compiled_once(source, tmp_path, monkeypatch):
    assert native.compiled(source).answer() == 42
    assert len(libraries(tmp_path)) == 1 and libraries(tmp_path)[0].endswith(".so")
    native.compiled.cache_clear()
    monkeypatch.setattr(native, "_make", lambda *_: pytest.fail("it was compiled again"))
    assert native.compiled(source).answer() == 42


@needs_compiler
def test_a_changed_source_is_another_library(source, tmp_path):
    native.compiled(source)
    source.write_text(SOURCE.replace("42", "43"))
    native.compiled.cache_clear()
    assert native.compiled(source).answer() == 43
    assert len(libraries(tmp_path)) == 2


@needs_compiler
def test_a_source_that_does_not_compile_is_done_without_and_said_so(source, tmp_path, caplog):
    source.write_text("int answer(void) { return }")
    assert native.compiled(source) is None
    assert "answer.c is not compiled" in caplog.text and "error" in caplog.text
    assert libraries(tmp_path) == []


def test_no_compiler_is_done_without_and_said_so(source, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert native.compiled(source) is None
    assert "no C compiler found" in caplog.text


@pytest.mark.skipif(os.getuid() == 0, reason="root writes everywhere")
def test_a_cache_that_cannot_be_written_is_done_without(source, tmp_path, caplog):
    (tmp_path / "cache").mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    assert native.compiled(source) is None
    assert "answer.c is not compiled" in caplog.text


@needs_compiler
def test_a_library_of_another_user_is_not_loaded(source, tmp_path, monkeypatch):
    native.compiled(source)
    native.compiled.cache_clear()
    made = []
    make = native._make
    monkeypatch.setattr(native, "_make", lambda *args: (made.append(args), make(*args)))
    monkeypatch.setattr(os, "getuid", lambda: -1)
    native.compiled(source)
    assert len(made) == 1
