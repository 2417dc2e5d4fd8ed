"""Attention on a GPU: correct first, then how fast, beside what was predicted and what peers do.

    python -m benchmarks.gpu_attention [--json FILE] [--seconds N]
    TRITON_INTERPRET=1 python -m benchmarks.gpu_attention --rehearse    # no GPU, tiny sizes

One run of at most 7 minutes on an H200: kernels against the specification, the device's ceilings,
the workloads cold and from the cache, decoding end to end with and without graphs, sweeps while
time is left. What cannot run is said and left out; the table comes last in any case.
"""

import gc
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial

import torch

from agentkv_kernels._triton.compat import INTERPRETED
from benchmarks.gpu import correctness, decode, sweeps, workloads
from benchmarks.gpu.contestants import PEERS, Scene, calls_of, options_of, ours, stage
from benchmarks.gpu.timing import Ceilings, Clock, OutOfTime, Timer
from benchmarks.gpu.workloads import Workload, lay_out, predict
from benchmarks.report import Machine, Report, Result, Target, parser_for

READ_SHARE = 0.85
"""Of the measured read ceiling, unshared, at 256 MB of KV a layer or more."""
FIXED_US = 8.0
TREE_SPEED_UP = 20.0
"""Over our own flat plan on W3."""
FLAT_RATIO = 1.03
"""Our tree plan over our flat plan where nothing is shared."""


class Session:
    """One run: what was measured so far, and the time that is left."""

    def __init__(self, device: torch.device, seconds: float, *, tiny: bool) -> None:
        self.device = device
        self.tiny = tiny
        self.clock = Clock(seconds)
        self.timer = Timer(device, 2 if tiny else 50)
        self.results: list[Result] = []
        self.targets: list[Target] = []
        self._medians: dict[tuple[str, str, str], float] = {}

    def add(self, results: Iterable[Result]) -> None:
        """Keeps figures and prints each as it comes, in case the run is cut short."""
        for result in results:
            self.results.append(result)
            self._medians[result.workload, result.engine, result.metric] = result.median
            print(f"  {result.workload}: {result.engine}, {result.metric}: "
                  f"{result.median:.4g} {result.unit}", flush=True)  # fmt: skip

    def median(self, workload: str, engine: str, metric: str) -> float | None:
        """Finds a figure; None if it was not measured."""
        return self._medians.get((workload, engine, metric))

    def attempt(self, what: str, seconds: float, work: Callable[[], None]) -> None:
        """Does a part if there is time; says so if it is left out or fails."""
        begin = time.monotonic()
        print(f"{what} ({self.clock.left:.0f} s left)", flush=True)
        try:
            self.clock.need(0 if self.tiny else seconds)
            work()
        except OutOfTime as error:
            print(f"{what}: left out: {error}", flush=True)
        except Exception:  # there may be one run only: it ends with what could be measured
            print(f"{what}: failed\n{traceback.format_exc()}", flush=True)
            if self.tiny:
                raise
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"{what}: {time.monotonic() - begin:.1f} s", flush=True)


def main() -> None:
    """Runs everything, prints one table and writes the JSON file if one is asked for."""
    parser = parser_for(__doc__)
    parser.add_argument("--seconds", type=float, default=400.0, help="time the run may take")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, in the interpreter")
    arguments = parser.parse_args()
    if arguments.rehearse and not INTERPRETED:
        parser.error("--rehearse needs TRITON_INTERPRET=1 in the environment")
    if not arguments.rehearse and not torch.cuda.is_available():
        print("There is no CUDA device: nothing is measured. See --rehearse.")
        return
    device = torch.device("cpu" if arguments.rehearse else "cuda")
    session = Session(device, arguments.seconds, tiny=arguments.rehearse)
    measure(session).publish(arguments.json)


def measure(session: Session) -> Report:
    """Measures everything there is time for.

    Raises:
        Unequal: The kernels are wrong on this device; no figure would mean anything.
    """
    with torch.inference_mode():
        error = correctness.check_all(session.device, tiny=session.tiny)
        print(f"correct: worst relative error {error:.1e}")
        session.attempt("ceilings", 10, lambda: measure_ceilings(session))
        session.attempt("fixed cost", 5, lambda: measure_fixed(session))
        for workload in workloads.REHEARSAL if session.tiny else workloads.WORKLOADS:
            session.attempt(workload.name, 12, partial(measure_workload, session, workload))
        for decoding in decode.REHEARSAL if session.tiny else decode.DECODINGS:
            session.attempt(decoding.name, 40, partial(measure_decoding, session, decoding))
        for workload in workloads.REHEARSAL if session.tiny else (workloads.W3, workloads.W7):
            what = f"sweeps of {workload.name}"
            session.attempt(what, 40, partial(measure_sweeps, session, workload))
    set_targets(session)
    name = torch.cuda.get_device_name(session.device) if session.device.type == "cuda" else None
    results, targets = tuple(session.results), tuple(session.targets)
    return Report("gpu_attention", results, targets, Machine.here(name))


def measure_ceilings(session: Session) -> None:
    """Measures what the device can do at most."""
    found = Ceilings(session.timer, tiny=session.tiny)
    session.add(
        Result.of("ceiling", "torch", metric, unit, values)
        for metric, unit, values in (
            ("read", "GB/s", found.read),
            ("copy", "GB/s", found.copy),
            ("read from the cache", "GB/s", found.cached),
            ("bf16 product", "TFLOP/s", found.product),
        )
    )


def measure_fixed(session: Session) -> None:
    """Measures what every layer pays, whatever it reads."""
    session.add([sweeps.fixed_cost(session.device, session.timer)])


def measure_workload(session: Session, workload: Workload) -> None:
    """Measures one tree: ours shared and flat, cold and from the cache, and peers."""
    layout, timer = lay_out(workload), session.timer
    expected = predict(workload)
    session.add(
        Result.of(workload.name, f"predicted {engine}", "one layer, cold", "us", [microseconds])
        for engine, microseconds in (("tree", expected.tree), ("flat", expected.flat))
    )
    for cold, metric in ((True, "one layer, cold"), (False, "one layer, cached")):
        scene = stage(workload, layout, session.device, cold=cold)
        for engine, options in (
            ("tree", options_of(scene)),
            ("flat", options_of(scene, sharing="none")),
        ):
            calls = ours(scene, options) * (1 if cold else 8)
            times = timer.microseconds(calls)
            session.add([Result.of(workload.name, engine, metric, "us", times)])
            if cold:
                rates = [workload.tree_bytes / microseconds / 1e3 for microseconds in times]
                session.add([Result.of(workload.name, engine, "distinct KV", "GB/s", rates)])
        if cold:
            measure_peers(session, scene, metric)


def measure_peers(session: Session, scene: Scene, metric: str) -> None:
    """Measures every peer that can run."""
    for name, make in PEERS:
        calls = calls_of(name, make, scene)
        if calls is not None:
            times = session.timer.microseconds(calls, 20)
            session.add([Result.of(scene.workload.name, name, metric, "us", times)])


def measure_decoding(session: Session, decoding: decode.Decoding) -> None:
    """Measures steps of a whole model, without graphs and with them."""
    bench = decode.Bench(decoding, session.device, "triton")
    session.add([Result.of(decoding.name, "no graphs", "step", "ms", bench.measure())])
    capture = bench.graphs()
    if capture is None:
        print(f"{decoding.name}: this model runner has no graphs")
        return
    capture()
    session.add([Result.of(decoding.name, "graphs", "step", "ms", bench.measure())])


def measure_sweeps(session: Session, workload: Workload) -> None:
    """Measures what decides the speed of one tree."""
    scene = stage(workload, lay_out(workload), session.device, cold=True)
    timer, tiny = session.timer, session.tiny
    session.add(sweeps.other_kernels(scene, timer))
    session.add(sweeps.sweep_splits(scene, timer, tiny=tiny))
    session.add(sweeps.eight_bits(scene, timer, tiny=tiny))
    if len(workload.levels) > 1:
        new = 16 if tiny else 256
        session.add([sweeps.extend(scene, timer, 2 if tiny else 16, new)])
    session.add(sweeps.sweep_tiles(scene, timer, tiny=tiny))


def set_targets(session: Session) -> None:
    """Compares what was measured with what was meant."""
    names = workloads.REHEARSAL if session.tiny else (workloads.W3, workloads.W7)
    shared, unshared = (workload.name for workload in names)
    cold = "one layer, cold"
    tree, flat = session.median(shared, "tree", cold), session.median(shared, "flat", cold)
    if tree and flat:
        name = f"{shared}: flat over tree"
        session.targets.append(Target.at_least(name, flat / tree, TREE_SPEED_UP))
    tree, flat = session.median(unshared, "tree", cold), session.median(unshared, "flat", cold)
    if tree and flat:
        name = f"{unshared}: tree over flat"
        session.targets.append(Target.at_most(name, tree / flat, FLAT_RATIO))
    rate = session.median(unshared, "tree", "distinct KV")
    ceiling = session.median("ceiling", "torch", "read")
    if rate and ceiling:
        name = f"{unshared}: share of the read ceiling"
        session.targets.append(Target.at_least(name, rate / ceiling, READ_SHARE))
    fixed = session.median("fixed", "tree", "attention + merge, one layer")
    if fixed:
        session.targets.append(Target.at_most("fixed cost of a layer, us", fixed, FIXED_US))


if __name__ == "__main__":
    main()
