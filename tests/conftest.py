"""Order of the test files: those that leave Megatron's process groups behind in the test process come last."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests marked `megatron_in_process` last.

    They initialise Megatron's parallel state in the test process and destroy it again. Data workers that Energon forks
    from such a process later crash while its collector walks what is left of the groups; training processes are not
    affected, since they keep their groups.
    """
    items.sort(key=lambda item: item.get_closest_marker("megatron_in_process") is not None)


@pytest.fixture(autouse=True)
def _frozen_imports() -> Iterator[None]:
    """Hides what is loaded from the collector, which would walk it at every start of a loader and of its workers.

    torch, Megatron and transformers are half a million objects, and a walk takes half a second. Energon's own freeze
    ends with the loader, so it is repeated before each test.
    """
    gc.collect()
    gc.freeze()
    yield
