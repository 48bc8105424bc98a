"""rejax's side of ``benchmarks/peers.py``; runs in rejax's own virtual environment. Prints env steps per second."""

import sys
import time

import jax
from rejax import PPO

env, steps, seeds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
algorithm = PPO.create(
    env=env,
    total_timesteps=steps,
    eval_freq=steps,
    skip_initial_evaluation=True,
    num_envs=4,
    num_steps=128,
    num_epochs=4,
    num_minibatches=4,
    learning_rate=1e-3,
    max_grad_norm=0.5,
    agent_kwargs={"activation": "tanh", "hidden_layer_sizes": (64, 64)},
)
algorithm = algorithm.replace(eval_callback=lambda algorithm, state, key: ())  # evaluation is no part of the rate
train, keys = algorithm.train, jax.random.key(0)
if seeds > 1:
    train, keys = jax.vmap(algorithm.train), jax.random.split(keys, seeds)
began = time.perf_counter()
program = jax.jit(train).lower(keys).compile()
compiling, began = time.perf_counter() - began, time.perf_counter()
jax.block_until_ready(program(keys))
print(steps * seeds / (time.perf_counter() - began), compiling)
