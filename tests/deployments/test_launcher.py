"""Ray that fails to start is one line, whatever it raises."""

from collections.abc import Callable
from typing import Any

import pytest
import ray
from ray import serve
from ray.exceptions import ActorDiedError

from loray.deployments import launcher
from loray.deployments.launch_plan import LaunchError, Overrides, make_plan
from tests.deployments.test_config import SHIPPED


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (Exception("The current node timed out\n during startup."), "Ray can't start: The current node timed out during startup."),
        (PermissionError("not there"), "Ray can't start: not there; it needs a HOME and a RAY_TMPDIR where files can be written"),
    ],
)
def test_ray_that_does_not_start(error: Exception, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", raising(error))
    with pytest.raises(LaunchError) as refusal:
        launcher._init_ray(2)
    assert refusal.value.lines == (line,)


def test_serve_that_loses_its_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "start", raising(ActorDiedError()))
    monkeypatch.setattr(serve, "RunTarget", lambda *_, **__: None)
    monkeypatch.setattr("loray.deployments.app.build", lambda args: None)
    monkeypatch.setattr(launcher, "_logs", lambda: "LOGS")
    with pytest.raises(LaunchError) as refusal:
        launcher._start(make_plan(SHIPPED, Overrides()), signals=None)  # type: ignore[arg-type]
    (line,) = refusal.value.lines
    assert line.startswith("Ray Serve can't start: The actor died") and line.endswith("; logs are in LOGS") and "\n" not in line
