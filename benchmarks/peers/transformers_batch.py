"""transformers' continuous batching: its manager, with paged attention and shared blocks."""

import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.peers.protocol import Job, Load, Loaded, Outcome, serve
from benchmarks.peers.resend import Prompt, Sampled, Wave, run_resending

PAGE_SIZE = 64
"""Tokens; a smaller page leaves less of a prompt to compute again."""
NUM_BLOCKS = 512
PATIENCE = 60.0
"""Seconds a wave may take."""


class TransformersBatch:
    """One manager, which keeps its cache from wave to wave."""

    def __init__(self, load: Load) -> None:
        torch.set_num_threads(load.num_threads)
        model: Any = AutoModelForCausalLM.from_pretrained(
            load.folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        config = GenerationConfig(
            max_new_tokens=load.max_length, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
        )
        self._manager = model.init_continuous_batching(
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=NUM_BLOCKS, page_size=PAGE_SIZE, max_batch_tokens=512
            ),
        )
        self._manager.start()
        # Its thread makes the cache when the first request comes, beside whoever is measured then.
        self._decode([Prompt((1, 2), num_tokens=1, count=1)])

    def loaded(self) -> Loaded:
        """Describes the engine."""
        return Loaded(
            f"{transformers.__version__} on torch {torch.__version__}",
            "safetensors in fp32, paged sdpa, block sharing as by default",
        )

    def run(self, job: Job) -> Outcome:
        """Runs a job by resending paths."""
        return run_resending(job, self._decode)

    def _decode(self, prompts: Sequence[Prompt]) -> Wave:
        order = [
            self._manager.add_request(list(prompt.token_ids), max_new_tokens=prompt.num_tokens)
            for prompt in prompts
            for _ in range(prompt.count)
        ]
        done: dict[str, Sampled] = {}
        deadline = time.perf_counter() + PATIENCE
        while len(done) < len(order):
            left = deadline - time.perf_counter()
            output = self._manager.get_result(timeout=left) if left > 0 else None
            if output is None or output.error:
                for request_id in order:
                    self._manager.cancel_request(request_id)
                why = output.error if output else f"not done in {PATIENCE:g} s"
                raise RuntimeError(f"no answer: {why}")
            if output.is_finished() and output.request_id in order:
                now = time.perf_counter()
                done[output.request_id] = Sampled(tuple(output.generated_tokens), now)
        return Wave([done[request_id] for request_id in order])


if __name__ == "__main__":
    serve(TransformersBatch)
