"""The adapter registry of one application: an actor beside Serve's replicas, which are all replaced when the application's config changes.

Ends a moment after its application, and when nobody has followed it for long: then the drivers are of another version.
"""

import asyncio
import time
from importlib.metadata import version
from threading import Thread
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.schema import ApplicationStatus
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from loray.deployments.adapter_registry import AdapterRegistry

NAMESPACE = "loray"
MAX_CALLS = 10_000  # at once; a driver has one under way, an admin another
LOOK_S = 2.0  # between two looks at the application, 30 ms of a core each; Serve takes longer to delete one
TELL_S = 1.0  # all who follow that they need not any more
PATIENCE_S = 60.0  # with Serve, which may be restarted
LONELY_S = 3600.0  # longer than a new driver takes to read its model


class RegistryActor(AdapterRegistry):
    def __init__(self, application: str) -> None:
        super().__init__()
        self._followed = time.monotonic()
        itself = ray.get_runtime_context().current_actor
        Thread(target=self._end_with, args=(application, itself), daemon=True).start()

    async def changes(self, poll: bytes) -> bytes:
        self._followed = time.monotonic()
        return await super().changes(poll)

    def _end_with(self, application: str, itself: Any) -> None:
        seen = time.monotonic()
        while time.monotonic() < min(seen + PATIENCE_S, self._followed + LONELY_S):
            time.sleep(LOOK_S)
            try:
                known = serve.status().applications.get(application)
            except Exception:  # Serve does not answer
                continue
            if known is None:
                break
            if known.status == ApplicationStatus.DELETING:  # its drivers may take minutes to end what they have
                self.is_over = True
                time.sleep(TELL_S)
                break
            seen = time.monotonic()
        ray.kill(itself)


class RegistryLink:
    """A replica's way to its application's registry, which is made where there is none."""

    def __init__(self, application: str) -> None:
        self._application = application
        self._actor: Any = None

    async def ask(self, method: str, *messages: bytes) -> bytes:
        """Raises Ray's errors."""
        if self._actor is None:
            self._actor = await asyncio.to_thread(_made, self._application)
        try:
            answer: bytes = await getattr(self._actor, method).remote(*messages)
        except RayActorError:
            self._actor = None  # it may have ended for good
            raise
        return answer


def registry_name(application: str) -> str:
    return f"adapter registry of {application}, loray {version('loray')}"


def _made(application: str) -> Any:
    options = ray.remote(RegistryActor).options(
        name=registry_name(application),
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        max_restarts=-1,
        max_concurrency=MAX_CALLS,
        num_cpus=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(None),  # else it ends with the driver that makes it
    )
    return options.remote(application)
