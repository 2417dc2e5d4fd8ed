"""Keeps one AttentionPlan alive for as long as the topology of the batches stays the same.

Between forks, releases and copies only lengths grow, so the plan of the step before is moved on
instead of built again. Owns the decision whether that is right; what a plan is, the kernels say.
"""

from agentkv.core.batch import Batch, Run
from agentkv_kernels import AttentionPlan, KVRun, RunGrowth


class AttentionPlanner:
    """Makes the plan of each step.

    Invariant: the plan handed out equals the one `AttentionPlan.build` would make of that batch.
    A run whose blocks were replaced (its KV gave way and was computed again) is never moved on,
    though its segment is the same. A batch that the kernels refuse changes nothing here.
    """

    def __init__(self, block_size: int) -> None:
        self.num_builds = 0
        """Plans built."""
        self.num_advances = 0
        """Steps that went on with the plan before them."""
        self._block_size = block_size
        self._runs: tuple[Run, ...] = ()
        self._plan: AttentionPlan | None = None

    def plan(self, batch: Batch, num_rows: int | None = None) -> AttentionPlan:
        """Returns the plan of a batch; it is valid until the next call.

        Args:
            batch: A step.
            num_rows: Rows of the plan; those beyond the batch's read nothing. None: the batch's.
        """
        padding = 0 if num_rows is None else num_rows - batch.num_rows
        kv_lens = [position + 1 for position in batch.positions] + [0] * padding
        grown = self._growth(batch, len(kv_lens))
        if self._plan is not None and grown is not None:
            self._plan.advance(kv_lens, grown)
            self.num_advances += 1
        else:
            self._plan = AttentionPlan.build(_kv_runs(batch), kv_lens, block_size=self._block_size)
            self.num_builds += 1
        self._runs = batch.runs
        return self._plan

    def _growth(self, batch: Batch, num_rows: int) -> list[RunGrowth] | None:
        """Says how the runs grew since the step before, or None if more than lengths changed."""
        if self._plan is None or num_rows != self._plan.num_rows:
            return None
        if len(batch.runs) != len(self._runs):
            return None
        grown = []
        for index, (old, new) in enumerate(zip(self._runs, batch.runs, strict=True)):
            if _topology(old) != _topology(new) or new.end < old.end:
                return None
            if new.end == old.end and new.block_ids is old.block_ids:
                continue
            num_known = len(old.block_ids)
            if new.block_ids[:num_known] != old.block_ids:
                return None
            grown.append(RunGrowth(index, new.end, new.block_ids[num_known:]))
        return grown


def _topology(run: Run) -> tuple[int, int, int, int]:
    """What must stay equal for a plan to be moved on."""
    return run.segment_id, run.start, run.first_row, run.num_rows


def _kv_runs(batch: Batch) -> list[KVRun]:
    return [
        KVRun(run.start, run.end, run.block_ids, range(run.first_row, run.first_row + run.num_rows))
        for run in batch.runs
    ]
