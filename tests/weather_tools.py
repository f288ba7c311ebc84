"""Two tools that a model may be offered, and the question that goes with them."""

from typing import Any

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Zürich"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "tells it", "parameters": CITY}}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
