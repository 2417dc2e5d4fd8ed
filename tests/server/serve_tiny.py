"""A process that serves a tiny model: `serve_tiny.py PORT GRACE`. Prints where, once it serves."""

import asyncio
import sys

from server.real_engine import tiny_engine

from agentkv.config import ServerConfig
from agentkv.engine.async_engine import AsyncEngine
from agentkv.server.main import serve

if __name__ == "__main__":
    config = ServerConfig(port=int(sys.argv[1]), grace=float(sys.argv[2]))
    engine = AsyncEngine(tiny_engine())

    def say(address: str) -> None:
        sys.stdout.write(f"{address}\n")
        sys.stdout.flush()

    asyncio.run(serve(engine, config, on_ready=say))
