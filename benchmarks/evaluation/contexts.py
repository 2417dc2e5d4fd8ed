"""The verbs of the engine as a contestant uses them: one tree that shares, or contexts apart.

A contestant that shares forks its context at the kept tokens, one that does not cuts it there or
creates a new one; without sharing each context has a tenant of its own, so that nothing matches.
"""

import itertools
import random
from collections.abc import Sequence

from agentkv.core.lease import LeaseMode, LeaseTerms
from agentkv.engine.engine import Engine
from agentkv.engine.operations import Commit, Generation
from agentkv.errors import AgentKVError, NotFound
from agentkv.sampling_params import SamplingParams
from benchmarks.evaluation.policies import Between, Policy
from benchmarks.evaluation.traces import Piece

TENANT = "agents"


class Contexts:
    """Handles of one engine, and whose they are."""

    def __init__(self, engine: Engine, policy: Policy) -> None:
        self._engine = engine
        self._policy = policy
        self._tenants: dict[str, str] = {}
        self._numbers = itertools.count()
        self._random = random.Random(1)
        self._pieces: dict[str, list[int]] = {}
        is_held = policy.between is Between.HOLD
        self._lease = LeaseTerms(LeaseMode.PIN if is_held else LeaseMode.RETAIN)

    @property
    def keeps(self) -> bool:
        """Whether a session has its context from one call to the next."""
        return self._policy.between is not Between.FREE

    def tokens(self, pieces: Sequence[Piece]) -> list[int]:
        """Makes the tokens of a prompt: the same for the same key, else new ones."""
        made: list[int] = []
        for piece in pieces:
            if piece.key is None:
                made += self._draw(self._random, piece.length)
            else:
                known = self._pieces.get(piece.key, [])
                if len(known) < piece.length:  # the longer of two begins like the shorter
                    known = self._draw(random.Random(piece.key), piece.length)
                    self._pieces[piece.key] = known
                made += known[: piece.length]
        return made

    def open(
        self, handles: list[str], kept: Sequence[int], new: Sequence[int], branches: int
    ) -> list[Commit]:
        """Brings a session's context to these tokens; `handles` names what there is then.

        Raises:
            PoolExhausted: There is no room; what was there before is there still.
        """
        commits = []
        if handles:
            commits.append(self._go_on(handles, len(kept), new))
        copies = 1 if self._policy.shares else branches
        try:
            while len(handles) < copies:
                commits.append(self._create(handles, [*kept, *new]))
        except AgentKVError:
            for commit in commits:
                self._engine.cancel(commit)
            self.release(handles[1:] if self.keeps else handles)
            del handles[1 if self.keeps else 0 :]
            raise
        return commits

    def generate(self, handles: list[str], branches: int, num_out: int) -> list[Generation]:
        """Generates on each branch; the branch that lives on is the first one of the first."""
        params = SamplingParams(max_tokens=num_out)
        if self._policy.shares and branches > 1:
            tenant = self._tenants[handles[0]]
            generation = self._engine.inference.generate_branches(
                tenant, handles[0], branches, params
            )
            ids = [request.context.id for request in generation.requests]
            self._tenants.update(dict.fromkeys(ids, tenant))
            self.release(handles)
            handles[:] = ids
            return [generation]
        return [
            self._engine.inference.generate(self._tenants[handle], handle, params)
            for handle in handles
        ]

    def rest(self, handles: list[str], *, is_last: bool) -> None:
        """Does with a session's contexts what the policy does between two calls."""
        first = 1 if self.keeps and not is_last else 0
        self.release(handles[first:])
        del handles[first:]
        if handles and self._policy.between is Between.PARK:
            self._engine.contexts.update_lease(
                self._tenants[handles[0]], handles[0], LeaseTerms(LeaseMode.PARK)
            )

    def drop_lost(self, handles: list[str]) -> None:
        """Drops the handles of contexts that a failed call took with it."""
        for handle in tuple(handles):
            try:
                self._engine.observer.get(self._tenants[handle], handle)
            except NotFound:
                handles.remove(handle)

    def release(self, handles: Sequence[str]) -> None:
        """Gives contexts up; without sharing nobody will match what they leave, so it goes."""
        for handle in handles:
            self._engine.contexts.release(self._tenants.pop(handle), [handle], allow_missing=True)
        if handles and not self._policy.shares:
            self._engine.flush_cache()

    def _create(self, handles: list[str], tokens: Sequence[int]) -> Commit:
        tenant = TENANT if self._policy.shares else f"{TENANT} {next(self._numbers)}"
        commit = self._engine.contexts.create(tenant, tokens, lease=self._lease)
        handle = commit.requests[0].context.id
        self._tenants[handle] = tenant
        handles.append(handle)
        return commit

    def _go_on(self, handles: list[str], keep: int, new: Sequence[int]) -> Commit:
        handle, tenant = handles[0], self._tenants[handles[0]]
        if not self._policy.shares:
            self._engine.contexts.truncate(tenant, handle, keep)
            return self._engine.contexts.extend(tenant, handle, new)
        child = self._engine.contexts.fork(tenant, handle, at=keep, lease=self._lease)[0].id
        try:
            commit = self._engine.contexts.extend(tenant, child, new)
        except AgentKVError:
            self._engine.contexts.release(tenant, [child])
            raise
        self._tenants[child] = tenant
        self.release([handle])
        handles[0] = child
        return commit

    def _draw(self, source: random.Random, length: int) -> list[int]:
        return source.choices(range(self._engine.facts.vocab_size), k=length)
