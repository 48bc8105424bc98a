"""What an algorithm's functions must return, checked where they are traced: structure,
shapes and dtypes.

``train`` ends with the first fault of a user's algorithm, before anything is compiled, and
``check-algorithm`` lists all; both say the same of each.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_dist import mesh, spaces
from jaxrl_dist.actors.step import blank_rollout
from jaxrl_dist.algorithms import name_of, unannotated
from jaxrl_dist.checks import check_range, did_you_mean
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.train import Train
from jaxrl_dist.envs.base import label_of
from jaxrl_dist.envs.contract import Contract, of_library, shown, traced
from jaxrl_dist.envs.native import described
from jaxrl_dist.envs.source import RECORDS, EnvSource
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.learners.on_policy import examples_per_env
from jaxrl_dist.learners.sgd import losses_of
from jaxrl_dist.nn import cores
from jaxrl_dist.settings.policies import by_policy, naming
from jaxrl_dist.types import (
    Algorithm,
    Algorithms,
    Context,
    EnvSpec,
    PyTree,
    Rollout,
    Timestep,
    Variables,
)


class Strict(Contract):
    """The first fault of an algorithm raises ``ConfigError``."""

    def stop(self, kind: str, text: str, cause: BaseException | None = None) -> Exception:
        return ConfigError(f"{self.name}: {text}")


def check_own(config: Train, spec: EnvSpec, num_devices: int) -> None:
    """Checks the algorithms of a resolved config that are not ours, which are tested.

    Raises:
      ConfigError: the first fault.
    """
    for policy, part in by_policy(config).items():
        if not of_library(type(part.algorithm)):
            with naming(policy):
                of_algorithm(
                    Strict(name_of(part.algorithm)), part, spec.by_policy[policy], num_devices
                )


def check_simulator(
    algorithm: Algorithms, source: EnvSource, plan: str, names: Mapping[str, str]
) -> None:
    """Checks that an algorithm that plans has a simulator,
    and that one that does not moves for one side only.

    Args:
      names: the algorithm's name, by policy.

    Raises:
      ConfigError: it has none, or moves for both.
    """
    spec = source.spec
    env = label_of(source.spec)
    for policy, part in algorithm.items():
        with naming(policy):
            if spec.both_sides and part.trains and not part.imitates and spec.backend == RECORDS:
                raise ConfigError(
                    f"{names[policy]} would learn for one side what the agent of its data did for both; bc imitates it"
                )
            if spec.both_sides and part.trains and not (part.searches or part.imitates):
                raise ConfigError(
                    f"{names[policy]} would learn for one side what it does for both in {env}: opponents=self needs an "
                    "algorithm that plans, such as alphazero, or imitates, as bc does; opponents=agents trains others "
                    "in self-play"
                )
            if not part.searches:
                continue
            if not PLANS[plan].simulates:
                works = ", ".join(name for name in PLANS if PLANS[name].simulates)
                raise ConfigError(
                    f"{names[policy]} plans with the environment itself, which --plan {plan} does not run beside the "
                    f"policy; these do: {works}"
                )
            if source.pure is None or source.pure.simulate is None:
                if source.pure is None:
                    what = "runs on the host"
                else:
                    what = "has no simulator of one agent"
                raise ConfigError(
                    f"{names[policy]} plans with the environment itself, and {env} {what}; gymnax's, those of JAX "
                    "libraries and your own in JAX can be planned with (a trained policy plays elsewhere unplanned)"
                )
            if spec.num_agents > 1:
                raise ConfigError(
                    f"{names[policy]} plans for one agent, and {env} has {spec.num_agents}; --env-options "
                    "opponents=self lets it move for both players of a game"
                )


def of_algorithm(contract: Contract, config: Train, spec: EnvSpec, num_devices: int) -> Algorithm:
    """Makes the algorithm of a resolved config,
    traces each of its functions and checks all that they return.

    Raises:
      ConfigError: the algorithm does not support the environment.
    """
    if fault := unannotated(type(config.algorithm)):
        raise contract.stop("fields", fault)
    with cores.made_for(config.algorithm):
        algorithm = contract.call("make", config.algorithm.make, spec)
    if not isinstance(algorithm, Algorithm):
        text = f"make{_place(config.algorithm.make)} returned {described(algorithm)}; an Algorithm is needed"
        raise contract.stop("make", text)
    _check_numbers(contract, algorithm, config)
    contract.begin("tracing its functions")
    variables = contract.call("init", traced, algorithm.init, _keys())
    if not isinstance(variables, Variables):
        text = f"init{_place(algorithm.init)} returned {described(variables)}; Variables(params, stats) is needed"
        raise contract.stop("init", f"{text}, with () for stats if there are none")
    contract.arrays(variables, "what init returned")
    contract.halt()
    target = _updating(contract, algorithm, variables.params)
    sends_gradients = PLANS[config.plan].sends_gradients
    rows = max(1, config.num_envs * spec.num_agents // (1 if sends_gradients else num_devices))
    greedy = bool(config.evaluation_episodes) and config.evaluation_policy != "sampled"
    rollout = _acting(
        contract, algorithm, spec, variables, (rows, config.rollout_length), greedy=greedy
    )
    if algorithm.update_stats is not None:
        context = Context(None, _float(), target)
        stats = contract.call(
            "update_stats",
            traced,
            mesh.by_hand(algorithm.update_stats),
            variables,
            rollout,
            context,
        )
        _same(
            contract,
            "the stats",
            variables.stats,
            stats,
            "init",
            f"update_stats{_place(algorithm.update_stats)}",
        )
        contract.halt()
    if algorithm.replay is None:
        num_examples = rows * examples_per_env(algorithm, config.rollout_length)
        order = f"{rows} environments x {num_examples // rows} examples of each"
        size = max(1, num_examples // algorithm.num_minibatches)
    elif algorithm.window is None:
        return algorithm  # which ``learner.check_sizes`` refuses
    else:
        num_examples = size = max(1, algorithm.replay.batch_size // num_devices)
        order = f"{num_examples} windows of {algorithm.window + 1} observations"
        rollout = _windows(rollout, algorithm.window, num_examples)
    _learning(contract, algorithm, (variables, rollout, target), num_examples, size, order)
    contract.halt()
    return algorithm


def _check_numbers(contract: Contract, algorithm: Algorithm, config: Train) -> None:
    whose = f"make{_place(config.algorithm.make)} returned an Algorithm whose"
    window = algorithm.window
    replay = algorithm.replay
    try:
        check_range(algorithm, "window", "num_epochs", "num_minibatches", low=1)
        if replay is not None:
            check_range(replay, "capacity", "batch_size", low=1)
            check_range(replay, "ratio", above=0)
            check_range(replay, "learning_starts", "priority_exponent", low=0)
    except ConfigError as error:
        raise contract.stop("numbers", f"{whose} {error}") from None
    if window is not None and replay is None and window > config.rollout_length:
        text = f"window {window} does not fit into --rollout-length {config.rollout_length}"
        raise contract.stop("numbers", f"{whose} {text}; --rollout-length {window} works")


def _updating(contract: Contract, algorithm: Algorithm, params: PyTree) -> PyTree:
    """Checks optimiser and target network; returns the target."""
    optimizer = algorithm.optimizer
    count = jax.ShapeDtypeStruct((), jnp.int32)
    if not isinstance(optimizer, optax.GradientTransformation):
        text = (
            f"optimizer is {described(optimizer)}; one of optax is needed, such as optax.adam(3e-4)"
        )
        raise contract.stop("optimizer", text)
    state = contract.call("the optimizer", traced, optimizer.init, params)

    def update(params: PyTree, state: PyTree, env_step: jax.Array, count: jax.Array) -> PyTree:
        extra = {"env_step": env_step, "updates_done": count}
        return optax.with_extra_args_support(optimizer).update(params, state, params, **extra)

    updates, after = contract.call("the optimizer", traced, update, params, state, _float(), count)
    _same(contract, "the update of params", params, updates, "init", "the optimizer")
    _same(contract, "the optimizer's state", state, after, "its init", "its update")
    target = contract.call("initial_target", traced, algorithm.initial_target, params)
    contract.arrays(target, "the target of initial_target")
    contract.halt()
    later = contract.call("target", traced, algorithm.target, params, target, count)
    _same(
        contract, "the target", target, later, "initial_target", f"target{_place(algorithm.target)}"
    )
    return target


def _acting(
    contract: Contract,
    algorithm: Algorithm,
    spec: EnvSpec,
    variables: Variables,
    sizes: tuple[int, int],
    *,
    greedy: bool,
) -> Rollout:
    """Checks the functions that act; returns the shapes of a rollout of ``sizes``:
    environments, steps.
    """
    rows, length = sizes
    obs = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, spaces.zeros(spec.observation, rows)))
    core = contract.call("initial_core", traced, partial(algorithm.initial_core, rows))
    _check_rows(contract, f"the core of initial_core{_place(algorithm.initial_core)}", core, rows)
    contract.halt()
    for keys in (_keys(rows), None) if greedy else (_keys(rows),):
        doing = "the policy" if keys is not None else GREEDY
        result = contract.call(
            doing, traced, algorithm.policy, variables, obs, core, Context(keys, _float())
        )
        call = f"policy{_place(algorithm.policy)}" + ("" if keys is not None else " without keys")
        action, after, extras = contract.returned(call, result, ("action", "core", "extras"))
        _check_action(contract, call, action, spec, rows)
        _same(contract, "the core", core, after, "initial_core", call)
        _check_rows(contract, f"the extras of {call}", extras, rows)
        contract.halt()
        if keys is not None:
            sampled = action
    reward, flag = (jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.float32, jnp.bool_))
    step = Timestep(obs, reward, flag, flag, flag)
    later = contract.call("feedback", traced, algorithm.feedback, core, sampled, step)
    _same(
        contract, "the core", core, later, "initial_core", f"feedback{_place(algorithm.feedback)}"
    )
    if algorithm.behaviour is not None:
        result = contract.call(
            "behaviour", traced, algorithm.behaviour, variables, core, Context(_keys(), _float())
        )
        call = f"behaviour{_place(algorithm.behaviour)}"
        params, later = contract.returned(call, result, ("params", "core"))
        _check_rows(contract, f"the params of {call}", params, rows)
        _same(contract, "the core", core, later, "initial_core", call)
    contract.halt()
    rollout: Rollout = jax.eval_shape(
        partial(blank_rollout, algorithm, rollout_length=length), variables, obs, core
    )
    return rollout


GREEDY = (
    "the policy must act greedily where context.keys is None, as in evaluations (--evaluation-policy sampled gives "
    "them keys); it"
)
"""How a fault of greedy acting begins."""


def _check_action(contract: Contract, call: str, action: PyTree, spec: EnvSpec, rows: int) -> None:
    parts = spaces.leaves(spec.action)
    actions = spaces.leaves(action)
    if parts.keys() != actions.keys():
        if isinstance(spec.action, dict):
            names = ", ".join(map(repr, parts))
        else:
            names = "no parts"
        raise contract.stop(
            "action", f"{call} returned the action {_shown(action)}; {label_of(spec)} takes {names}"
        )
    for path, part in parts.items():
        x = actions[path]
        is_float = isinstance(part, spaces.Box)
        shape = (rows, *part.shape)
        kind = jnp.floating if is_float else jnp.integer
        if not hasattr(x, "dtype") or x.shape != shape or not jnp.issubdtype(x.dtype, kind):
            needed = f"{'float32' if is_float else 'int32'}{list(shape)}, one for each of {rows} environments"
            text = f"{call} returned the action{path and f' {path!r}'} {_shown(x)}; {label_of(spec)} needs {needed}"
            contract.fault("action", text)


def _learning(
    contract: Contract,
    algorithm: Algorithm,
    data: tuple[Variables, Rollout, PyTree],
    count: int,
    size: int,
    order: str,
) -> None:
    """Checks statistics, postprocessor and loss; ``count`` examples in batches,
    ``size`` of them in an update.
    """
    variables, rollout, target = data
    context = Context(_keys(rollout.reward.shape[1]), _float(), target)
    call = f"postprocess{_place(algorithm.postprocess)}"
    postprocess = mesh.by_hand(_listing(algorithm.postprocess, "rollout.extras"))
    batch = contract.call("postprocess", traced, postprocess, variables, rollout, context)
    if not jax.tree.leaves(batch):
        raise contract.stop(
            "batch", f"{call} returned no arrays, and a batch of {count} examples is needed"
        )
    for path, x in jax.tree.leaves_with_path(batch):
        if x.shape[:1] != (count,):
            text = f"{call} returned batch{jax.tree_util.keystr(path)} {_shown(x)}; its first axis must be {count}, "
            text += (
                f"{order}, all of environment 0 first"
                if algorithm.replay is None
                else f"one for each of {order}"
            )
            if x.shape[:2] == rollout.reward.shape:
                text += "; [T, B] is time-major: jaxrl_dist.types.swap_axes makes it [B, T]"
            raise contract.stop("batch", text)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), batch)
    function = mesh.by_hand(_listing(partial(losses_of, algorithm), "batch"))
    context = Context(_keys(size), _float(), target)
    try:
        losses, _, aux = contract.call("the loss", traced, function, variables, batch, context)
    except ConfigError as error:
        return contract.refuse("loss", error)
    call = f"loss{_place(algorithm.loss)}"
    if not jnp.issubdtype(losses.dtype, jnp.floating):
        contract.fault(
            "losses",
            f"{call} returned losses {_shown(losses)}; numbers with a gradient are float32",
        )
    for name in (name for name, x in aux.metrics.items() if x.shape != losses.shape):
        text = f"{call} returned the metric {name!r} as one number, and not one for each example; a mean over examples"
        contract.note(f"{text} counts those that the mask leaves out")


def _listing(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Returns a function of ``(variables, rollout or batch, context)``
    whose KeyErrors list the names in ``what``.
    """

    def call(variables: Variables, data: Any, context: Context) -> Any:
        try:
            return function(variables, data, context)
        except KeyError as error:
            names = data.extras if isinstance(data, Rollout) else data
            key = str(*error.args[:1])
            if isinstance(names, dict) and names and key not in names:
                error.add_note(
                    f"{what} has {', '.join(map(repr, sorted(names)))}{did_you_mean(key, names)}"
                )
            raise

    return call


def _check_rows(contract: Contract, subject: str, tree: PyTree, rows: int) -> None:
    contract.arrays(tree, subject)
    for path, x in jax.tree.leaves_with_path(tree):
        if getattr(x, "shape", (rows,))[:1] != (rows,):
            where = jax.tree_util.keystr(path)
            needed = f"its first axis must be {rows}, the environments"
            contract.fault(subject, f"{subject}{where and f' at {where}'} is {_shown(x)}; {needed}")


def _same(
    contract: Contract, subject: str, first: PyTree, later: PyTree, before: str, after: str
) -> None:
    """Checks that a function keeps structure, shapes and dtypes of what it changes."""
    structures: list[Any] = [jax.tree.structure(tree) for tree in (first, later)]
    if structures[0] != structures[1]:
        contract.fault(
            subject,
            f"{subject} after {after} is {_shown(later)}, and after {before} {_shown(first)}",
        )
    else:
        contract.same(subject, first, later, before, after)


def _windows(rollout: Rollout, length: int, count: int) -> Rollout:
    """Returns shapes and dtypes of ``count`` windows that replay draws, from those of a rollout."""
    cut = length - rollout.reward.shape[0]

    def drawn(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((x.shape[0] + cut, count, *x.shape[2:]), x.dtype)

    windows: Rollout = jax.tree.map(drawn, rollout._replace(core=(), final_core=()))
    return windows


def _float() -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), jnp.float32)


def _keys(*shape: int) -> Any:
    """Returns the shape of keys, or of one key."""
    return jax.eval_shape(
        lambda: jax.random.split(jax.random.key(0), shape) if shape else jax.random.key(0)
    )


def _shown(tree: PyTree) -> str:
    """Returns dtypes and shapes, such as ``float32[8, 1]``; of a tree with its structure."""

    def leaf(x: Any) -> str:
        if hasattr(x, "dtype"):
            return f"{x.dtype}{list(x.shape)}"
        return described(x)

    return shown(jax.tree.map(leaf, tree)).replace("'", "")


def _place(function: Any) -> str:
    """Returns where a user's function stands, such as `` (my_algo.py, line 40)``;
    empty for one of ours.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or of_library(function):
        return ""
    return f" ({os.path.basename(code.co_filename)}, line {code.co_firstlineno})"
