"""Boxes against brute force: every element of a run at its place in the whole tensor, once."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.executor.checkpoint.boxes import run_boxes, slices_of_run
from flopwright.plan.sharding import Cut

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_boxes_make_up_the_run_in_order(shape, data):
    numel = math.prod(shape)
    first = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(first, numel))
    index = torch.arange(numel).view(shape)
    found = [
        index[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].reshape(-1)
        for offsets, sizes in run_boxes(shape, first, end)
    ]
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert torch.cat([*found, torch.arange(0)]).tolist() == list(range(first, end))


@settings(max_examples=60)
@given(
    st.integers(1, 3), st.sampled_from([2, 4, 6]), st.integers(1, 3), st.integers(1, 4), st.data()
)
def test_cut_and_partitioned_parts_fill_the_whole_once(experts, rows, columns, ranks, data):
    """Packed gate and up (two blocks) cut over ranks, each part cut flat over replicas."""
    full = (experts, rows, columns)
    theirs = torch.arange(math.prod(full)).view(full)
    seen = torch.zeros(full, dtype=torch.int64)
    for rank in range(ranks):
        ranges = Cut(dim=1, axis="etp", blocks=2).ranges(rows, ranks, rank)
        mine = torch.cat([theirs[:, start:stop] for start, stop in ranges], 1)
        here, intervals = 0, []
        for start, stop in ranges:
            intervals.append((here, start, stop - start))
            here += stop - start
        cuts = sorted(data.draw(st.lists(st.integers(0, mine.numel()), max_size=3)))
        for first, end in zip([0, *cuts], [*cuts, mine.numel()], strict=True):
            dims = (((0, 0, experts),), tuple(intervals), ((0, 0, columns),))
            flat = mine.reshape(-1)[first:end].clone()
            for box in slices_of_run(flat, first, mine.shape, dims, full):
                place = tuple(
                    slice(o, o + s) for o, s in zip(box.offsets, box.tensor.shape, strict=True)
                )
                assert torch.equal(theirs[place], box.tensor)
                seen[place] += 1
                if box.tensor.numel():  # a view: what is read into it arrives
                    box.tensor.add_(0)
                    assert box.tensor.untyped_storage().data_ptr() == (
                        flat.untyped_storage().data_ptr()
                    )
    assert bool((seen == 1).all())
