"""How often a stream gets a message: at every step while there are few, less often among many.

A message costs the server and its client some time whatever it holds. With dozens of streams that
would be a good part of a step, on the cores that compute the next; so tokens of several steps then
share a message. First tokens and ends are never held back.
"""

from typing import Final

FREE_STREAMS: Final = 8
"""Streams up to here have a message a step."""
SECONDS_PER_STREAM: Final = 0.004
"""Between two messages, for each stream there is: a message takes about 0.2 ms of one core, sent
and received, so that all of them together take a twentieth of it."""
LONGEST: Final = 0.2
"""Seconds after which nobody would call it streaming any more."""


def least_interval(num_streams: int) -> float:
    """Returns the least seconds between two messages of each of so many streams."""
    if num_streams <= FREE_STREAMS:
        return 0.0
    return min(LONGEST, SECONDS_PER_STREAM * num_streams)
