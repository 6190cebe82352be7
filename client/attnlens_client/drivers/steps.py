"""How blocking code carries out the steps of the core, whatever makes the calls. See core/events.py."""

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Protocol, TypeVar

from attnlens_client.core.events import Cancel, Event, Item, Start, Steps

_T = TypeVar("_T")


class Running(Protocol):
    """The calls of one method that are under way: several with one reply each, or one stream."""

    def start(self, command: Start) -> None:
        """Start a call."""

    def wait(self, seconds: float | None) -> Event | None:
        """Return the next event. None: there was none for so many seconds."""

    def cancel(self) -> None:
        """End whatever still runs."""


class StepsDriver(ABC):
    """Runs methods in the thread that asks for them. Any number of threads may use it."""

    @abstractmethod
    def running(self) -> Running:
        """Return a place for the calls of one method."""

    @abstractmethod
    def close(self) -> None:
        """Cancel what is running, and let nothing new start."""

    def result(self, steps: Steps[_T]) -> _T:
        """Return the only item of a method."""
        [result] = self.items(steps)
        return result

    def items(self, steps: Steps[_T]) -> Generator[_T]:
        """Yield the items of a method as they come."""
        running = self.running()
        event = None
        try:
            while True:
                try:
                    command = steps.send(event)
                except StopIteration:
                    return
                event = None
                if isinstance(command, Item):
                    yield command.value
                elif isinstance(command, Start):
                    running.start(command)
                elif isinstance(command, Cancel):
                    running.cancel()
                    running = self.running()
                else:
                    event = running.wait(command.seconds)
        finally:
            running.cancel()
            steps.close()
