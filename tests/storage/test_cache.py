"""FLATOUT_CACHE names the cache directory of everything, and a wrong value is answered."""

from pathlib import Path

import pytest

from flatout.errors import ConfigError
from flatout.storage.cache import DEFAULT, default_cache


@pytest.mark.parametrize("stated", [None, ""], ids=["unset", "empty"])
def test_without_the_variable_the_cache_is_in_the_home_directory(monkeypatch, stated):
    monkeypatch.delenv("FLATOUT_CACHE", raising=False)
    if stated is not None:
        monkeypatch.setenv("FLATOUT_CACHE", stated)
    assert default_cache() == DEFAULT
    assert DEFAULT.expanduser() == Path.home() / ".cache" / "flatout"


def test_the_variable_is_read_at_every_call(monkeypatch, tmp_path):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "a b"))
    assert default_cache() == tmp_path / "a b"
    monkeypatch.setenv("FLATOUT_CACHE", "~/elsewhere")
    assert default_cache().expanduser() == Path.home() / "elsewhere"


@pytest.mark.parametrize(
    ("stated", "problem"),
    [
        ("cache", "depends on the current directory"),
        ("../cache", "depends on the current directory"),
        ("s3://bucket/cache", "is a URL"),
        (__file__, "is a file, not a directory"),
    ],
    ids=["relative", "parent", "URL", "file"],
)
def test_a_wrong_directory_is_answered(monkeypatch, stated, problem):
    monkeypatch.setenv("FLATOUT_CACHE", stated)
    with pytest.raises(ConfigError, match=problem) as caught:
        default_cache()
    assert f"FLATOUT_CACHE={stated}" in caught.value.what
