"""Eight CPU devices for every test, no silent broadcasting between ranks,
and programs that are compiled once.
"""

from __future__ import annotations

import atexit
import collections
import ctypes
import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src import compilation_cache
from jax._src.interpreters import mlir

from jaxrl_dist.heavy import postponed

# a shell's background job ignores it, and so would ours
signal.signal(signal.SIGINT, signal.default_int_handler)
jax.config.update("jax_num_cpu_devices", 8)
# for what tests start, too: the key of a kept program holds this number
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
jax.config.update("jax_numpy_rank_promotion", "raise")

# --- Compiled programs ----------------------------------------------------------------------------

KEPT = Path(__file__).resolve().parents[1] / ".cache" / "jax"
"""Programs that earlier runs of the tests compiled."""
MAX_AGE_DAYS = 14


def link_kept(folder: Path) -> None:
    """Gives a run the kept programs; those past ``MAX_AGE_DAYS`` are deleted,
    since most are of code that changed.
    """
    for path in KEPT.iterdir():
        if time.time() - path.stat().st_mtime > MAX_AGE_DAYS * 86400:
            path.unlink(missing_ok=True)
        else:
            os.link(path, folder / path.name)


def keep(folder: Path) -> None:
    """Keeps what a run compiled, and deletes its folder.

    JAX writes its files in place. Tests kill programs and fill disks while they write,
    so each file is checked.
    """
    for path in folder.glob("*-cache"):
        if not (KEPT / path.name).exists():
            try:
                compilation_cache.decompress_executable(path.read_bytes())
            except Exception:  # of zlib or zstandard, whichever JAX uses
                continue
            path.replace(KEPT / path.name)
    shutil.rmtree(folder, ignore_errors=True)


# The first process chooses; pytest's workers and the programs that tests start inherit it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    KEPT.mkdir(parents=True, exist_ok=True)
    programs = Path(tempfile.mkdtemp(prefix="run-", dir=KEPT.parent))
    link_kept(programs)
    atexit.register(keep, programs)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(programs)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# else the folder's name is a part of every key
os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"
# compiling takes longer than running what tests compile
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
COMPILE_QUICKLY = (
    # XLA's older code generator compiles twice as fast;
    # a version that has only the new one ignores the option
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    # in one piece: pieces for several threads take a third more of them in all
    "--xla_cpu_parallel_codegen_split_count=1",
)
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *COMPILE_QUICKLY)).strip()
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
jax.config.update("jax_disable_most_optimizations", True)

# JAX makes a context for each program, which takes a quarter of the time of a small one.
new_context = mlir.make_ir_context
PROGRAMS_OF_A_CONTEXT = 100
"""What a context holds of its programs is freed with it."""
_contexts = threading.local()


def shared_context() -> Any:
    """Returns this thread's context; after some programs it is a new one."""
    used = getattr(_contexts, "used", 0)
    if used % PROGRAMS_OF_A_CONTEXT == 0:
        _contexts.newest = new_context()
    _contexts.used = used + 1
    return _contexts.newest


mlir.make_ir_context = shared_context

# as the library imports it: without pandas, which takes a second
with postponed("matplotlib.pyplot", "seaborn"):
    import gymnax  # noqa: F401


@pytest.fixture
def optimized() -> Iterator[None]:
    """Compiles a test's programs as users do, for tests that see how XLA rounds."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


# --- Options --------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-messages",
        action="store_true",
        help="write the error lines of tests/test_cli.py to tests/messages.txt",
    )


@pytest.fixture
def trace_for_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when a test calls it, functions choose what they choose on a GPU."""

    def on_gpu(*args: Any, default: Any, cuda: Any = None, cpu: Any = None) -> Any:
        return (cuda or default)(*args)

    return lambda: monkeypatch.setattr(jax.lax, "platform_dependent", on_gpu)


# --- Quick tests -------------------------------------------------------------------------------


class Compiled:
    """Counts the programs that this process has compiled, or loaded."""

    programs = 0

    def __call__(self, event: str, seconds: float, **about: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.programs += 1


class Started:
    """Counts the processes that this process has started."""

    processes = 0

    def __call__(self, event: str, about: Any) -> None:
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
            self.processes += 1


compiled = Compiled()
started = Started()
jax.monitoring.register_event_duration_secs_listener(compiled)
sys.addaudithook(started)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spares ``make quick`` the imports of files that it runs nothing of."""
    if not config.option.markexpr.startswith("quick") or collection_path.suffix != ".py":
        return None
    return "pytest.mark.quick" not in collection_path.read_text("utf-8") or None


@functools.cache
def find_first_environment() -> None:
    """Compiles what the first environment of a process compiles: two operations on numbers."""
    from jaxrl_dist.envs.source import find  # which imports gymnax

    find("gymnax:CartPole-v1")


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that is marked quick and is not."""
    if not request.node.get_closest_marker("quick"):
        yield
        return
    find_first_environment()
    programs = compiled.programs
    processes = started.processes
    yield
    assert compiled.programs == programs, "it compiles: it is not quick"
    assert started.processes == processes, "it starts a process: it is not quick"


# --- What is left to `make slow` ------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each case is slow, too."""
    for item in items:
        if item.get_closest_marker("case"):
            item.add_marker(pytest.mark.slow)


# --- How long it takes ----------------------------------------------------------------------------


def pytest_collection_finish() -> None:
    """Spares the garbage collector what the imports made, which stays,
    and most of its runs while JAX traces.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


FEW_PROGRAMS = 20
"""Programs that a file may leave behind: freeing them takes longer than they are worth."""
MOST_MAPPINGS = 40_000
"""Memory mappings of a process after which its compiled programs are dropped: each has some, and
Linux ends a process that asks for more than 65,530 (``vm.max_map_count``)."""
_torn_down = 0


def pytest_runtest_teardown() -> None:
    """Drops compiled programs before there are too many."""
    global _torn_down
    _torn_down += 1
    mappings = Path("/proc/self/maps")
    if _torn_down % 20 or not mappings.exists():
        return
    if mappings.read_text().count("\n") > MOST_MAPPINGS:
        jax.clear_caches()


@pytest.fixture(autouse=True, scope="module")
def programs_of_a_file() -> Iterator[None]:
    """Frees what a file compiled: hardly a program is used by two files."""
    before = compiled.programs
    yield
    if compiled.programs - before < FEW_PROGRAMS:
        return
    jax.clear_caches()
    find_first_environment.cache_clear()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # the C library keeps what is free in its middle


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """With ``--durations``: the seconds of each file too, most first, fixtures included."""
    if config.option.durations is None:
        return
    seconds: collections.Counter[str] = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.split("::")[0]] += report.duration
    terminalreporter.section("seconds of each file")
    for name, spent in seconds.most_common():
        terminalreporter.line(f"{spent:7.1f} {name}")
    terminalreporter.line(f"{sum(seconds.values()):7.1f} in all, by however many processes")
