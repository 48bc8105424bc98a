"""``jaxrl-dist check-algorithm``: checks the user's algorithm and prints one line per fault."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxrl_dist.checks import flag
from jaxrl_dist.commands import flags, policies, request
from jaxrl_dist.config.train import Train
from jaxrl_dist.config.values import marked
from jaxrl_dist.errors import ConfigError, visible
from jaxrl_dist.nn.optimizers import OptimizerConfig

if TYPE_CHECKING:
    from jaxrl_dist.commands.check_env.findings import Check
    from jaxrl_dist.types import EnvSpec


@dataclasses.dataclass(frozen=True)
class CheckAlgorithm:
    """Traces each function of an algorithm and prints one line per fault.

    FLAGS are as for `jaxrl-dist train`. Nothing is written.
    Lines on stderr say what is being done.
    """


def run(args: Sequence[str]) -> int:
    """Runs ``check-algorithm ALGO --env ID [FLAGS]``; returns 1 if the algorithm has faults."""
    _, args = flags.split(CheckAlgorithm, args, "jaxrl-dist check-algorithm FILE.py --env ID")
    if not args:
        raise ConfigError(
            "which algorithm? Such as: jaxrl-dist check-algorithm my_algo.py --env CartPole-v1"
        )
    if policies.names_policies(args):
        raise ConfigError("check-algorithm checks one algorithm; name it instead of --policy")
    import jax

    with contextlib.suppress(RuntimeError):  # JAX has begun with the devices that it has
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 2)
    train = request.parse(args)
    request.output_flags(train.fields)
    config, source = train.resolved()
    result = check(config, source.spec)
    print(visible("\n".join(result.lines(args[0], f"{result.steps} updates on random numbers"))))
    return int(bool(result.faults))


def check(config: Train, spec: EnvSpec) -> Check:
    """Checks the algorithm of a resolved config; says on stderr what it is doing.

    Raises:
      ConfigError: it does not support the environment.
    """
    from jaxrl_dist.commands.check_algorithm import trial
    from jaxrl_dist.commands.check_algorithm.acting import check_policy
    from jaxrl_dist.commands.check_algorithm.losses import check_learning
    from jaxrl_dist.commands.check_env.findings import Check
    from jaxrl_dist.envs.contract import Stop
    from jaxrl_dist.training import contract

    result = Check(config.env)
    try:
        algorithm = contract.check_algorithm(result, config, spec, 1)
        if contract.replaces_optimizer(config.algorithm, spec):
            names = ", ".join(map(flag, marked(OptimizerConfig)))
            result.note(
                f"it replaces the optimizer that {names} choose, so they may have no effect; "
                "self.make_optimizer returns the one that they choose"
            )
        tried = trial.train(result, config, algorithm, spec)
        result.begin("checking its functions one by one")
        check_policy(result, tried)
        check_learning(result, tried)
        result.steps = tried.updates
        if "devices" in result.faults:  # often a symptom of another
            result.faults["devices"] = result.faults.pop("devices")
    except Stop:
        pass
    except ConfigError:
        raise
    except Exception as error:  # what no check has foreseen is a fault all the same
        result.fault("check", f"{result.doing} stopped the check: {type(error).__name__}: {error}")
    return result
