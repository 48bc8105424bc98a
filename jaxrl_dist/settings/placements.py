"""``--placement``: one word for the flags that say where environments, acting and learning run."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from jaxrl_dist.checks import did_you_mean, flag
from jaxrl_dist.config.values import Fields, marked
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.heavy import jax

NUMBER = "([1-9][0-9]{0,2}|1000)"
"""Pattern of a number in a placement."""


class Placement(NamedTuple):
    """A placement of the literature."""

    sizes: str
    """The form of its numbers, such as ``A+L``; empty: no numbers."""
    says: str
    fields: Callable[..., Fields]
    """The fields of ``Train``, or hyperparameters, that the numbers stand for."""
    needs: tuple[str, ...] = ()
    """Hyperparameters that the algorithm must have."""


def _numbers(first: int, count: int) -> str:
    if count > 1:
        return f"{first}-{first + count - 1}"
    return str(first)


PLACEMENTS = {
    "anakin": Placement(
        "",
        "environments, acting and learning in one program on all devices (Podracer's Anakin, MSRL's all on GPUs)",
        lambda: {"plan": "on_device"},
    ),
    "sebulba": Placement(
        "A+L",
        "the first A devices act, the next L learn (Podracer's Sebulba, MSRL's coarse single learner)",
        lambda acting, learning: {
            "plan": "asynchronous",
            "num_actors": acting,
            "actor_devices": _numbers(0, acting),
            "learner_devices": _numbers(acting, learning),
        },
    ),
    "seed": Placement(
        "",
        "environments on the host, one policy call for all of them on the devices that learn (SEED RL, MSRL's fine "
        "single learner)",
        lambda: {"plan": "synchronous"},
    ),
    "replicas": Placement(
        "K",
        "K devices, each with an actor, learn from all rollouts with one summed gradient (Cleanba, MSRL's multiple "
        "learners)",
        lambda count: {
            "plan": "asynchronous", "lockstep": True, "lag": 1, "num_actors": count, "num_devices": count,
        },
    ),
    "server": Placement(
        "K",
        "K actors send gradients to one copy of the parameters (A3C, MSRL's parameter server)",
        lambda count: {"plan": "gradients", "num_actors": count},
    ),
    "averaged": Placement(
        "K",
        "K rollouts on each device alone, then the mean of all devices' networks (local SGD)",
        lambda rollouts: {"plan": "on_device", "average_every": rollouts, "seeds": jax.device_count()},
    ),
    "apex": Placement(
        "K",
        "K actors fill one prioritised replay memory (Ape-X)",
        lambda count: {"plan": "asynchronous", "num_actors": count, "priority_exponent": 0.6},
        needs=("priority_exponent",),
    ),
}  # fmt: skip
"""By name. Sources: Hessel et al. 2021 (arXiv:2104.06272), Espeholt et al. 2020 (arXiv:1910.06591),
Zhu et al. 2023 (MSRL, arXiv:2210.00882, table 2), Stich 2019 (arXiv:1805.09767), Huang et al. 2023
(arXiv:2310.00036), Mnih et al. 2016 (arXiv:1602.01783), Horgan et al. 2018 (arXiv:1803.00933)."""


def fields(word: str, algorithm: type, user_fields: Fields) -> dict[str, object]:
    """Returns the fields that a placement stands for, except for those that the user gave.

    Args:
      word: such as ``sebulba:1+3``.
      algorithm: the config class.
      user_fields: the fields that the user gave, which win.

    Raises:
      ConfigError: the placement is unknown or does not suit the algorithm,
        or its plan contradicts the given one.
    """
    name, _, sizes = word.partition(":")
    if name not in PLACEMENTS:
        raise ConfigError(
            f"--placement {name!r} is not one of "
            f"{', '.join(spelled())}{did_you_mean(name, PLACEMENTS)}"
        )
    placement = PLACEMENTS[name]
    numbers = re.fullmatch(re.sub("[A-Z]", NUMBER, re.escape(placement.sizes)), sizes)
    if numbers is None:
        written = _written(name)
        example = re.sub("[A-Z]", "2", written)
        raise ConfigError(
            f"--placement {word} must have the form {written}, such as --placement {example}"
        )
    if missing := [flag(need) for need in placement.needs if need not in marked(algorithm)]:
        raise ConfigError(f"--placement {name} needs an algorithm with {', '.join(missing)}")
    values = placement.fields(*map(int, numbers.groups()))
    if user_fields.get("plan") not in (None, values["plan"]):
        raise ConfigError(
            f"--placement {word} runs under --plan {values['plan']}, which contradicts --plan {user_fields['plan']}"
        )
    return {field: value for field, value in values.items() if field not in user_fields}


def check_one_policy(user_fields: Fields) -> None:
    """Checks that a run of several policies has no ``--placement``.

    Raises:
      ConfigError: it has one.
    """
    if user_fields.get("placement") is not None:
        raise ConfigError(
            "--placement needs a run with one policy; set its flags yourself (jaxrl-dist list "
            "placements)"
        )


def spelled() -> list[str]:
    """Returns the placements as written on the command line, such as ``sebulba:A+L``."""
    return [_written(name) for name in PLACEMENTS]


def _written(name: str) -> str:
    return f"{name}:{PLACEMENTS[name].sizes}".rstrip(":")
