"""An answer written as JSON, a large one off the event loop. Knows no shapes."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from fastapi import Response

from loray.deployments.off_loop import in_turn_if


async def json_answer(content: Callable[[], Any], is_large: bool, headers: Mapping[str, str] | None = None) -> Response:
    """`content` is called where it is written. By msgspec: json would hold the GIL many times as long, in a thread too."""
    return await in_turn_if(is_large, lambda: Response(msgspec.json.encode(content()), headers=headers, media_type="application/json"))
