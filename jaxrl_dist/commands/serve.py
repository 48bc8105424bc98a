"""``jaxrl-dist serve``: answers observations with a trained policy's actions, over HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxrl_dist.commands import evaluate, flags
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError, visible
from jaxrl_dist.run import signals

if TYPE_CHECKING:
    from jaxrl_dist.play.served import ServedPolicy


@dataclasses.dataclass(frozen=True)
class Serve(evaluate.Trained):
    """Answers observations with the actions of a run's policy, over HTTP and web sockets."""

    host: str = "127.0.0.1"
    """Address to listen on: this machine's own, unless you name another."""
    port: int = setting(0, low=0, high=65535)
    """Port to listen on; 0: a free one, which the first line of the output names."""
    token_file: str | None = None
    """File of the token that each client sends; it is written if there is none. None: the first
    line of the output names the token."""
    allow_origin: tuple[str, ...] = ()
    """Origins of the web pages that may connect, such as https://example.org."""
    policy: str | None = None
    """Name of the policy to serve, if the run has several; None: all of them."""
    sample: bool = False
    """Sample actions instead of taking the best ones."""
    seed: int = setting(0, low=0, high=2**31 - 1)
    """Seed of the samples."""
    num_simulations: int | None = setting(None, low=0, high=10**4)
    """Steps of each search of an algorithm that plans; None: as in training."""
    max_batch: int = setting(64, low=1, high=4096)
    """Observations in a batch, at most; a power of 2."""
    max_episodes: int = setting(4096, low=1, high=10**6)
    """Episodes that a policy remembers; the one that has been idle for longest is dropped."""
    max_megabytes: int = setting(16, low=1, high=1024)
    """Size of a request, at most."""


def run(args: Sequence[str]) -> int:
    """Runs ``serve RUN_DIR [FLAGS]``; returns only by an exception, as a signal ends it."""
    options = flags.parse(Serve, args, "jaxrl-dist serve")
    if not options.run_dir:
        raise ConfigError("which run? Name its directory, as in: jaxrl-dist serve runs/NAME")
    if options.max_batch & (options.max_batch - 1):
        below = 1 << (options.max_batch.bit_length() - 1)
        raise ConfigError(
            f"must be a power of 2, not {options.max_batch}; nearest that work: "
            f"{below} or {2 * below}",
            "max_batch",
        )

    from jaxrl_dist.envs.wire import access

    access.check_installed("jaxrl-dist serve")
    access.check_origins(options.allow_origin)
    token = access.find_token(options.token_file)
    policies = _policies(options)

    from jaxrl_dist.play import serving

    desk = serving.Desk(policies, options.max_episodes)
    allowed = access.Access(token, options.allow_origin)
    app = serving.application(
        desk, allowed, _about(options, policies), options.max_megabytes * 2**20
    )

    def ready(port: int) -> None:
        host = f"[{options.host}]" if ":" in options.host else options.host
        line: dict[str, Any] = {"url": f"http://{host}:{port}", "port": port}
        if options.token_file is None:
            line["token"] = token
        print(visible(json.dumps(line)), flush=True)

    with signals.stopping() as stop:
        stop.notice = (
            "stopping after the requests that wait; press Ctrl-C again to quit immediately"
        )
        asyncio.run(serving.serve(desk, app, options.host, options.port, ready=ready, stop=stop))
        raise stop.interrupted()


def _policies(options: Serve) -> dict[str, ServedPolicy]:
    """Loads and compiles the policies by name; a single one of a run has the name ""."""

    def load(name: str | None) -> Any:
        return options.load(name, num_simulations=options.num_simulations)

    whole = load(options.policy)

    from jaxrl_dist.play.served import ServedPolicy

    names = list(whole.source.spec.policies)
    loaded = {options.policy or "": whole}
    if names:
        loaded = {name: load(name) for name in names}
    return {
        name: ServedPolicy(policy, options.max_batch, sampled=options.sample, seed=options.seed)
        for name, policy in loaded.items()
    }


def _about(options: Serve, policies: dict[str, ServedPolicy]) -> dict[str, Any]:
    """Returns the description of what is served, in JSON."""
    from jaxrl_dist.run.version import version

    return {
        "run": options.run_dir,
        "checkpoint": evaluate.named_checkpoint(options),
        "sampled": options.sample,
        "version": version(),
        "policies": {name: policy.describe() for name, policy in policies.items()},
    }
