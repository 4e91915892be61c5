"""DeepSpeed where the extra is installed; a clear word where it is not."""

from importlib.util import find_spec
from typing import Any

import pytest

from rayzero.baselines.deepspeed import import_deepspeed
from rayzero.errors import ConfigError
from rayzero.records import Kind
from tests.baselines.test_peers import BF16, BF16_LOSS, FP32_LOSS, config_of, losses_of, run
from tests.ranks import Pools

IS_INSTALLED = find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(
    not IS_INSTALLED, reason="the extra is not installed: pip install 'rayzero[deepspeed]'"
)
FIRST_BUILD_S = 280.0
"""DeepSpeed compiles its CPU kernel on first use."""


@pytest.mark.skipif(IS_INSTALLED, reason="the extra deepspeed is installed")
def test_a_missing_extra_is_named_with_the_way_to_install_it() -> None:
    with pytest.raises(
        ConfigError, match=r"engine=deepspeed .* pip install 'rayzero\[deepspeed\]'"
    ):
        import_deepspeed()


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_deepspeed_sees_the_losses_of_our_engine(ranks: Pools, accumulation: int) -> None:
    for precision, bound in (({}, FP32_LOSS), (BF16, BF16_LOSS)):
        chosen: dict[str, Any] = {"precision": precision, "accumulation": accumulation}
        ours = losses_of(ranks(2)(run, config_of("rayzero", 2, **chosen)))
        for stage in (1, 2, 3):
            config = config_of("deepspeed", stage, **chosen)
            reports = ranks(2)(run, config, deadline_s=FIRST_BUILD_S)
            assert losses_of(reports) == pytest.approx(ours, rel=bound), f"stage {stage}"
            assert reports[0].steps[0].grad_norm > 0
            num_bytes = 4 * reports[0].num_params
            moments = reports[0].holdings.bytes_of(Kind.MOMENTS)
            assert moments == pytest.approx(num_bytes, rel=0.1), f"stage {stage}"
