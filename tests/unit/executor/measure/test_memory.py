from __future__ import annotations

import torch
from torch import nn

from flopwright.executor.measure.memory import fullest_by_stage, saved_bytes, weight_bytes


def test_each_saved_storage_counts_once() -> None:
    x = torch.randn(10, requires_grad=True)
    with saved_bytes([]) as meter:
        y = x.sin()  # saves x: 40 bytes
        z = x.exp()  # saves its own result: 40 bytes
        w = x.cos()  # saves x again: nothing new
        assert meter.peak_bytes == 80
        (y + w + z).sum().backward()
    del y, z, w
    assert meter.live_bytes == 0
    assert meter.peak_bytes == 80


def test_a_view_keeps_the_whole_storage() -> None:
    x = torch.randn(100, requires_grad=True)
    with saved_bytes([]) as meter:
        kept = x[:5].sin()
    assert meter.peak_bytes == 400
    del kept


def test_the_peak_is_over_time() -> None:
    with saved_bytes([]) as meter:
        for size in (8, 32, 16):
            x = torch.ones(size, requires_grad=True)
            x.sin().sum().backward()
            del x
    assert meter.peak_bytes == 32 * 4
    assert meter.live_bytes == 0


def test_parameters_and_buffers_are_not_activations() -> None:
    linear = nn.Linear(4, 4, bias=False)
    x = torch.randn(3, 4, requires_grad=True)
    with saved_bytes([linear]) as meter:
        out = linear(x)
    assert meter.peak_bytes == 48  # the input; the weight it is multiplied with is a parameter
    with saved_bytes([]) as everything:
        again = linear(x)
    assert everything.peak_bytes == 48 + 64
    del out, again
    norm = nn.BatchNorm1d(4)
    assert weight_bytes([norm]) == 4 * 4 * 4 + 8  # gain, bias, mean, variance, int64 counter


def test_weights_that_share_a_storage_count_once() -> None:
    linear = nn.Linear(4, 4, bias=False)
    other = nn.Linear(4, 4, bias=False)
    other.weight = linear.weight
    assert weight_bytes([linear, other]) == 64


def test_each_stage_shows_its_fullest_rank() -> None:
    ranks = [(0, {"weights": 5}), (1, {"weights": 1}), (0, {"weights": 3, "activations": 4})]
    assert fullest_by_stage(ranks, 2) == ({"weights": 3, "activations": 4}, {"weights": 1})
