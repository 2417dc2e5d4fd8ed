"""OpenVINO GenAI: its continuous batching on the GGUF, prefix cache on, `num_return_sequences`.

It reads the GGUF itself. It tells no number of rows computed.
"""

import importlib.metadata
import time
from collections.abc import Sequence

import numpy as np
import openvino
import openvino_genai as genai

from benchmarks.peers.protocol import Job, Load, Loaded, Outcome, serve
from benchmarks.peers.resend import Prompt, Sampled, Wave, run_resending


class OpenVino:
    """One pipeline."""

    def __init__(self, load: Load) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = load.kv_bytes >> 30  # GiB
        scheduler.max_num_batched_tokens = 512
        self._pipeline = genai.ContinuousBatchingPipeline(
            load.gguf, scheduler, "CPU", {"INFERENCE_NUM_THREADS": load.num_threads}
        )

    def loaded(self) -> Loaded:
        """Describes the engine."""
        return Loaded(
            importlib.metadata.version("openvino-genai"),
            "GGUF, continuous batching, prefix cache on, one request with num_return_sequences "
            "for branches alike; precision of computing and of KV chosen by the plug-in",
        )

    def run(self, job: Job) -> Outcome:
        """Runs a job by resending paths."""
        return run_resending(job, self._decode)

    def _decode(self, prompts: Sequence[Prompt]) -> Wave:
        begun = time.perf_counter()
        inputs = [openvino.Tensor(np.array([prompt.token_ids])) for prompt in prompts]
        results = self._pipeline.generate(inputs, [_config(prompt) for prompt in prompts])
        samples = []
        for result in results:
            first = begun + result.perf_metrics.get_ttft().mean / 1e3
            samples += [Sampled(tuple(tokens), first) for tokens in result.m_generation_ids]
        return Wave(samples)


def _config(prompt: Prompt) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens = prompt.num_tokens
    config.num_return_sequences = prompt.count
    config.ignore_eos = True
    config.do_sample = True
    config.temperature = 1.0
    return config


if __name__ == "__main__":
    serve(OpenVino)
