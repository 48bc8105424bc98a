"""``check-algorithm``: every fault is named in one line, and what is right is not."""

from __future__ import annotations

import dataclasses
import sys
import traceback
import types
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from test_docs import blocks

import jaxrl_dist
from jaxrl_dist import cli
from jaxrl_dist.algorithms import ALGORITHMS, from_file, searching
from jaxrl_dist.algorithms.muzero import MuZero
from jaxrl_dist.commands.check_algorithm import acting, check, losses
from jaxrl_dist.commands.check_env.findings import Check
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.training import contract
from jaxrl_dist.types import Context, Variables

RIGHT = blocks("docs/adding-an-algorithm.md")[0]
BATCH = "return net.examples(rollout, weight=weight, value_target=advantage + values[:-1])"
ACTED = "policy=net.policy"
FED = "feedback=net.feedback"


def acted(returned: str) -> str:
    """A policy that returns something else; ``a`` is the right triple."""
    return f"policy=lambda v, o, c, x: (lambda a: {returned})(net.policy(v, o, c, x))"


FAULTS = {
    "mean": (
        "return total,",
        "return total.mean(),",
        "losses () with a mask (128,); return both with an entry for each",
    ),
    "column": ("return total,", "return total[:, None],", "losses (128, 1) with a mask (128,)"),
    "square": (
        "(rollout, weight=weight,",
        "(rollout, weight=weight[..., None],",
        "(my_algo.py, line 36)",
    ),
    "short mask": (
        'batch["valid"], Aux',
        'batch["valid"][1:], Aux',
        "losses (128,) with a mask (127,)",
    ),
    "one mask": (
        'batch["valid"], Aux',
        'batch["valid"].all(), Aux',
        "losses (128,) with a mask ()",
    ),
    "row missing": (
        *(BATCH, BATCH.replace("return ", "return {**") + ", 'weight': weight.reshape(-1)[1:]}"),
        "postprocess (my_algo.py, line 27) returned batch['weight'] float32[511]; its first axis must be 512",
    ),
    "typo": (
        'batch["weight"]',
        'batch["weights"]',
        "the loss raises KeyError: 'weights' (my_algo.py, line 36); batch has",
    ),
    "extra": (
        *("weight=weight,", "weight=rollout.extras['logprob'],"),
        "rollout.extras has 'log_prob', 'value' (did you mean 'log_prob'?)",
    ),
    "action column": (
        *(ACTED, acted("(a[0][:, None], a[1], a[2])")),
        "policy (my_algo.py, line 45) returned the action int32[8, 1]; gymnax:CartPole-v1 needs int32[8], one for each",
    ),
    "no annotation": (
        *("temperature: float = setting(1.0, above=0)", "temperature = 1.0"),
        "RWR.temperature needs an annotation to be a hyperparameter: `temperature: float = 1.0`",
    ),
    "a core in make": (
        *("actor_critic(self,", "actor_critic(dataclasses.replace(self, core='gru'),"),
        "make sets a core that the field core does not name, so the run uses the preset without a core; name it, as in class RWR(Actor",
    ),
    "core": (
        ACTED,
        acted("(a[0], a[0], a[2])"),
        "the core after policy (my_algo.py, line 45) is int32[8], and after init",
    ),
    "global_mean": (
        *("global_mean(jnp.abs(advantage)", "global_mean(jnp.stack([advantage] * 4, -1)"),
        "one number for each entry of its mask (64, 8), not (64, 8, 4); join several with jnp.mean(x, axis=-1) (my",
    ),
}
"""Changes of the documented algorithm, and what is said of them."""
MORE_FAULTS = {
    "time-major": (
        BATCH,
        "return {'x': rollout.reward}",
        "batch['x'] float32[64, 8]; its first axis must be 512, 8 env",
    ),
    "float action": (
        ACTED,
        acted("(a[0] * 1.0, a[1], a[2])"),
        "returned the action float32[8]; gymnax:CartPole-v1 needs",
    ),
    "one-hot": (
        ACTED,
        acted("(jnp.eye(2)[a[0]], a[1], a[2])"),
        "returned the action float32[8, 2]; gymnax:CartPole-v1",
    ),
    "two values": (
        ACTED,
        acted("a[:2]"),
        "policy (my_algo.py, line 45) returned 2 values, not (action, core, extras)",
    ),
    "extras": (
        *(ACTED, acted("(a[0], a[1], {'log_prob': a[2]['log_prob'].mean()})")),
        "the extras of policy (my_algo.py, line 45) at ['log_prob'] is float32[]; its first axis must be 8, the",
    ),
    "greedy": (ACTED, acted("(a, x.keys[0])[0]"), "act greedily where context.keys is None"),
    "init": (
        "init=net.init",
        "init=lambda key: net.init(key).params",
        "init (my_algo.py, line 44) returned a dict; return Variables(params, stats)",
    ),
    "optimizer": (
        'clipped_optimizer("adam")',
        "clipped_optimizer",
        "optimizer is a method; use one of optax",
    ),
    "no algorithm": (
        "return Algorithm(",
        "x = Algorithm(",
        "make (my_algo.py, line 24) returned a NoneType; return an Algorithm",
    ),
    "field": (
        "num_epochs=4",
        "num_epoch=4",
        "got an unexpected keyword argument 'num_epoch' (my_algo.py, line 43)",
    ),
    "if": (
        "value_loss = jnp",
        "value_loss = 0 if value[0] > 0 else jnp",
        "the loss cannot run in a compiled program (my_algo",
    ),
    "feedback": (
        FED,
        "feedback=lambda core, action, step: step.reward",
        "after feedback (my_algo.py, line 50) is float32[8]",
    ),
    "initial core": (
        "net.initial_core",
        "lambda n: jnp.zeros(3)",
        "initial_core (my_algo.py, line 49) is float32[3]; its first",
    ),
    "stats": (
        FED,
        "update_stats=lambda v, r, c: r.reward",
        "the stats after update_stats (my_algo.py, line 50) is float32[64",
    ),
    "target": (
        FED,
        "initial_target=lambda p: p, target=lambda p, t, u: 0.0",
        "the target after target (my_algo.py, line 50) is",
    ),
    "integers": (
        "return total,",
        "return total.astype(int),",
        "loss (my_algo.py, line 34) returned losses int32[128]; return float32",
    ),
    "dict": (
        "Aux({",
        "dict({",
        "the algorithm's loss must return losses, a mask and Aux(metrics), not (array, array, dict)",
    ),
    "empty": (
        BATCH,
        "return {}",
        "postprocess (my_algo.py, line 27) returned no arrays, and a batch of 512 examples is needed",
    ),
    "behaviour": (
        FED,
        "behaviour=lambda v, c, x: (v.params, c)",
        "the params of behaviour (my_algo.py, line 50) at ['policy']",
    ),
}


def keyed(key: str) -> str:
    """A policy that takes all its keys from one."""
    keys = f"x._replace(keys=jax.random.split({key}, len(o)))"
    return f"policy=lambda v, o, c, x: net.policy(v, o, c, x if x.keys is None else {keys})"


FIXED = "x._replace(keys=jax.random.split(jax.random.key(0), len(o)))"
OLD = f"""batch = {BATCH.removeprefix("return ")}
            old, _ = net.evaluate(variables.params, batch)
            return {{**batch, "old": old.log_prob(batch["action"])}}"""
VALUE_LOSS = 'jnp.square(value - batch["value_target"])'
EXECUTED = {
    "one key": (
        ACTED,
        keyed("x.keys[0]"),
        "policy gives a row another output when environments change places",
    ),
    "fixed key": (ACTED, keyed("jax.random.key(0)"), "policy makes its own key,"),
    "greedy draws": (
        *(
            ACTED,
            f"policy=lambda v, o, c, x: net.policy(v, o, c, {FIXED} if x.keys is None else x)",
        ),
        "policy draws random numbers where context.keys is None",
    ),
    "argmin": (
        ACTED,
        acted("(1 - a[0], a[1], a[2]) if x.keys is None else a"),
        "policy takes greedy actions",
    ),
    "no exploration": (
        *(ACTED, "policy=lambda v, o, c, x: net.policy(v, o, c, x._replace(keys=None))"),
        "note: policy takes the same actions for any context.keys,",
    ),
    "time-major": (
        *(BATCH, f"{BATCH} | {{'weight': weight.reshape(-1)}}"),
        "postprocess returned batch['weight'] in time-major order",
    ),
    "a mean of all steps": (
        *(
            "jnp.abs(advantage), rollout.valid)",
            "jnp.abs(advantage), jnp.ones_like(rollout.valid))",
        ),
        "postprocess returned another batch['weight'] for some environments because others have reset steps",
    ),
    "no stop_gradient": (
        *('-batch["weight"] *', '-(batch["value_target"] - value) *'),
        "note: the metric 'loss/policy' has a gradient for params['value']",
    ),
    "local mean": (
        *("mesh.global_mean(jnp.abs(advantage), rollout.valid)", "jnp.abs(advantage).mean()"),
        "two devices give another 'loss/policy' than one",
    ),
    "mean": (
        "return total,",
        "return jnp.full_like(total, total.mean()),",
        "two devices give another",
    ),
    "a mean that is 0 at first": (
        *("return total,", "return total + jnp.mean(jnp.exp(RATIO) - 1 - RATIO),"),
        "loss gives an example another loss when other examples change; take means over examples in postprocess",
    ),
    "a ratio's mask": (
        *(
            'return total, batch["valid"]',
            'return jnp.exp(RATIO) * batch["weight"], jnp.ones_like(total)',
        ),
        "loss learns from reset steps",
    ),
    "no mask": (
        'batch["valid"], Aux',
        'jnp.ones_like(batch["valid"]), Aux',
        "loss learns from reset steps",
    ),
    "no gradient": (
        *("jnp.square(value -", "jnp.square(jax.lax.stop_gradient(value) -"),
        "the loss has gradients of 0 for params['value']['params']['bias'] in all of 6 updates, and for 3 more",
    ),
    "nan": (
        VALUE_LOSS,
        VALUE_LOSS.replace("square", "log"),
        "the loss has the metric 'loss/value' nan within 2 updates",
    ),
    "root": (
        VALUE_LOSS,
        "jnp.sqrt(jnp.square(value * 0.0))",
        "the loss has a gradient that is not finite although each",
    ),
    "impure": (
        "value_loss = ",
        "value_loss = __import__('random').random() * ",
        "differs when it is traced again",
    ),
    "ends": (
        *(
            "*rollout.outcomes,",
            "rollout.reward, ~rollout.valid, rollout.terminated | rollout.truncated, rollout.valid,",
        ),
        "note: postprocess treats rollout.terminated and rollout.truncated alike",
    ),
    "frozen": (
        *('self.clipped_optimizer("adam")', "__import__('optax').set_to_zero()"),
        "the optimizer has not changed params['policy']['params']['bias'] in 6 updates",
    ),
}


def algorithm_of(text: str) -> Any:
    """The config class of a file."""
    module = types.ModuleType("my_algo")
    sys.modules[module.__name__] = module
    exec(compile(text, "my_algo.py", "exec"), module.__dict__)
    return next(
        kind for kind in vars(module).values() if getattr(kind, "__module__", "") == module.__name__
    )


def checked(text: str) -> None:
    """Checks the algorithm of a file as ``train`` does before it compiles."""
    config, source = resolved(jaxrl_dist.preset(algorithm_of(text), "CartPole-v1"))
    contract.check_own(config, source.spec, 2)


@pytest.mark.parametrize(
    "fault",
    # test_what_train_refuses
    [*FAULTS, *(pytest.param(name, marks=pytest.mark.case) for name in MORE_FAULTS)],
)
def test_what_train_refuses(fault: str) -> None:
    old, new, message = {**FAULTS, **MORE_FAULTS}[fault]
    assert old in RIGHT
    with pytest.raises(ConfigError) as caught:
        checked(RIGHT.replace(old, new))
    assert message in (line := caught.value.with_flags) and "\n" not in line


@pytest.mark.parametrize("page", ["adding-an-algorithm", "adding-an-off-policy-algorithm"])
def test_what_is_right_is_not_refused(page: str) -> None:
    checked(blocks(f"docs/{page}.md")[0])


def test_a_fault_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, message = FAULTS["action column"]
    (file := tmp_path / "my_algo.py").write_text(RIGHT.replace(old, new))
    assert cli.main(["train", str(file), "--env", "CartPole-v1", *runs.TINY.split()]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out
    assert cli.main(["check-algorithm", str(file), "--env", "CartPole-v1"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith(f"{file}: policy (my_algo.py, line 45) returned") and out.count("\n") == 1
    assert err == "jaxrl-dist: tracing its functions ...\n"


@pytest.mark.parametrize("fault", EXECUTED)
@pytest.mark.slow
def test_what_only_shows_in_numbers(fault: str) -> None:
    old, new, message = EXECUTED[fault]
    text = RIGHT.replace(old, new)
    assert old in RIGHT
    if "RATIO" in new:  # of the action's probability to that before the first update
        text = text.replace(
            "RATIO", '(distribution.log_prob(batch["action"]) - batch["old"])'
        ).replace(BATCH, OLD)
    config, source = resolved(
        jaxrl_dist.preset(algorithm_of(text), "CartPole-v1", hidden_sizes=(4,))
    )
    lines = check(config, source.spec).lines("mine", "")
    assert [line for line in lines if line.startswith(f"mine: {message}") or message in line], lines


def tried(**of: Any) -> Any:
    """What an algorithm with these functions is tried on; its parameters are logits of 3
    actions.
    """
    logits = np.float32([0.1, 0.0, -0.1])
    rollout = SimpleNamespace(
        obs=np.zeros((17, 4, 1), np.float32), reward=np.zeros((16, 4), np.float32)
    )
    algorithm = SimpleNamespace(initial_core=lambda num_envs: (), **of)
    return SimpleNamespace(
        algorithm=algorithm, variables=Variables(logits, ()), target=logits, rollout=rollout
    )


@pytest.mark.parametrize("way", ["mode", "draw", "gumbel", "puct"])
def test_draws_of_greedy_actions_are_a_fault_where_they_decide(way: str) -> None:
    """A search has a constant key also where it draws no action."""

    def step(logits: Any, keys: Any, action: Any, state: Any) -> Any:
        nothing = jnp.zeros(action.shape)
        return nothing, nothing, jnp.broadcast_to(logits, (len(action), 3)), nothing, state

    def policy(variables: Variables, obs: Any, core: Any, context: Context) -> Any:
        logits, rows = jnp.broadcast_to(variables.params, (len(obs), 3)), jnp.zeros(len(obs))
        if way == "mode":
            return logits.argmax(axis=-1), core, {}
        if way == "draw":
            return jax.random.categorical(jax.random.key(0), logits), core, {}
        config = MuZero(search=way, num_simulations=4)  # type: ignore[arg-type]
        return (
            searching.search(
                config, step, logits[0], logits, rows, rows, None, context.keys
            ).action,
            core,
            {},
        )

    assert acting._draws_decide(tried(policy=policy)) == (way == "draw")


@pytest.mark.parametrize("reads", [True, False])
def test_check_reads_a_target_of_logits_up_to_a_constant(reads: bool) -> None:
    found = Check("mine")
    trial = tried(target=lambda params, target, updates: params)
    losses._check_target(
        found, trial, lambda target: jax.nn.softmax(target if reads else jnp.zeros(3))
    )
    assert found.faults.keys() == (set() if reads else {"unread"})


ENVS = {**dict.fromkeys(["ddpg", "td3", "sac"], "Pendulum-v1"), "qmix": "team:Meeting"}


@pytest.mark.slow
def test_nothing_is_wrong_with_what_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    for page, env in {
        "adding-an-algorithm": "CartPole-v1",
        "adding-an-off-policy-algorithm": "CartPole-v1",
    }.items():
        config, source = resolved(
            jaxrl_dist.preset(algorithm_of(blocks(f"docs/{page}.md")[0]), env)
        )
        assert check(config, source.spec).lines(page, "")[0].startswith(f"{page}: no fault found")
        phases = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
        assert phases == ["tracing", "training", "comparing", "training", "trying"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_nothing_is_wrong_with_ours(name: str) -> None:
    config, source = resolved(jaxrl_dist.preset(name, ENVS.get(name, "CartPole-v1")))
    (line,) = check(config, source.spec).lines(name, "")
    assert "no fault found" in line


def test_what_else_a_function_raises_ends_in_its_own_line(tmp_path: Path) -> None:
    (file := tmp_path / "my_algo.py").write_text(
        RIGHT.replace(FED, f"{FED}, done=lambda means: 1 / 0")
    )
    with pytest.raises(ZeroDivisionError) as caught:
        cli.main(
            [
                "train",
                str(file),
                "--env",
                "CartPole-v1",
                *runs.TINY.split(),
                "--run-dir",
                str(tmp_path / "run"),
            ]
        )
    assert "JAX has removed its internal frames" not in "".join(
        traceback.format_exception(caught.value)
    )


@pytest.mark.parametrize(
    "args, message",
    {
        "": "which algorithm? Such as: jaxrl-dist check-algorithm my_algo.py --env CartPole-v1",
        "pppo --env CartPole-v1": "did you mean 'ppo'?",
        "ppo --env CartPol-v1": "did you mean 'CartPole-v1'?",
        "ppo --env CartPole-v1 --lernrate 1": "unknown flag --lernrate",
        "dqn --env Pendulum-v1": "dqn needs discrete actions",
        "--policy a=ppo:agent_0 --env CartPole-v1": "check-algorithm checks one algorithm",
    }.items(),
)
def test_what_cannot_be_checked(
    args: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check-algorithm", *args.split()]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out


REPLACED = """
import dataclasses
import optax
from jaxrl_dist.algorithms.ppo import PPO

@dataclasses.dataclass(frozen=True)
class Mine(PPO):
    def make(self, spec):
        return dataclasses.replace(super().make(spec), optimizer=OPTIMIZER)
"""


@pytest.mark.parametrize(
    "optimizer, replaces",
    [
        ("optax.adamw(self.learning_rate)", True),
        ("optax.chain(optax.clip(1.0), self.make_optimizer('adam', self.learning_rate))", False),
    ],
)
def test_flags_of_a_replaced_optimizer_are_named(
    optimizer: str, replaces: bool, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(REPLACED.replace("OPTIMIZER", optimizer))
    fields = {"optimizer": "lion", "hidden_sizes": (4,), "num_envs": 8, "rollout_length": 4}
    kind = from_file(str(tmp_path / "mine.py"))
    config, source = resolved(jaxrl_dist.preset(kind, "CartPole-v1", **fields))
    assert contract.replaces_optimizer(config.algorithm, source.spec) == replaces
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        contract.check_own(config, source.spec, 1)
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == replaces
    assert all("optimizer" in text and "weight_decay" not in text for text in texts)
    plain = dataclasses.replace(config.algorithm, optimizer=None)
    with warnings.catch_warnings(action="error"):
        contract.check_own(dataclasses.replace(config, algorithm=plain), source.spec, 1)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_ours_follow_the_flags_of_the_optimizer(name: str) -> None:
    env = {"ddpg": "Pendulum-v1", "td3": "Pendulum-v1"}.get(name, "CartPole-v1")
    spec = find(env).spec
    algorithm = jaxrl_dist.preset(name, env).algorithm
    assert not contract.replaces_optimizer(algorithm, spec)
