"""Theory answers fast: memory or traffic of 10,000 configurations in 2 s, as flat by flat."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

from rayzero.config.cell import CellConfig
from rayzero.config.data import DataConfig
from rayzero.config.model import Checkpointing
from rayzero.config.parallel import ParallelConfig
from rayzero.config.zero import OffloadConfig, Place, ZeroConfig
from rayzero.records import Carrier
from rayzero.studies.asked import MODELS, PRECISIONS
from rayzero.theory.memory import cell_holdings, holdings_of
from rayzero.theory.question import question_of
from rayzero.theory.tp_traffic import tp_transfers
from rayzero.theory.traffic import cell_sent_bytes, sent_bytes, step_transfers

CONFIGURATIONS, MOST_CPU_S = 10_000, 2.0
HEAD_ROOM = 2
"""Other work on a shared core slows us more than it slows the loop below."""
BATCH = 500
LOOP_S = 0.043
"""CPU time of the loop below on a core that nothing else uses."""
GLOBAL_BATCH = 4096
PARAMS_ON_DISK = OffloadConfig(optimizer=Place.DISK, params=Place.DISK, folder="states")
OFFLOADS = (
    OffloadConfig(),
    OffloadConfig(optimizer=Place.HOST),
    OffloadConfig(optimizer=Place.DISK, folder="states"),
)


def configurations() -> Iterator[tuple[CellConfig, int]]:
    """Yield cells and worlds: models, stages, tp, replicas, precisions, offload, batches, sizes."""
    names = ("7.5B", "13B", "128B", "1T")
    axes = (names, range(4), (1, 2, 4, 8), (1, 2), PRECISIONS, OFFLOADS, (1, 2, 4), (8, 64, 1024))
    for name, stage, tp, replicate, precision, offload, micro_steps, per in itertools.product(
        *axes
    ):
        world = per * tp * replicate
        dp = per * replicate
        micro_batch = GLOBAL_BATCH // dp // micro_steps or None
        config = CellConfig(
            model=MODELS[name],
            zero=ZeroConfig(stage=stage, bucket_elements=10**8),
            parallel=ParallelConfig(tp=tp, replicate=replicate),
            precision=PRECISIONS[precision],
            offload=offload,
            data=DataConfig(global_batch=GLOBAL_BATCH, micro_batch=micro_batch),
        )
        yield config, world


def memory(config: CellConfig, world: int) -> object:
    """Ask for what rank 0 holds."""
    return cell_holdings(config, world, rank=0, carrier=Carrier.NATIVE)


def traffic(config: CellConfig, world: int) -> object:
    """Ask for what rank 0 sends."""
    return cell_sent_bytes(config, world, rank=0)


def loop_s() -> float:
    """Return the CPU time of a million additions: how slow the machine is, and how shared."""
    started_s, total = time.process_time(), 0
    for number in range(10**6):
        total += number
    return time.process_time() - started_s


def test_10_000_configurations_are_evaluated_in_2_s() -> None:
    every = configurations()
    took_s, loops_s = {memory: 0.0, traffic: 0.0}, 0.0
    for _ in range(CONFIGURATIONS // BATCH):
        cells = list(itertools.islice(every, BATCH))
        assert len(cells) == BATCH
        loops_s += loop_s()
        for evaluate in took_s:
            started_s = time.process_time()
            for config, world in cells:
                evaluate(config, world)
            took_s[evaluate] += time.process_time() - started_s
    slowed = max(1.0, loops_s / (CONFIGURATIONS // BATCH) / LOOP_S)
    for evaluate, each_s in took_s.items():
        print(
            f"{evaluate.__name__}: {each_s:.2f} s of CPU time, {slowed:.2f} times slower than idle"
        )
    assert max(took_s.values()) < MOST_CPU_S * HEAD_ROOM * slowed


def varied_cells() -> list[tuple[CellConfig, int]]:
    """Return cells of a small and a few large models that meet all that counting depends on."""
    cells = list(itertools.islice(configurations(), 0, None, 397))
    small = [
        (replace(config, model=MODELS["scaled"]), world)
        for config, world in itertools.islice(configurations(), 0, 2592, 29)
        if config.parallel.tp <= MODELS["scaled"].num_heads
    ]
    for config, world in small[-9:]:
        model = replace(config.model, checkpointing=Checkpointing.FULL, dropout=0.1)
        in_sequence = replace(config.parallel, sequence=True)
        for zero in (
            ZeroConfig(stage=3, persistence_elements=20_000),
            ZeroConfig(stage=2, overlap=False),
        ):
            other = replace(config, zero=zero, model=model, parallel=in_sequence)
            half = OffloadConfig(optimizer=Place.HOST, fraction=0.5)
            cells += [(other, world), (replace(other, offload=half), world)]
        cells.append((replace(config, offload=PARAMS_ON_DISK), world))
    return cells + small


def test_counting_flats_gives_the_bytes_of_each() -> None:
    for config, world in varied_cells():
        rank = world - 1
        question = question_of(config, world=world, rank=rank, carrier=Carrier.NATIVE)
        for carrier in Carrier:
            holdings = cell_holdings(config, world, rank=rank, carrier=carrier)
            each = holdings_of(replace(question, carrier=carrier))
            assert set(holdings.entries) == set(each.entries), config
        micro_steps = config.batching(world).accumulation
        listed = (
            *step_transfers(question, backwards=micro_steps),
            *tp_transfers(config, question, micro_steps),
        )
        assert cell_sent_bytes(config, world, rank=rank) == sent_bytes(listed), config
