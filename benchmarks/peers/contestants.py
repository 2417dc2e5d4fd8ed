"""The engines as processes: one each, in an environment of its own, spoken to over pipes."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentkv.cli.serve import SPIN_COUNT
from benchmarks.peers.protocol import Job, Load, Loaded, Outcome

REPOSITORY = Path(__file__).parents[2]


class NotAvailable(Exception):
    """An engine that cannot be measured, and why."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """One engine and where it lives."""

    name: str
    module: str
    environment: str | None
    """Folder below the peers' environments; None is this process's own environment."""

    @property
    def is_peer(self) -> bool:
        """Whether it is not AgentKV."""
        return not self.module.startswith("agentkv_")


CONTESTANTS = (
    Contestant("agentkv", "agentkv_local", None),
    Contestant("agentkv-grpc", "agentkv_server", None),
    Contestant("openvino", "openvino_genai", "openvino"),
    Contestant("llama.cpp", "llama_cpp", "llama_cpp"),
    Contestant("vllm", "vllm_cpu", "vllm"),
    Contestant("hf-generate", "transformers_generate", "transformers"),
    Contestant("hf-batch", "transformers_batch", "transformers"),
)


class EngineProcess:
    """One engine that has loaded; leaving the `with` ends it."""

    def __init__(
        self,
        contestant: Contestant,
        environments: Path,
        load: Load,
        *,
        limit: float | None = None,
    ) -> None:
        """Starts and loads it.

        Args:
            contestant: Which.
            environments: Folder of the peers' environments.
            load: What it is to load.
            limit: Most seconds of a job; None waits.

        Raises:
            NotAvailable: There is no such environment, or the engine does not load.
        """
        self.contestant = contestant
        self._environments, self._load, self._limit = environments, load, limit
        self._process: subprocess.Popen[str]
        self.facts = self._start()

    def _start(self) -> Loaded:
        contestant, environments = self.contestant, self._environments
        python, environment = sys.executable, dict(os.environ)
        if contestant.environment is not None:
            folder = environments / contestant.environment
            python = str(folder / "bin" / "python")
            if not (folder / ".ready").is_file():
                raise NotAvailable(f"no environment {folder}; benchmarks/peers/setup.sh makes it")
        else:  # what `agentkv serve` sets for itself
            environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
        self._process = subprocess.Popen(
            [python, "-m", f"benchmarks.peers.{contestant.module}"],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            process_group=0,
        )
        try:
            return Loaded(**self._ask({"load": asdict(self._load)}))
        except NotAvailable:
            self.close()
            raise

    def run(self, job: Job) -> Outcome:
        """Runs a job and checks that it decoded what was asked.

        Raises:
            NotAvailable: The engine failed, decoded another number of tokens, or took longer than
                the limit; it is then begun anew.
        """
        try:
            outcome = Outcome.from_json(self._ask({"run": asdict(job)}, self._limit))
        except TimeoutError as error:
            self._kill()
            self.close()
            self.facts = self._start()
            raise NotAvailable(str(error)) from None
        expected = tuple(node.decode for node in job.nodes)
        if outcome.num_generated != expected:
            raise NotAvailable(f"decoded {sum(outcome.num_generated)} tokens, not {sum(expected)}")
        return outcome

    def close(self) -> None:
        """Lets the process end; kills it if it does not. Closing twice is fine."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()

    def _kill(self) -> None:
        """Ends the process and what it has started, such as a server."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        """Returns the process."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends it."""
        self.close()

    def _ask(self, request: Any, limit: float | None = None) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            if not select.select([self._process.stdout], [], [], limit)[0]:
                raise TimeoutError(f"it took longer than {limit:g} s")
            answer = json.loads(self._process.stdout.readline())
        except (BrokenPipeError, ValueError):  # it is closed, or said nothing
            raise NotAvailable(f"the process ended ({self._process.poll()})") from None
        if "error" in answer:
            raise NotAvailable(answer["error"])
        return answer
