"""Cases of tests that ``make test`` leaves to ``make slow``: another case of the same test, named beside it, stays."""

from __future__ import annotations

CASES = {
    # ids, below tests/ and up to any place                         what `make test` keeps of the kind
    "learners/test_learners.py::test_one_device_is_as_eight[a2c-gru]": "ppo-gru",
    "learners/test_learners.py::test_one_device_is_as_eight[pg-discrete]": "pg",
    "learners/test_learners.py::test_one_device_is_as_eight[appo]": "ppo, impala",
    "learners/test_learners.py::test_one_device_is_as_eight[sac-discrete]": "sac, dqn",
    "memory/test_frames.py::test_rollouts_hold_the_stacks_that_envpool_makes[colours]": "lives, truncated lives",
    "plans/test_plans.py::test_probe[pg-": "a2c",
    "plans/test_plans.py::test_probe[appo-": "ppo, impala",
    "plans/test_plans.py::test_probe[rainbow-": "dqn",
    "plans/test_plans.py::test_continuous_probe[a2c-": "ppo",
    "plans/test_plans.py::test_continuous_probe[pg-": "ppo",
    "plans/test_plans.py::test_continuous_probe[impala-": "ppo",
    "plans/test_plans.py::test_continuous_probe[appo-": "ppo",
    "plans/test_plans.py::test_continuous_probe[ddpg-": "td3",
    "plans/test_plans.py::test_probes_under_the_other_plans[ppo-synchronous]": "impala-synchronous",
    "plans/test_plans.py::test_probes_under_the_other_plans[dqn-synchronous]": "dqn-asynchronous",
    "plans/test_plans.py::test_every_algorithm_repeats_bit_for_bit[appo]": "impala",
    "plans/test_plans.py::test_every_algorithm_repeats_bit_for_bit[td3]": "sac",
    "algorithms/test_r2d2.py::test_a_run_on_two_devices[synchronous]": "on_device",
    "plans/test_asynchronous.py::test_leaving_the_loop_leaves_nothing[a2c]": "impala",
    "test_docs.py::test_the_documented_algorithm_runs_everywhere": "test_the_documented_algorithm_learns_and_loads",
    "test_cli.py::test_the_real_command_refuses_fast[environment]": "sizes",
    "test_cli.py::test_training_outlives_its_output[closed]": "full; test_a_reader_that_has_enough_is_no_error",
    "envs/test_envs.py::test_gymnax_against_its_own_step[MemoryChain-bsuite": "Catch, Breakout",
    "envs/test_envs.py::test_gymnax_against_its_own_step[FourRooms-misc": "CartPole, FrozenLake",
    "envs/test_gymnasium.py::test_ctrl_c_ends_a_process_whose_environment_hangs[processes]": "threads, killed",
    "envs/test_env_faults.py::test_processes_describe_spaces_as_threads_do[Image]": "Box",
    "envs/test_env_faults.py::test_processes_describe_spaces_as_threads_do[Whole]": "Box",
    "envs/test_env_seeds.py::test_neither_plan_nor_actors_change_which_episodes_come_first[gymnasium:CartPole-v1-2]": (
        "1, 4"
    ),
}
