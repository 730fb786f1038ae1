"""Groups partition the ranks; shards add up to the model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.plan.mesh import Mesh
from flopwright.plan.parallel import ParallelPlan, ScheduleName, even_split
from flopwright.plan.sharding import owned_tensors, stage_tensors
from flopwright.spec.load import load_model
from flopwright.spec.parameters import num_params, parameters

SIZE = st.sampled_from([1, 2, 3, 4])


@st.composite
def plans(draw: st.DrawFn) -> ParallelPlan:
    sizes = {k: draw(SIZE) for k in ("dp_replicate", "dp_shard", "tp", "pp", "cp")}
    lending = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
    ep = draw(st.sampled_from([d for d in range(1, lending + 1) if lending % d == 0]))
    return ParallelPlan(**sizes, ep=ep)


@given(plans())
@settings(max_examples=200, deadline=None)
def test_groups_of_every_name_partition_the_ranks(plan: ParallelPlan) -> None:
    mesh = Mesh(plan)
    sizes = {"pp": plan.pp, "dp": plan.dp, "tp": plan.tp, "cp": plan.cp, "ep": plan.ep,
             "edp": plan.dp * plan.cp * plan.tp // plan.ep, "world": plan.world_size,
             "dp_cp": plan.dp * plan.cp, "dp_shard_cp": plan.dp_shard * plan.cp,
             "dp_replicate": plan.dp_replicate,
             "edp_shard": plan.dp_shard * plan.cp * plan.tp // plan.ep}  # fmt: skip
    for name, size in sizes.items():
        groups = mesh.groups(name)
        assert sorted(r for g in groups for r in g) == list(range(plan.world_size))
        assert {len(g) for g in groups} == {size}


@given(plans())
@settings(max_examples=100, deadline=None)
def test_an_expert_rank_meets_each_slice_once(plan: ParallelPlan) -> None:
    mesh = Mesh(plan)
    for group in mesh.groups("ep"):
        coordinates = [mesh.coordinates(r) for r in group]
        assert [c["ep"] for c in coordinates] == list(range(plan.ep))
        assert len({c["pp"] for c in coordinates}) == 1
    for group in mesh.groups("edp"):
        assert len({mesh.coordinates(r)["ep"] for r in group}) == 1


@pytest.mark.slow
@given(plans())
@settings(max_examples=100, deadline=None)
def test_what_is_summed_is_its_parts_in_every_replica(plan: ParallelPlan) -> None:
    mesh = Mesh(plan)
    for whole, part, same in (("dp_cp", "dp_shard_cp", "tp"), ("edp", "edp_shard", "ep")):
        for group in mesh.groups(whole):
            parts = {mesh.group_of(part, r) for r in group}
            assert sorted(r for p in parts for r in p) == sorted(group)
            assert len(parts) == plan.dp_replicate
            assert len({(c["pp"], c[same]) for c in map(mesh.coordinates, group)}) == 1
            for r in group:
                assert set(mesh.group_of("dp_replicate", r)) <= set(group)


def test_k2_groups_stay_on_neighbouring_ranks() -> None:
    mesh = Mesh(ParallelPlan(pp=16, dp_shard=128, ep=16))
    assert mesh.group_of("ep", 17) == tuple(range(16, 32))
    assert mesh.group_of("pp", 0) == tuple(range(0, 2048, 128))
    assert mesh.group_of("edp", 1)[:3] == (1, 17, 33)


@given(st.integers(1, 128), st.integers(1, 16))
def test_even_split_sums_and_differs_by_one(layers: int, chunks: int) -> None:
    split = even_split(layers, chunks)
    assert sum(split) == layers
    assert max(split) - min(split) <= 1
    assert split[-1] == min(split)


def test_stages_hold_every_tensor_once_and_shards_add_up() -> None:
    spec = load_model("kimi_k2")
    plan = ParallelPlan(pp=16, dp_shard=128, ep=16)
    names = [p.name for s in range(16) for p in stage_tensors(spec, plan, s)]
    assert names == [p.name for p in parameters(spec)]
    ranks = plan.dp * plan.tp * plan.cp
    held = sum(
        o.numel * ranks / o.replicas for s in range(16) for o in owned_tensors(spec, plan, s)
    )
    assert held == num_params(spec)


@pytest.mark.parametrize("schedule", ["zb_v", "dualpipe_v"])
def test_in_a_v_the_head_stands_beside_the_embedding(schedule: ScheduleName) -> None:
    spec = load_model("kimi_k2")
    plan = ParallelPlan(pp=8, vpp=2, dp_shard=8, ep=8, schedule=schedule)
    held = [[p.name for p in stage_tensors(spec, plan, s)] for s in range(8)]
    assert sorted(name for stage in held for name in stage) == sorted(
        p.name for p in parameters(spec)
    )
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= set(held[0])
    assert "lm_head.weight" not in held[-1]
