"""Storages are followed exactly: made, resized, shared, gone."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from rayzero.dist.fake import without_values
from rayzero.dist.storage_trace import StorageTrace


def peak_by_torch(held: Iterable[torch.Tensor], call: Callable[[], object]) -> int:
    """Ask torch's own tracker, which follows one forward of a module alone."""
    tracker = MemTracker()
    tracker.track_external(*held)
    with tracker:
        call()
    return int(sum(kinds["Total"] for kinds in tracker.get_tracker_snapshot("peak").values()))


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
        assert trace.peak_bytes == 3 * 400
        assert [c.delta_bytes for c in trace.changes] == [400, 400, -400, -400, 400, -400]


def test_the_peak_is_the_one_that_torchs_own_tracker_finds() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.GELU(), torch.nn.Linear(30, 5))
    x = torch.randn(7, 20)

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    with StorageTrace([*model.parameters(), x], lambda: "here") as trace:
        step()
    assert trace.peak_bytes == peak_by_torch([*model.parameters(), x], step)


def test_a_module_that_runs_twice_in_a_step_is_followed_to_its_exact_peak() -> None:
    """Of m elements each: scaled and its exp; then exp and its gradient; then that, times x."""
    weight, x = torch.nn.Parameter(torch.zeros(())), torch.ones(10_000)
    scalar, long = 4, 4 * 10_000
    weight.grad = torch.zeros(())

    def micro_batch() -> None:
        (weight * x).exp().sum().backward()

    for times in (1, 3):
        with StorageTrace([weight, weight.grad, x], lambda: "here") as trace:
            for _ in range(times):
                micro_batch()
        held = 2 * scalar + long
        # Beside them: the loss, its gradient and the weight's.
        assert trace.peak_bytes == held + 2 * long + 3 * scalar


def test_resizing_is_torchs_own_again_after_an_error() -> None:
    before = torch.UntypedStorage.resize_

    def broken() -> None:
        with StorageTrace([], lambda: "here"):
            assert torch.UntypedStorage.resize_ is not before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert torch.UntypedStorage.resize_ is before
