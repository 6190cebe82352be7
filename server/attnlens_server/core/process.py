"""What exists once in a process, whatever it serves: state, threads and admission."""

from asyncio import Semaphore
from enum import Enum

from attnlens_server.core.admission import Admission
from attnlens_server.core.execution import Workers
from attnlens_server.errors import NotReadyError, ShuttingDownError


class State(Enum):
    """Lifecycle state of the server."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"


class Process:
    """State and shared resources of a process.

    Args:
        admission: Admission control.
        num_workers: Number of threads for slow functions.

    Attributes:
        state: Lifecycle state of the server.
        problem: Reason why the server is not healthy although it accepts requests, or "".
        admission: See above.
        workers: Threads for slow functions.
        tokenizing: Limits concurrent tokenization, so that waiting calls hold no working memory.
    """

    def __init__(self, admission: Admission, num_workers: int) -> None:
        self.state = State.STARTING
        self.problem = ""
        self.admission = admission
        self.workers = Workers(num_workers)
        self.tokenizing = Semaphore(num_workers)

    @property
    def is_serving(self) -> bool:
        """Whether the server accepts requests and is healthy."""
        return self.state is State.SERVING and not self.problem

    def check_serving(self) -> None:
        """Raise NotReadyError or ShuttingDownError unless the server accepts requests."""
        if self.state is State.STARTING:
            raise NotReadyError("the server is starting: try again soon", retry_after_s=0.5)
        if self.state is State.DRAINING:
            raise ShuttingDownError("the server is shutting down: use another server")
        if self.state is State.FAILED:
            raise ShuttingDownError("the engine has stopped: restart the server, or open the model again")

    def check_healthy(self) -> None:
        """Raise the errors of `check_serving`, or NotReadyError with the reason if there is a problem."""
        self.check_serving()
        if self.problem:
            raise NotReadyError(f"the server is not healthy: {self.problem}")
