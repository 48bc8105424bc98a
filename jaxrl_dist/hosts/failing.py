"""How the processes of a run end together: each hears of signals and errors in the others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from jaxrl_dist.errors import ConfigError, first_line, say
from jaxrl_dist.heavy import jax
from jaxrl_dist.hosts import peers
from jaxrl_dist.hosts.watch import Watch

_watch: Watch | None = None


def watch() -> Watch | None:
    """Returns the watch of a run over several processes; None: this is the only process."""
    return _watch


def begin(watch: Watch) -> None:
    """Begins to hear of the other processes."""
    global _watch
    _watch = watch


def process_lost(*status: object) -> None:
    """Ends this process because another one is lost."""
    if _watch is not None:
        _watch.terminated()
    else:
        say("error: another process is lost before the run has begun")
    os._exit(1)


def signalled() -> bool:
    """Returns whether a signal has asked any process to end the run."""
    return _watch is not None and _watch.signal != 0


def failed_alike(error: BaseException) -> bool:
    """Returns whether all processes have failed at the same point,
    so that they can still save the run together.
    """
    if peers.world() is None:
        return True
    return not isinstance(error, jax.errors.JaxRuntimeError) and peers.fail_alike(str(error))


@contextlib.contextmanager
def failing() -> Iterator[None]:
    """Tells the other processes of an error that ends the run here, so that they also end.
    Inside, this process needs all of them.

    An error of a collective may come from a process that is lost:
    the watch then ends this one with a better message.
    """
    watch = _watch
    if watch is None:
        yield
        return
    watch.running += 1
    try:
        yield
    except BaseException as error:
        if not isinstance(error, GeneratorExit):
            _tell(watch, error)
        raise
    finally:
        watch.running -= 1


def _tell(watch: Watch, error: BaseException) -> None:
    if watch.problem is not None or watch.failed is not None:
        return
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
        problem = watch.wait()
        if problem is not None:
            raise problem from None
    code = 2 if isinstance(error, ConfigError) else getattr(error, "exit_code", 1)
    watch.fail(first_line(error), code)


def leave(code: int) -> None:
    """Ends this process immediately if it or another one has failed: there is nothing to wait for.

    Process 0 leaves last: the others hear from it what has happened.
    """
    if _watch is not None and (_watch.failed or _watch.problem is not None):
        _watch.exit_now(code)
