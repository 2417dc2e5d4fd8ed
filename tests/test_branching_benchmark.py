"""The benchmark of branching work: its driver, its own adapters, and the readers of traces."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tiny_engines import TEXT_VOCAB_SIZE
from tiny_models import build_tiny_model
from tiny_tokenizers import build_tiny_tokenizer

from benchmarks.branching import interleave
from benchmarks.peers.contestants import Contestant, EngineProcess, NotAvailable
from benchmarks.peers.protocol import Job, Load, Node, Outcome
from benchmarks.peers.resend import Prompt, Sampled, Wave, run_resending
from benchmarks.peers.traces import crossword_job, game24_job, read_json, session_job
from benchmarks.peers.workloads import Workload

HERE = (
    Contestant("agentkv", "agentkv_local", None),
    Contestant("agentkv-grpc", "agentkv_server", None),
    Contestant("hf-generate", "transformers_generate", None),
)
SALT = 7


def tree_job(repeat: int) -> Job:
    """A prefix; three branches of it; children at the end, inside and with tokens given."""
    prefix = Node(None, None, tuple(range(20 + repeat, 60 + repeat)), 0)
    return Job(
        "tree",
        (
            (prefix,),
            (Node(0, None, (), 3), Node(0, None, (), 3), Node(0, None, (), 5)),
            (Node(1, None, (), 4), Node(2, 30, (5, 6), 2), Node(3, None, (9,), 1)),
        ),
        num_prepared=1,
    )


def letters(text: str) -> list[int]:
    """A token a character."""
    return [ord(character) for character in text]


@pytest.mark.slow
def test_engines_run_the_same_job_and_decode_the_same_numbers(tmp_path: Path) -> None:
    """Catches an adapter or a driver that the engine, the SDK or transformers moved away from."""
    build_tiny_model("llama", vocab_size=TEXT_VOCAB_SIZE).save_pretrained(tmp_path)
    build_tiny_tokenizer().save_pretrained(tmp_path)
    load = Load(str(tmp_path), str(tmp_path), 1, 256, 4 << 20)
    engines = [EngineProcess(contestant, tmp_path, load) for contestant in HERE]
    try:
        *_, measured = interleave([Workload("tree", "tree", tree_job)], engines, 2, patience=600)
    finally:
        for engine in engines:
            engine.close()
    assert [(one.engine, len(one.outcomes)) for one in measured] == [(c.name, 2) for c in HERE]
    expected = tuple(node.decode for node in tree_job(0).nodes)
    assert all(run.num_generated == expected for one in measured for run in one.outcomes)
    recomputed = {
        one.engine: result.max
        for one in measured
        for result in one.results()
        if result.metric == "recomputed"
    }
    assert recomputed == {"agentkv": 0, "agentkv-grpc": 0}


@pytest.mark.slow
def test_an_engine_that_takes_too_long_is_begun_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a comparison that one slow engine holds up, or whose next answer is a late one."""
    build_tiny_model("llama", vocab_size=TEXT_VOCAB_SIZE).save_pretrained(tmp_path)
    build_tiny_tokenizer().save_pretrained(tmp_path)
    load = Load(str(tmp_path), str(tmp_path), 1, 256, 4 << 20)
    with EngineProcess(HERE[0], tmp_path, load, limit=0.0) as engine:
        first = engine.facts
        workloads = [Workload(name, "tree", tree_job) for name in ("one", "as large")]
        assert list(interleave(workloads, [engine], 2, patience=600)) == [[]] * 4
        assert "as large" not in capsys.readouterr().out
        with pytest.raises(NotAvailable, match="longer than 0 s"):
            engine.run(tree_job(0))
        assert engine.facts == first


def test_an_environment_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Catches an engine that drops out of a comparison without a word."""
    missing = Contestant("openvino", "openvino_genai", "openvino")
    with pytest.raises(NotAvailable, match=r"setup\.sh"):
        EngineProcess(missing, tmp_path, Load("", "", 1, 256, 1 << 20))


def test_values_survive_the_pipe() -> None:
    """Catches a field that one end of the pipe has and the other does not."""
    job = tree_job(0)
    assert Job.from_json(json.loads(json.dumps(asdict(job)))) == job
    outcome = Outcome((1.0,), (0.5,), (0, 3), None, 1 << 20)
    assert Outcome.from_json(json.loads(json.dumps(asdict(outcome)))) == outcome


def test_resending_sends_the_path_that_was_decoded() -> None:
    """Catches a resend of other tokens than the engine made: its prefix cache would miss."""
    sent: list[Prompt] = []

    def decode(prompts: Any) -> Wave:
        sent.extend(prompts)
        tokens = [100 * p.count + i for p in prompts for i in range(p.count)]
        counts = [p.num_tokens for p in prompts for _ in range(p.count)]
        return Wave([Sampled((t,) * n, 0.0) for t, n in zip(tokens, counts, strict=True)], 1)

    outcome = run_resending(tree_job(0), decode)
    prefix = tuple(range(20, 60))
    assert sent == [
        Prompt(prefix, 1, 1),
        Prompt(prefix, 3, 2),
        Prompt(prefix, 5, 1),
        Prompt((*prefix, 200, 200, 200), 4, 1),
        Prompt((*prefix[:30], 5, 6), 2, 1),
        Prompt(prefix + (100,) * 5 + (9,), 1, 1),
    ]
    assert outcome.num_generated == (0, 3, 3, 5, 4, 2, 1)
    assert outcome.computed_rows == 2


def test_least_rows_leave_out_only_tokens_that_nothing_follows() -> None:
    """Catches a wrong baseline: tokens would seem recomputed that were not, or the reverse."""
    assert tree_job(0).least_rows == (3 + 2 + 5) + (3 + (2 + 1) + (1 + 0))


def test_a_search_becomes_a_wave_a_step() -> None:
    """Catches candidates under the wrong parent, of the wrong length, or that lie apart."""
    steps = [
        {"x": "1 2", "ys": [""], "new_ys": ["ab\n", "cde\n", "ab\n"]},
        {"x": "1 2", "ys": ["ab\n", "cde\n"], "new_ys": ["cde\nf\n", "ab\ngh\n"]},
    ]
    job = game24_job([{"steps": steps, "ys": ["ab\ngh\n"]}], 0, letters, SALT)
    assert job.waves[0][0].given[0] == SALT and job.num_prepared == 1
    shapes = [[(node.parent, node.decode) for node in wave] for wave in job.waves[1:]]
    assert shapes == [[(0, 3), (0, 3), (0, 4)], [(1, 3), (3, 2)]]


def test_going_back_forks_where_the_search_went_back_to() -> None:
    """Catches a backtrack that decodes again what an earlier visit had."""
    states = [{"actions": a} for a in (["h1. a"], ["h1. a", "h2. b"], ["h1. a", "h3. c"], ["v1"])]
    job = crossword_job(states, 0, letters, SALT, limit=4)
    assert [wave[0].parent for wave in job.waves] == [None, 0, 1, 1, 0]


def test_a_session_forks_earlier_requests_and_runs_sub_agents_side_by_side() -> None:
    """Catches input that is computed again, or sub-agents that wait for each other."""

    def request(t: float, ids: list[int], out: int, model: str = "m") -> dict[str, Any]:
        return {"t": t, "type": "n", "model": model, "hash_ids": ids, "out": out}

    def agent(t: float, seconds: float, *requests: dict[str, Any]) -> dict[str, Any]:
        fields = {"t": t, "type": "subagent", "duration_ms": 1000 * seconds}
        return {**fields, "requests": requests}

    trace = {
        "requests": [
            request(0, [1, 2, 3], 64),
            agent(20, 10, request(0, [50, 51], 64), request(1, [50, 51, 52, 53, 54], 128)),
            agent(25, 14, request(0, [50, 51], 64)),
            request(30, [1, 2, 3, 4, 5, 6], 128),
            request(40, [1, 2, 9], 64),
            request(50, [1, 2, 3], 64, model="other"),
        ]
    }
    job = session_job(trace, range(1000, 9000), SALT, limit=99)
    shapes = [[(n.parent, n.at, len(n.given), n.decode) for n in wave] for wave in job.waves]
    assert shapes == [
        [(None, None, 4, 1)],
        [(0, 1, 2, 1), (0, 1, 2, 1)],
        [(1, None, 2, 2)],
        [(0, None, 2, 2)],
        [(0, 3, 1, 1)],
        [(0, 1, 3, 1)],
    ]


def test_a_missing_trace_is_one_clear_line(tmp_path: Path) -> None:
    """Catches a stack trace where a user gave the wrong folder."""
    with pytest.raises(SystemExit, match=r"game24_tot\.json"):
        read_json(tmp_path / "game24_tot.json")
