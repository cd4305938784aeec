"""The hostfile: each mistake names its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.config.hostfile import read_hostfile
from recipe.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "hostfile"
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize(
    "text",
    [
        "a slots=8\nb slots=8\n",
        "a slots=8\r\nb slots=8\r\n",
        "# nodes\n\na slots=8  # first\n  b\tslots=8",
        "\ufeffa slots=8\nb slots=8",
    ],
)
def test_good_files(tmp_path: Path, text: str) -> None:
    assert list(read_hostfile(write(tmp_path, text)).items()) == [("a", 8), ("b", 8)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a slots=8\nb\n", "line 2"),
        ("a slots = 8\n", "line 1"),
        ("# c\na slots=0\n", "line 2"),
        ("a slots=2abc\n", "line 1"),
        ("a slots=-1\n", "line 1"),
        ("a slots=8\nb slots=8\na slots=8\n", "line 1 already"),
        ("a slots=8\n\nb slots=4\n", "line 3"),
        ("a slots=8 b slots=8\n", "line 1"),
        ("", "names no host"),
        ("# only a comment\n", "names no host"),
        ("-oProxyCommand=x slots=8\n", "no name of a host"),
        ("$(id) slots=8\n", "no name of a host"),
        ("a\0b slots=8\n", "no name of a host"),
        ("a slots=" + "9" * 5000, "is no entry"),
        ("a slots=\u0663\n", "is no entry"),
        ("A slots=8\na slots=8\n", "line 1 already"),
        ("a slots=8\x0cb slots=8\n", "is no entry"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_hostfile(write(tmp_path, text))
    assert words in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("host", ["node-1.rack_2", "10.0.0.1", "fe80::1", "me@node1", "localhost"])
def test_names_and_addresses_are_taken(tmp_path: Path, host: str) -> None:
    assert read_hostfile(write(tmp_path, f"{host} slots=8\n")) == {host: 8}


def test_missing_file_is_no_local_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_hostfile(tmp_path / "hostfil")


def test_the_shipped_example_is_valid(repository: Path) -> None:
    assert read_hostfile(repository / "hostfile.example") == {"node1": 8, "node2": 8}
