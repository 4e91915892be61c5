"""Storages are followed exactly: made, resized, shared, gone."""

import pytest
import torch

from rayzero.dist.fake import without_values
from rayzero.dist.memory_trace import peak_of_storages
from rayzero.dist.storage_trace import StorageTrace


def peak_of(trace: StorageTrace[str]) -> int:
    total = peak = sum(trace.at_start.values())
    for change in trace.changes:
        total += change.delta_bytes
        peak = max(peak, total)
    return peak


def work(weight: torch.Tensor) -> None:
    x = weight @ weight
    y = x.t().exp()  # a view takes no bytes
    del x
    weight.untyped_storage().resize_(0)
    y.split(2)[0].add_(1.0)
    weight.untyped_storage().resize_(400)


def test_the_peak_is_the_hand_counted_one_with_and_without_values() -> None:
    for is_fake in (False, True):
        context = without_values() if is_fake else torch.no_grad()
        with context:
            weight = torch.ones(10, 10)
            with StorageTrace([weight], lambda: "here") as trace:
                work(weight)
        assert peak_of(trace) == 3 * 400
        assert [c.delta_bytes for c in trace.changes] == [400, 400, -400, -400, 400, -400]


def test_the_peak_is_the_one_that_torchs_own_tracker_finds() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.GELU(), torch.nn.Linear(30, 5))
    x = torch.randn(7, 20)

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    with StorageTrace([*model.parameters(), x], lambda: "here") as trace:
        step()
    assert peak_of(trace) == peak_of_storages([*model.parameters(), x], step)


def test_resizing_is_torchs_own_again_after_an_error() -> None:
    before = torch.UntypedStorage.resize_

    def broken() -> None:
        with StorageTrace([], lambda: "here"):
            assert torch.UntypedStorage.resize_ is not before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert torch.UntypedStorage.resize_ is before
