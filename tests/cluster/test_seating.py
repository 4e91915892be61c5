"""Which devices and nodes are chosen, refused, and cut into bundles; no Ray needed."""

import random

import pytest

from rayzero.cluster.inventory import Inventory, Node, Survey, sorted_nodes
from rayzero.cluster.placement import bundles_of, resources_of, warning_of
from rayzero.cluster.rank import Whereabouts
from rayzero.cluster.roster import check_distinct, rank_order
from rayzero.cluster.seating import seat
from rayzero.config.cell import CellConfig
from rayzero.config.cluster import ClusterConfig, ClusterKind, Device, HardwareConfig
from rayzero.config.data import DataConfig
from rayzero.config.model import ModelConfig
from rayzero.config.parallel import ParallelConfig
from rayzero.errors import ClusterError


def node(name: str, *, gpus: int = 0, slots: int = 8) -> Node:
    return Node(
        name=name,
        node_id=f"id of {name}",
        address="10.0.0.1",
        num_gpus=gpus,
        num_slots=slots,
        pin=f"pin_{name}",
        pin_share=1.0,
        survey=Survey(
            host_memory_bytes=8 << 30,
            num_cores=2,
            cpu_name="CPU",
            num_gpus=gpus,
            device_name="GPU" if gpus else "CPU",
            device_memory_bytes=None,
        ),
    )


def inventory(*nodes: Node) -> Inventory:
    return Inventory(nodes=sorted_nodes(nodes))


def process(name: str, gpu_id: str, uuid: str = "") -> Whereabouts:
    return Whereabouts(
        node_id=f"id of {name}",
        address="10.0.0.1",
        pid=1,
        device="cpu",
        gpu_id=gpu_id,
        visible="",
        uuid=uuid,
    )


def cell(tp: int, **hardware: float) -> CellConfig:
    return CellConfig(
        model=ModelConfig(num_layers=1, hidden=64),
        data=DataConfig(global_batch=4, seq_len=16),
        parallel=ParallelConfig(tp=tp),
        cluster=ClusterConfig(hardware=HardwareConfig(**hardware)),
    )


def many_nodes(num_nodes: int, **fields: object) -> ClusterConfig:
    return ClusterConfig(kind=ClusterKind.EMULATED, num_nodes=num_nodes, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpus", "device", "world"),
    [(0, Device.CPU, 4), (1, Device.CPU, 4), (2, Device.CUDA, 2), (8, Device.CUDA, 8)],
)
def test_auto_takes_gpus_where_there_are_two(gpus: int, device: Device, world: int) -> None:
    seating = seat(ClusterConfig(), inventory(node("a", gpus=gpus)))
    assert (seating.device, seating.world) == (device, world)
    assert f"found {gpus}" in seating.note


@pytest.mark.parametrize(("num_nodes", "per_node"), [(1, 4), (2, 2), (3, 1), (5, 1)])
def test_four_cpu_ranks_are_spread_over_the_nodes(num_nodes: int, per_node: int) -> None:
    nodes = [node(f"node{i}") for i in range(num_nodes)]
    seating = seat(many_nodes(num_nodes), inventory(*nodes))
    assert (seating.ranks_per_node, len(seating.nodes)) == (per_node, num_nodes)


def test_every_gpu_of_the_nodes_with_most_is_used() -> None:
    offered = inventory(node("a", gpus=2), node("b", gpus=8), node("c", gpus=8))
    seating = seat(many_nodes(2), offered)
    assert [n.name for n in seating.nodes] == ["b", "c"]
    assert seating.world == 16


@pytest.mark.parametrize(
    ("config", "asked", "available"),
    [
        (ClusterConfig(ranks_per_node=100), "asked for 100 CPU ranks", "available 8 (a has 8)"),
        (ClusterConfig(device=Device.CUDA), "asked for 1 GPUs", "available 0 (a has 0)"),
        (many_nodes(3, ranks_per_node=2), "asked for 6 CPU ranks", "available 8"),
    ],
)
def test_too_many_ranks_are_refused_with_both_numbers(
    config: ClusterConfig, asked: str, available: str
) -> None:
    with pytest.raises(ClusterError) as caught:
        seat(config, inventory(node("a")))
    assert asked in str(caught.value)
    assert available in str(caught.value)
    assert "cluster." in str(caught.value)


def test_nodes_are_sorted_as_people_count() -> None:
    names = ["node0", "node2", "node10", "10.0.0.9", "10.0.0.10"]
    shuffled = [node(name) for name in names]
    random.Random(1).shuffle(shuffled)
    assert [n.name for n in sorted_nodes(shuffled)] == [
        "10.0.0.9",
        "10.0.0.10",
        "node0",
        "node2",
        "node10",
    ]


def test_ranks_go_by_node_then_device_whatever_ray_started_first() -> None:
    seating = seat(many_nodes(2), inventory(node("node2", gpus=2), node("node10", gpus=2)))
    found = [process("node10", "1"), process("node2", "1"), process("node10", "0")]
    found.append(process("node2", "0"))
    assert rank_order(found, seating) == [3, 1, 2, 0]


def test_a_tensor_parallel_group_is_one_bundle() -> None:
    seating = seat(many_nodes(2, ranks_per_node=4), inventory(node("a"), node("b")))
    assert [(b.node.name, b.num_ranks) for b in bundles_of(seating, 2)] == [
        ("a", 2),
        ("a", 2),
        ("b", 2),
        ("b", 2),
    ]
    assert warning_of(seating, cell(4)) == ""


def test_a_group_larger_than_a_node_is_cut_with_a_warning() -> None:
    seating = seat(many_nodes(2, ranks_per_node=2), inventory(node("a"), node("b")))
    assert [b.num_ranks for b in bundles_of(seating, 4)] == [2, 2]
    text = warning_of(seating, cell(4))
    assert "parallel.tp=4 does not fit in nodes of 2 ranks (these do: 1, 2)" in text


def test_the_warning_shows_what_the_network_carries() -> None:
    """4 ranks, 2 on each node: of 3 peers 2 are elsewhere. One layer, b s h = 4 x 16 x 64.

    Activations: 2 forward and 2 backward per layer, embedding and output layer; 1.5 times each in
    fp32. The loss: 1.5 x 3 numbers per token.
    """
    seating = seat(many_nodes(2, ranks_per_node=2), inventory(node("a"), node("b")))
    sent = 1.5 * 4 * (6 * 4 * 16 * 64 + 3 * 4 * 16)
    text = warning_of(seating, cell(4, inter_node_GBps=0.001))
    assert f"{sent * 2 / 3 / 1e6:.4g} MB of a rank in each step" in text
    assert f"at least {2 * sent * 2 / 3 / 1e6:.3g} s per step at 0.001 GB/s" in text


def test_cpu_ranks_need_no_gpu_and_no_core() -> None:
    assert resources_of(node("a"), 2, Device.CPU) == {"pin_a": 2.0}
    assert resources_of(node("a"), 2, Device.CUDA) == {"pin_a": 2.0, "GPU": 2.0}


def test_two_ranks_on_one_gpu_are_refused() -> None:
    check_distinct([process("a", "", ""), process("a", "", ""), process("a", "0", "GPU-x")])
    with pytest.raises(ClusterError, match="GPU-x"):
        check_distinct([process("a", "0", "GPU-x"), process("a", "1", "GPU-x")])


def test_hardware_says_nothing_of_names() -> None:
    assert inventory(node("a"), node("b")).hardware() == inventory(node("c"), node("d")).hardware()
    assert inventory(node("a")).hardware() != inventory(node("a", gpus=1)).hardware()
