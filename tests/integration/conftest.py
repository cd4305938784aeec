"""Shared by the tests that launch whole runs: one process that has imported everything and forks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.launches import ForkServer, fork_server


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with fork_server(tmp_path_factory.mktemp("forks") / "log") as server:
        yield server
