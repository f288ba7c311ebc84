"""A step that was launched: its result, once somebody asks for it."""

from collections.abc import Callable

from loray.models.step import StepResult


class Launched:
    def __init__(self, fetch: Callable[[], StepResult], is_done: Callable[[], bool]) -> None:
        self._fetch = fetch
        self._is_done = is_done
        self._result: StepResult | None = None

    @property
    def is_done(self) -> bool:
        """Whether `result` would come back at once."""
        return self._result is not None or self._is_done()

    def result(self) -> StepResult:
        if self._result is None:
            self._result = self._fetch()
        return self._result
