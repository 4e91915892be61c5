"""Flat parameters: any config, any key, any length, and nothing lost."""

from mlflow import MlflowClient

from rayzero.config.build import defaults
from rayzero.tracking.mlflow_tracker import MlflowTracker
from rayzero.tracking.params import MAX_VALUE_CHARS, flat_params, param_key
from tests.report.cells import ok_cell


def test_groups_become_dotted_keys_and_values_text() -> None:
    config = {"zero": {"stage": 2, "units": None}, "run": {"probe": True, "names": ["a", "b"]}}
    assert flat_params(config) == {
        "zero.stage": "2",
        "zero.units": "null",
        "run.probe": "true",
        "run.names": '["a", "b"]',
    }


def test_empty_groups_are_kept() -> None:
    assert flat_params({"cluster": {"env": {}}}) == {"cluster.env": "{}"}


def test_long_values_are_cut_and_stay_apart_by_their_hash() -> None:
    texts = {"a": "x" * 700 + "1", "b": "x" * 700 + "2", "c": "y" * 300}
    params = flat_params(texts)
    assert len(params["a"]) == MAX_VALUE_CHARS
    assert params["a"] != params["b"]
    assert params["c"] == "y" * 300


def test_odd_keys_are_mended_and_stay_apart() -> None:
    odd = ["a*b", "a?b", "../x", "/x", "a//b", ".", "", "\N{GREEK SMALL LETTER ALPHA}", "k" * 400]
    keys = {param_key(key) for key in odd}
    assert len(keys) == len(odd)
    assert max(map(len, keys)) <= 250
    assert param_key("data.factory_args.a b/c-d:e") == "data.factory_args.a b/c-d:e"


def test_mlflow_takes_every_key_of_a_wild_config(
    tracker: MlflowTracker, client: MlflowClient
) -> None:
    wild: dict[str, object] = {f"key{i}": i for i in range(150)}
    odd = ("../x", "a//b", "", ".", "a*b", "\N{SNOWMAN}", "a\nb", "k" * 400)
    wild |= dict.fromkeys(odd, "v")
    wild |= {"v300": "x" * 300, "v700": "x" * 700, "v7000": "x" * 7000, "full": defaults()}
    tracker.open_sweep("wild", "?", {}, {})
    run_id = tracker.open_cell("a", wild)
    params = client.get_run(run_id).data.params
    assert params == flat_params(wild)
    assert len(params) > 220
    assert tracker.problems == ()


def test_a_key_that_mlflow_refuses_does_not_lose_the_others(
    tracker: MlflowTracker, client: MlflowClient
) -> None:
    tracker.open_sweep("refused", "?", {}, {})
    run_id = tracker.open_cell("a", {"b": 1, "c": 2})
    client.log_param(run_id, "cell.stage", "another value than the record's")
    tracker.close_cell(ok_cell(2, 1, cell="a"))
    params = client.get_run(run_id).data.params
    assert params["cell.tp"] == "1"
    assert params["cell.precision"] == "fp32"
    assert any("cell.stage" in problem for problem in tracker.problems)
