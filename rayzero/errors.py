"""Errors a user can cause: each message names the key, the value found and what is allowed."""

from rayzero.records import Status


class RayzeroError(Exception):
    """The root of all errors this project raises on purpose."""


class ConfigError(RayzeroError):
    """A key, a value or a combination of values that cannot be run."""


class CombinationError(ConfigError):
    """Values allowed one by one that do not fit together; in a sweep the cell is impossible."""


class BusyError(RayzeroError):
    """A folder or device that another process uses now."""


class ClusterError(RayzeroError):
    """The cluster cannot give what was asked, or cannot be reached."""


class GangError(ClusterError):
    """A rank raised, died or hung; the whole gang has been ended and must be started anew."""

    def __init__(self, cause: str, *, status: Status, rank: int | None, details: str = "") -> None:
        super().__init__(cause)
        self.cause = cause
        """One line: what happened to the guilty rank."""
        self.status = status
        """failed, worker_lost, timeout or out_of_memory."""
        self.rank = rank
        """The guilty rank; None where no single rank is to blame."""
        self.details = details
        """Its traceback, the end of its error log, or the stacks of ranks that hang."""


class DataError(RayzeroError):
    """The training data is missing, too small, or differs between ranks."""


class TrackingError(RayzeroError):
    """The MLflow store cannot be reached or written."""


class EngineError(RayzeroError):
    """The engine was used in a way that would give wrong weights."""


class ShardedParameterError(EngineError):
    """A parameter was used while its values live on other ranks."""


class NonFiniteGradientError(EngineError):
    """A gradient holds NaN or infinity and the policy says to stop."""


class CollectiveError(RayzeroError):
    """Ranks wait for each other in different collectives, or a peer is gone."""


class NotBuiltYetError(ConfigError):
    """A documented option that this version of rayzero does not run yet."""


class RecordError(RayzeroError):
    """A matrix or a cell's record on disk cannot be read back."""


class CheckpointError(RayzeroError):
    """A checkpoint cannot be written, does not exist, or does not fit the engine."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint on disk is cut short, changed or half-written."""


class OffloadError(RayzeroError):
    """Offloaded states cannot be kept where they were told to go."""
