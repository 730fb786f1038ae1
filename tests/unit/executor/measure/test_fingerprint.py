from __future__ import annotations

import pytest

from flopwright.executor.measure.fingerprint import fingerprint, host_memory_bytes


def test_equal_machines_share_an_id_and_other_sizes_do_not() -> None:
    assert fingerprint(2).stack_id() == fingerprint(2).stack_id()
    assert fingerprint(2).stack_id() != fingerprint(4).stack_id()


def test_it_names_software_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = fingerprint(1)
    assert found.threads_per_rank == 3
    assert found.packages["torch"].split(".")[0].isdigit()
    assert found.memory_bytes == host_memory_bytes() > 2**28
