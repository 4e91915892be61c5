"""Say in the rendezvous store what this rank waits for when a wait grows long, and read the others.

Two ranks that wait for each other in different collectives would otherwise only see a timeout.
"""

import contextlib
import threading
import time
from collections.abc import Iterator

from torch.distributed.distributed_c10d import Store

NOTICE_S = 2.0
PREFIX = "waiting"
NOTHING = "nothing"


class Watch:
    """One rank's notice board in the store of its process group."""

    def __init__(self, store: Store | None, *, rank: int, world: int) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._line = ""
        self._since: float | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def waiting(self, line: str) -> Iterator[None]:
        """Note that this rank waits; after NOTICE_S seconds others can read the line.

        The line of a wait that failed stays: it is what the other ranks have to tell.
        """
        if self._thread is None and self._store is not None:
            self._thread = threading.Thread(target=self._publish_long_waits, daemon=True)
            self._thread.start()
        self._line, self._since = line, time.monotonic()
        yield
        self._since = None

    def report(self) -> str:
        """Return what every rank that published a line waits for."""
        if self._store is None:
            return ""
        lines = []
        for rank in range(self._world):
            key = f"{PREFIX}/{rank}"
            with contextlib.suppress(Exception):
                if self._store.check([key]):
                    lines.append(f"rank {rank} waits in {self._store.get(key).decode()}")
                else:
                    lines.append(f"rank {rank} waits in {NOTHING}")
        return "; ".join(lines)

    def publish(self, line: str) -> None:
        """Write this rank's line now."""
        if self._store is not None:
            with contextlib.suppress(Exception):
                self._store.set(f"{PREFIX}/{self._rank}", line)

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)
            self._thread = None

    def _publish_long_waits(self) -> None:
        self.publish(NOTHING)
        published: float | None = None
        while not self._stop.wait(0.25):
            since = self._since
            if published is not None and since != published:
                published = None
                self.publish(NOTHING)
            if since is not None and since != published and time.monotonic() - since > NOTICE_S:
                published = since
                self.publish(self._line)
        if published is not None and self._since != published:
            self.publish(NOTHING)
