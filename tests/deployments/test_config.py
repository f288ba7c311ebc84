"""The configuration tree, and how `loray serve` reads it from the file that `serve deploy` reads."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from loray.deployments.config import ServerArgs
from loray.deployments.launch_plan import LaunchError, Overrides, make_plan

SHIPPED = Path(__file__).resolve().parents[2] / "serve_config.yaml"


def write(folder: Path, args: dict[str, Any], **changes: Any) -> Path:
    application = {"name": "loray", "route_prefix": "/", "import_path": "loray.deployments.app:build", "args": args}
    path = folder / "serve_config.yaml"
    path.write_text(yaml.safe_dump({"applications": [application], **changes}))
    return path


def test_an_empty_config_serves_the_bundled_model() -> None:
    args = ServerArgs()
    assert args.model.id == "smollm2-135m"
    assert args.tensor_parallel_size == 1


def test_a_field_of_the_ingress_that_is_set_leaves_the_others_at_their_defaults() -> None:
    ingress = ServerArgs.model_validate({"ingress": {"min_replicas": 2}}).ingress
    assert (ingress.min_replicas, ingress.max_replicas, ingress.target_ongoing_requests) == (2, 4, 32)


@pytest.mark.parametrize("tree", [{"modle": {}}, {"model": {"idd": "x"}}, {"scheduler": {"max_batch_tokens": 8, "chunked": True}}])
def test_an_unknown_field_is_refused(tree: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        ServerArgs.model_validate(tree)


@pytest.mark.parametrize(
    "tree",
    [
        {"tensor_parallel_size": 0},
        {"kv_cache": {"memory_fraction": 1.0}},
        {"kv_cache": {"cpu_bytes": 0}},
        {"scheduler": {"max_batch_tokens": 0}},
        {"device": "tpu"},
        {"driver": {"min_replicas": 0}},
        {"limits": {"max_body_bytes": 0}},
        {"limits": {"request_timeout_s": 0}},
        {"limits": {"keep_alive_s": "inf"}},
        {"api_keys": {"inference": ""}},
        {"api_keys": {"inference": {}}},
        {"api_keys": {"inference": {"a": "same", "b": "same"}}},
        {"tracing": {"otlp_endpoint": "collector:4318"}},
    ],
)
def test_a_value_out_of_range_is_refused(tree: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ServerArgs.model_validate(tree)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"inference": "same", "admin": "same"}, "admin: is an inference key as well"),
        ({"inference": {"a": "x", "b": "same"}, "admin": "same"}, "admin: is an inference key as well"),
        ({"inference": {"a": "x", "b": "clé"}}, r"inference \(b\): a key is printable ASCII"),
        ({"inference": " x"}, r"inference \(default\): a key is printable ASCII without a space"),
        ({"admin": "x "}, "admin: a key is printable ASCII without a space"),
        ({"admin": "x\n"}, "admin: a key is printable ASCII without a space"),
    ],
)
def test_a_key_that_opens_too_much_or_can_not_be_sent_is_refused_by_name(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ServerArgs.model_validate({"api_keys": keys})


@pytest.mark.parametrize(
    "tree",
    [
        {"api_keys": {"inference": "team-key ", "admin": "SECRET"}},
        {"api_key": {"admin": "SECRET"}},
        {"api_keys": {"admin": ["SECRET"]}},
        {"adapters": {"storage_options": {"s3": "SECRET"}}},
    ],
)
def test_no_mistake_shows_what_it_is_about_as_it_may_be_a_secret(tree: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        ServerArgs.model_validate(tree)
    assert "SECRET" not in str(caught.value)


def test_a_key_may_be_of_several_words() -> None:
    assert ServerArgs.model_validate({"api_keys": {"inference": "open ~ sesame!", "admin": "x"}}).api_keys.admin == "x"


def test_sizes_are_read_as_people_write_them() -> None:
    assert ServerArgs.model_validate({"kv_cache": {"cpu_bytes": "512MiB"}}).kv_cache.cpu_bytes == 512 << 20


@pytest.mark.parametrize(("inference", "named"), [(None, {}), ("one", {"default": "one"}), ({"a": "x", "b": "y"}, {"a": "x", "b": "y"})])
def test_inference_keys_have_names(inference: Any, named: dict[str, str]) -> None:
    assert ServerArgs.model_validate({"api_keys": {"inference": inference}}).api_keys.named == named


def test_a_config_can_not_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        ServerArgs().tensor_parallel_size = 2  # type: ignore[misc]


def test_the_shipped_file_is_valid_and_stays_on_this_machine() -> None:
    plan = make_plan(SHIPPED, Overrides())
    assert plan.url == "http://127.0.0.1:8000"
    assert plan.args.model.id == "smollm2-135m"
    assert plan.args.adapters.local_roots == [SHIPPED.parent / "adapters", SHIPPED.parent / "examples/adapters"]


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, {"model": {"id": "owner/name", "revision": "v1", "max_total_tokens": 99}}, http_options={"port": 7000})
    plan = make_plan(path, Overrides(model="other/model", tensor_parallel_size=2, host="0.0.0.0", port=9000))
    assert plan.args.model.model_dump() == {
        "id": "other/model",
        "revision": None,  # it belonged to the file's model
        "dtype": "auto",
        "max_total_tokens": 99,
        "trust_remote_code": False,
        "implementation": "auto",
        "quantization": None,
        "chat_template": None,
        "pooling": "mean",
    }
    assert plan.args.tensor_parallel_size == 2
    assert (plan.deploy.http_options.host, plan.deploy.http_options.port) == ("0.0.0.0", 9000)
    assert plan.url == "http://127.0.0.1:9000"


def test_relative_folders_count_from_the_file_and_those_of_the_command_line_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    here = tmp_path / "here"
    (here / "model").mkdir(parents=True)
    monkeypatch.chdir(here)
    path = write(tmp_path, {"model": {"id": "model"}, "adapters": {"local_roots": ["mine", "/elsewhere"]}})
    plan = make_plan(path, Overrides())
    assert plan.args.model.id == str(tmp_path / "model")
    assert plan.args.adapters.local_roots == [tmp_path / "mine", Path("/elsewhere")]
    assert make_plan(path, Overrides(model="model")).args.model.id == str(here / "model")


def test_a_mistake_on_the_command_line_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, {"tensor_parallel_size": 2})
    with pytest.raises(LaunchError, match="^on the command line: args.tensor_parallel_size: "):
        make_plan(path, Overrides(tensor_parallel_size=0))


def test_every_mistake_is_one_line_with_the_dotted_name_of_its_field(tmp_path: Path) -> None:
    path = write(tmp_path, {"scheduler": {"max_batch_tokens": "many"}, "modle": {}})
    with pytest.raises(LaunchError) as refusal:
        make_plan(path, Overrides())
    assert len(refusal.value.lines) == 2
    assert any("args.scheduler.max_batch_tokens: " in line for line in refusal.value.lines)
    assert any("args.modle: " in line for line in refusal.value.lines)


@pytest.mark.parametrize("text", ["", "a: [", "- 1", "applications: []", "applications: 3"])
def test_a_file_that_is_no_serve_config_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "serve_config.yaml"
    path.write_text(text)
    with pytest.raises(LaunchError) as refusal:
        make_plan(path, Overrides())
    assert all(line.startswith(str(path)) and "\n" not in line for line in refusal.value.lines)


def test_a_missing_file_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LaunchError, match=r"binary\.yaml is not YAML: 'utf-8' codec can't decode"):
        make_plan(tmp_path / "binary.yaml", Overrides())
    with pytest.raises(LaunchError, match=r"nowhere\.yaml can't be read: No such file"):
        make_plan(tmp_path / "nowhere.yaml", Overrides())


def test_what_only_serve_deploy_can_apply_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {})
    tree = yaml.safe_load(path.read_text())
    tree["applications"][0]["deployments"] = [{"name": "Driver", "num_replicas": 2}]
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(LaunchError, match="serve deploy"):
        make_plan(path, Overrides())
