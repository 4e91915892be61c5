"""Every file in conf/ composes, and what it composes to builds the frozen config."""

import math
from collections.abc import Iterator

import pytest
from hydra import compose, initialize_config_dir

from rayzero.app import VERBS, conf_folder, register_defaults, to_plain
from rayzero.config.build import build, defaults
from rayzero.config.build import to_plain as config_to_plain
from rayzero.config.cell import CellConfig
from rayzero.sweep.choices import quote_choice

CONF = conf_folder()
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())
OPTIONS = [(path.parent.name, path.stem) for path in sorted(CONF.glob("*/*.yaml"))]
EXPERIMENTS = [option for group, option in OPTIONS if group == "experiment"]
NEEDED = {
    ("cluster", "address"): ["cluster.address=head:6379"],
    ("model", "factory"): ["model.factory=package.module:function"],
    ("model", "hf"): ["model.config=llama"],
    ("data", "factory"): ["data.factory=package.module:function"],
    ("engine", "zero_redundancy"): ["stage=1"],
    ("engine", "fsdp2"): ["stage=3"],
    ("engine", "deepspeed"): ["stage=2"],
}
"""What an option cannot know and asks its user for."""


@pytest.fixture(autouse=True)
def hydra_at_conf() -> Iterator[None]:
    """Point Hydra at conf/ for one test."""
    register_defaults()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        yield


def composed(verb: str, *overrides: str) -> CellConfig:
    """Compose a verb's config as the command line does, and build it."""
    return build(to_plain(compose(verb, [quote_choice(override) for override in overrides])))


def test_the_groups_are_the_documented_ones() -> None:
    documented = (
        "model stage offload parallel precision data optimizer engine cluster tracking experiment"
    )
    assert sorted(documented.split()) == GROUPS


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_a_config(verb: str) -> None:
    composed(verb)


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_each_option_builds(group: str, option: str) -> None:
    composed("run", f"{group}={option}", *NEEDED.get((group, option), []))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_names_itself_asks_a_question_and_has_axes(name: str) -> None:
    config = composed("sweep", f"experiment={name}")
    assert config.experiment.name == name
    assert config.experiment.question.endswith("?")
    with_hydra = compose("sweep", [f"experiment={name}"], return_hydra_config=True)
    assert with_hydra.hydra.sweeper.params


def test_the_usual_options_say_nothing_else_than_the_dataclasses() -> None:
    found = config_to_plain(composed("run", "run.output=/results"))
    expected = defaults()
    assert isinstance(expected["run"], dict)
    expected["run"]["output"] = "/results"
    assert found == expected


def test_a_stage_is_chosen_by_its_number() -> None:
    assert composed("run", "stage=3").zero.stage == 3


def test_an_open_mapping_takes_any_key() -> None:
    assert composed("run", "cluster.env.NCCL_DEBUG=INFO").cluster.env == {"NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize(
    ("preset", "bytes_per_parameter"),
    [("fp32", (4, 4, 8)), ("bf16", (2, 4, 12)), ("paper", (2, 2, 12)), ("fp16", (2, 4, 12))],
)
def test_precision_presets_take_the_promised_bytes(
    preset: str, bytes_per_parameter: tuple[int, int, int]
) -> None:
    precision = composed("run", f"precision={preset}").precision
    master = precision.master.itemsize if precision.has_master else 0
    found = (
        precision.params.itemsize,
        precision.accumulate.itemsize,
        master + 2 * precision.moments.itemsize,
    )
    assert found == bytes_per_parameter


@pytest.mark.parametrize(
    ("profile", "ranks", "memory_GB", "tflops"),
    [
        ("dgx_v100", 16, 32, 125),
        ("dgx_a100_40", 8, 40, 312),
        ("dgx_a100_80", 8, 80, 312),
        ("dgx_h100", 8, 80, 989),
        ("h200", 8, 141, 989),
    ],
)
def test_hardware_profiles_carry_the_published_figures(
    profile: str, ranks: int, memory_GB: float, tflops: float
) -> None:
    cluster = composed("run", f"cluster={profile}").cluster
    assert cluster.name == profile
    assert cluster.ranks_per_node == ranks
    assert cluster.hardware.device_memory_GB == memory_GB
    assert cluster.hardware.device_tflops == tflops
    links = (cluster.hardware.intra_node_GBps, cluster.hardware.host_link_GBps)
    assert all(link is not None and math.isfinite(link) and link > 0 for link in links)
