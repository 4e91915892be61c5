"""What saving and loading cost: memory stays flat, and a rank reads its own share."""

import gc
from pathlib import Path

import torch
from torch import Tensor, nn

from rayzero.engine import ZeroEngine
from rayzero.engine.state.blocks import BLOCK_BYTES
from tests.ranks import Pools, RankContext
from tests.state.cases import Layout, plain_engine

NUM_SMALL = 200


class Many(nn.Module):
    """Many small parameters."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        small = (nn.Parameter(torch.randn(elements)) for _ in range(NUM_SMALL))
        self.small = nn.ParameterList(small)

    def forward(self) -> Tensor:
        """Return a loss."""
        return torch.stack([p.square().mean() for p in self.small]).mean()


def trained(ctx: RankContext, stage: int, elements: int) -> ZeroEngine:
    engine = plain_engine(ctx, Layout(stage, ctx.world), Many(elements))
    engine.backward(engine())
    engine.step()
    return engine


def resident_bytes() -> int:
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def save_often(ctx: RankContext, folder: Path) -> list[int]:
    with trained(ctx, 1, 5000) as engine:
        sizes = []
        for index in range(20):
            engine.save(folder / f"c{index % 3}", wait=index % 2 == 0)
            sizes.append(resident_bytes())
        return sizes


def test_memory_is_flat_over_twenty_saves(ranks: Pools, tmp_path: Path) -> None:
    """E80."""
    share = 3 * 4 * 5000 * NUM_SMALL // 2
    for sizes in ranks(2)(save_often, tmp_path):
        # A save that kept its staging would add a share each time, eight from here to there.
        assert max(sizes[12:]) - max(sizes[4:12]) < 2 * share, sizes


def bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(lines[0].split()[1])


def save_once(ctx: RankContext, folder: Path) -> None:
    with trained(ctx, 1, 20_000) as engine:
        engine.save(folder)


def load_counted(ctx: RankContext, folder: Path) -> int:
    with trained(ctx, 3, 20_000) as engine:
        before = bytes_read()
        engine.load(folder)
        return bytes_read() - before


def test_a_rank_reads_its_own_share_and_small_files(ranks: Pools, tmp_path: Path) -> None:
    """E80."""
    ranks(2)(save_once, tmp_path / "c")
    small_files = [path for path in (tmp_path / "c").iterdir() if path.suffix != ".bin"]
    small_bytes = sum(path.stat().st_size for path in small_files)
    share = 3 * 4 * 20_000 * NUM_SMALL // 4
    # Weights and two moments: each part of a share may begin and end inside a block.
    bound = share + 2 * small_bytes + 3 * 2 * BLOCK_BYTES
    for count in ranks(4)(load_counted, tmp_path / "c"):
        assert count <= bound, (count, share, small_bytes)
