"""What the HTTP side asks of whoever makes the tokens. Knows neither Ray nor text."""

from collections.abc import AsyncGenerator
from typing import Protocol

from loray.deployments.adapter_records import AdapterChange, AdapterRecord, Changed
from loray.deployments.adapter_status import AdapterStatus
from loray.deployments.request import AdapterRef, AdapterTemplate, GenerationRequest, TokenEvent


class Backend(Protocol):
    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Yields the accepted event, then tokens; the event with the last token carries the finish_reason. Raises a LorayError.

        A request that pools yields no tokens but one event with its embedding, which is the last.
        Closing or cancelling the generator aborts the request, unless its last event was out: then there is nothing to abort."""
        ...

    async def stats(self) -> dict[str, dict[str, float]]:
        """By driver replica, numbers of this moment, such as running, waiting, kv_blocks_used."""
        ...

    async def adapters(self) -> list[str]:
        """Ids of the adapters that can be used now."""
        ...

    async def adapter_statuses(self) -> dict[str, list[AdapterStatus]]:
        """What each replica has, by the replica's id."""
        ...

    async def change_adapter(self, change: AdapterChange) -> Changed:
        """Returns when every replica has taken it; loads have begun, not ended. Raises Unhealthy."""
        ...

    async def is_overtaken(self, record: AdapterRecord) -> bool:
        """Whether an admin has unloaded its adapter since."""
        ...

    async def undo_adapter_change(self, changed: Changed) -> None:
        """As it was before, unless it was changed again since."""
        ...

    async def chat_template(self, adapter: AdapterRef) -> AdapterTemplate:
        """Raises what `generate` would raise of this adapter."""
        ...

    async def healthy(self) -> bool:
        """Whether tokens can be made now."""
        ...
