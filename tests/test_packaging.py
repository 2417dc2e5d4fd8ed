"""What is built and installed: the wheel, the source distribution, an editable install.

It owns one clean environment, into which pip installs the client with the pinned versions of its
dependencies; they come from pip's package index or its cache, as in every installation.
"""

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from repository import ROOT, tracked_files

pytestmark = pytest.mark.slow

CLIENT_DEPENDENCIES = {"grpcio", "grpcio-status", "googleapis-common-protos", "protobuf"}
IMPORT = (
    "import importlib.util, sys\n"
    "import agentkv\n"
    "assert callable(agentkv.Client) and callable(agentkv.AsyncClient)\n"
    "assert importlib.util.find_spec('torch') is None, 'the environment is not clean'\n"
    "print(agentkv.__file__)\n"
)


def pip(*arguments: object, python: Path | None = None) -> None:
    """Runs this environment's pip, for this environment or another one."""
    target = ["--python", str(python)] if python else []
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *target]
    # As an environment variable it holds for the environments that pip builds in, too.
    environment = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    done = subprocess.run(
        [*command, *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


def run(python: Path, script: str, folder: Path) -> str:
    """Runs a script isolated from this repository's folder and from the user's packages."""
    done = subprocess.run(
        [python, "-I", "-c", script], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ".")
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def clean_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds nothing."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin/python"


def metadata_of(wheel: Path) -> Message:
    """Reads the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        return message_from_string(archive.read(name).decode())


def test_wheel_holds_both_packages_and_nothing_else(wheel: Path) -> None:
    """Catches a package that is left out, tests that are installed, or a top-level `kernels`."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    packages = {name for name in names if ".dist-info/" not in name}
    ours = tracked_files("agentkv", "kernels/agentkv_kernels")
    library = "agentkv_kernels/_native/libagentkv_native.so"  # where a compiler is
    assert packages - {library} == {name.removeprefix("kernels/") for name in ours}
    assert wheel.name.endswith("-any.whl") == (library not in packages)
    assert {name.split("/")[0] for name in packages} == {"agentkv", "agentkv_kernels"}
    typed = {"agentkv/py.typed", "agentkv_kernels/py.typed"}
    generated = {"agentkv/v1/agentkv_pb2.py", "agentkv/v1/agentkv_pb2_grpc.pyi"}
    assert typed | generated <= packages
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_base_install_is_the_client(wheel: Path) -> None:
    """Catches a dependency that every user of the client would have to install."""
    metadata = metadata_of(wheel)
    required = metadata.get_all("Requires-Dist", [])
    base = {re.split(r"[^\w.-]", line)[0] for line in required if "extra ==" not in line}
    assert metadata["Name"] == "agentkv-runtime"
    assert base == CLIENT_DEPENDENCIES
    assert set(metadata.get_all("Provides-Extra", [])) >= {"cli", "server", "dev"}


def test_source_distribution_holds_what_is_listed(tmp_path: Path) -> None:
    """Catches a local environment or a cache that slips into what is published."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", tmp_path],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=120,
    )
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = tracked_files("agentkv", "kernels", "protos", "tests", "examples", "benchmarks")
    assert set(expected) <= names
    assert names - set(tracked_files()) == {"PKG-INFO"}


def test_wheel_and_editable_install_import_in_a_clean_environment(
    wheel: Path, clean_python: Path, tmp_path: Path
) -> None:
    """Catches a client that needs torch, and a package that only this repository's folder has."""
    pip("install", wheel, python=clean_python)
    installed = run(clean_python, IMPORT, tmp_path)
    assert Path(installed).is_relative_to(clean_python.parent.parent)

    pip("uninstall", "--yes", "agentkv-runtime", python=clean_python)
    pip("install", "--no-deps", "--editable", ".", python=clean_python)
    assert run(clean_python, IMPORT, tmp_path) == str(ROOT / "agentkv/__init__.py")
    kernels = "import importlib.util; print(importlib.util.find_spec('agentkv_kernels').origin)"
    found = run(clean_python, kernels, tmp_path)
    assert found == str(ROOT / "kernels/agentkv_kernels/__init__.py")
