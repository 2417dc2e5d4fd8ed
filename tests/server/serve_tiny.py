"""A process that serves a tiny model: `serve_tiny.py PORT GRACE [SNAPSHOTS]`. Prints where."""

import asyncio
import sys

from server.real_engine import tiny_engine

from agentkv.config import ServerConfig, SnapshotConfig
from agentkv.engine.async_engine import AsyncEngine
from agentkv.server.main import serve

if __name__ == "__main__":
    config = ServerConfig(port=int(sys.argv[1]), grace=float(sys.argv[2]))
    snapshots = SnapshotConfig(dir=sys.argv[3] if len(sys.argv) > 3 else None)
    engine = AsyncEngine(tiny_engine(snapshots=snapshots))

    def say(address: str) -> None:
        sys.stdout.write(f"{address}\n")
        sys.stdout.flush()

    asyncio.run(serve(engine, config, on_ready=say))
