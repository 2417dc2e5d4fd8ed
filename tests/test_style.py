"""Rules of the house that no linter knows."""

import re
import tomllib
from pathlib import Path

import pytest
from repository import ROOT, lines_of, tracked_files

CODE = [
    name
    for name in tracked_files("agentkv", "kernels", "tests", "examples", "benchmarks")
    if name.endswith(".py") and not name.startswith("agentkv/v1/")
]
INSTALLATION = ["Makefile", ".ci/run", "constraints.txt", "pyproject.toml"]
THIS = Path(__file__).relative_to(ROOT).as_posix()


def hits(pattern: str, names: list[str]) -> list[str]:
    """Lists `file:line` of every match, but for this file, which spells the patterns out."""
    found = re.compile(pattern)
    return [
        f"{name}:{number}"
        for name in names
        if name != THIS
        for number, line in enumerate(lines_of(name), start=1)
        if found.search(line)
    ]


@pytest.mark.parametrize(
    ("pattern", "bug"),
    [
        (r"\b(pickle|marshal|cloudpickle)\.loads?\(|^import shelve", "code from a file runs"),
        (r"\btorch\.(load|save)\(", "a checkpoint may run code: use safetensors"),
        (r"trust_remote_code=True", "a model's repository may run code"),
        (r"\b(TODO|FIXME|XXX)\b|raise NotImplementedError", "something is not finished"),
        (r"# (type: ignore|noqa)\b(?!.*( -- |#))", "a check is silenced without a reason"),
        (r"^\s*global \w", "state belongs to an object that is passed"),
    ],
)
def test_code_has_no(pattern: str, bug: str) -> None:
    """Catches what the project decided against, each for the reason given with it."""
    assert hits(pattern, CODE) == [], bug


@pytest.mark.parametrize(
    ("pattern", "bug"),
    [
        (r"pytest\.(skip|xfail|importorskip)\(|mark\.(skip|skipif|xfail)\b", "a test does not run"),
        (r"\btime\.sleep\(|asyncio\.sleep\(0?\.\d*[1-9]", "a test waits on the clock"),
        (r"\bunittest\.mock|\bimport mock\b", "fakes, not mocks"),
    ],
)
def test_tests_have_no(pattern: str, bug: str) -> None:
    """Catches a test that proves less than it seems to."""
    assert hits(pattern, [name for name in CODE if name.startswith("tests/")]) == [], bug


def test_tests_say_which_bug_they_catch() -> None:
    """Catches a test without a docstring: nobody could tell later whether it may go."""
    bare = [
        f"{name}:{number}"
        for name in CODE
        if name.startswith("tests/")
        for number, (line, after) in enumerate(zip(lines_of(name), bodies(name), strict=True), 1)
        if re.match(r"\s*(async )?def test_", line) and not after.startswith('"""')
    ]
    assert bare == []


def bodies(name: str) -> list[str]:
    """Gives, for each line, the first line of the body whose signature begins there."""
    lines = lines_of(name)
    ends = [number for number, line in enumerate(lines) if re.search(r":\s*(#.*)?$", line)]
    first = dict.fromkeys(range(len(lines)), "")
    for number in range(len(lines)):
        end = next((end for end in ends if end >= number), len(lines))
        first[number] = lines[end + 1].strip() if end + 1 < len(lines) else ""
    return list(first.values())


def test_tests_are_not_packages() -> None:
    """Catches an `__init__.py` below tests/, with which two equal file names would collide."""
    assert [name for name in CODE if re.match(r"tests/.*__init__\.py$", name)] == []


def test_no_file_names_a_machine() -> None:
    """Catches a path of whoever wrote it: it exists nowhere else."""
    here = re.escape(f"{ROOT}/")
    home = re.escape(f"{Path.home()}/")
    text = [name for name in tracked_files() if not name.endswith((".png", ".gz", ".safetensors"))]
    assert hits(rf"{here}|{home}|/(home|Users)/\w+/", text) == []


def test_installation_names_no_index() -> None:
    """Catches an index host in the set-up: which index is used is each machine's own affair."""
    assert hits(r"://|index-url|find-links|trusted-host|\buv\b", INSTALLATION) == []


def test_constraints_pin_exact_public_versions() -> None:
    """Catches a range, or a local tag such as `+cpu`, which no public index can serve."""
    pins = [line for line in lines_of("constraints.txt") if not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    assert pins == sorted(pins, key=str.lower)


def test_constraints_pin_every_declared_dependency() -> None:
    """Catches a new dependency that CI would take at whatever version is newest that day."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        declared += [line for line in extra if not line.startswith(project["name"])]
    pinned = {normal(line.partition("==")[0]) for line in lines_of("constraints.txt")}
    names = {normal(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in declared}
    assert names - pinned == set()


def normal(name: str) -> str:
    """Spells a distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()
