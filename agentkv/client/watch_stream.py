"""The watches of both clients: thin, the rules are in `agentkv.client.watch_state`."""

from agentkv.client.event_stream import AsyncEventStream, EventStream
from agentkv.client.watch_events import WatchEvent
from agentkv.client.watch_state import WatchState


class WatchStream(EventStream[WatchState, WatchEvent]):
    """What happens to the caller's contexts, as it happens: iterate over it.

    The first event is a snapshot, and so is one that comes after the watcher lagged far behind.
    Leaving the `with`, or `close`, ends the watch. Iterating raises AgentKVError when it fails.
    """


class AsyncWatchStream(AsyncEventStream[WatchState, WatchEvent]):
    """What happens to the caller's contexts, as it happens: iterate over it.

    The first event is a snapshot, and so is one that comes after the watcher lagged far behind.
    Leaving the `async with`, or `close`, ends the watch. Iterating raises AgentKVError when it
    fails.
    """
