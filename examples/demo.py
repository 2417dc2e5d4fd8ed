"""Serves the embedded model on a free port, runs the three examples against it, and stops it.

It owns the server's life and nothing else: what is shown is each example's affair, and every
example runs alone against any server, `python examples/parallel_sampling.py 127.0.0.1:50051`.
"""

import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXAMPLES = ("parallel_sampling", "tree_of_thought", "tool_plan")
START_SECONDS = 300.0
"""Granted to the first start, which converts the model; later ones take seconds."""
EXAMPLE_SECONDS = 600.0
STOP_SECONDS = 30.0
READY = re.compile(r"READY (\S+)")


def main() -> None:
    """Runs the demo; exits with 1 if the server or an example fails."""
    try:
        with serving("smollm2") as address:
            for name in EXAMPLES:
                banner(f"python examples/{name}.py {address}")
                run_example(name, address)
            banner("stopping the server")
    except RuntimeError as error:
        sys.exit(f"The demo failed: {error}")
    except KeyboardInterrupt:
        sys.exit("Interrupted.")
    print("Stopped.")


@contextmanager
def serving(model: str) -> Iterator[str]:
    """Runs a server for as long as the `with` lasts; yields its address, `host:port`.

    Raises:
        RuntimeError: It did not start, or did not stop as asked.
    """
    command = Path(sysconfig.get_path("scripts"), "agentkv")
    banner(f"agentkv serve --model {model} --port 0")
    with subprocess.Popen(
        [command, "serve", "--model", model, "--port", "0"], stdout=subprocess.PIPE, text=True
    ) as server:
        # A pipe that nobody reads would block the server when full.
        rest = threading.Thread(target=shutil.copyfileobj, args=(server.stdout, sys.stdout))
        try:
            address = wait_until_ready(server)
            rest.start()
            yield address
        finally:
            stop(server)
            if rest.ident is not None:
                rest.join()
    if server.returncode != 0:
        raise RuntimeError(f"the server ended with {server.returncode}.")


def wait_until_ready(server: "subprocess.Popen[str]") -> str:
    """Shows what the server says until it accepts calls; returns its address.

    Raises:
        RuntimeError: It ended first, or took longer than START_SECONDS.
    """
    assert server.stdout is not None
    watchdog = threading.Timer(START_SECONDS, server.kill)
    watchdog.start()
    try:
        for line in server.stdout:
            print(line, end="", flush=True)
            if found := READY.match(line):
                return found[1]
    finally:
        watchdog.cancel()
    raise RuntimeError("the server ended before it was ready.")


def stop(server: "subprocess.Popen[str]") -> None:
    """Asks the server to stop, and ends it if it does not."""
    server.terminate()
    try:
        server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()


def run_example(name: str, address: str) -> None:
    """Runs one example to its end.

    Raises:
        RuntimeError: It failed, or took longer than EXAMPLE_SECONDS.
    """
    script = Path(__file__).with_name(f"{name}.py")
    try:
        done = subprocess.run([sys.executable, script, address], timeout=EXAMPLE_SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{name} took longer than {EXAMPLE_SECONDS:.0f} s.") from None
    if done.returncode != 0:
        raise RuntimeError(f"{name} ended with {done.returncode}.")


def banner(text: str) -> None:
    """Shows which command speaks next."""
    print(f"\n$ {text}", flush=True)


if __name__ == "__main__":
    main()
