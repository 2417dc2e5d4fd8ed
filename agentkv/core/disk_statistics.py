"""What the disk tier has done, in numbers. A value: the disk's store counts, the engine shows."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DiskStatistics:
    """Counts of blocks since start."""

    num_written: int = 0
    num_read: int = 0
    """Read back as they were written."""
    num_refused: int = 0
    """Not taken because too many were on their way already."""
    num_failed_writes: int = 0
    num_bad_reads: int = 0
    """Files that were missing, torn or of other content when they were needed."""
    num_timeouts: int = 0
    """Not read in time, and given up."""
    last_failure: str = ""
    """Why the last write failed, such as a full disk."""
