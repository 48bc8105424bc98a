"""Cases of tests that ``make test`` leaves to ``make slow``: another case of the same test, named beside it, stays."""

from __future__ import annotations

CASES = {
    # ids, below tests/ and up to any place                         what `make test` keeps of the kind
    "commands/test_resume_or_start.py::test_it_starts_where_there_is_no_run": (
        "test_what_a_run_without_a_checkpoint_has_left_makes_room"
    ),
    "test_packing.py::test_a_run_in_the_form_for_gpus_is_equal[rainbow]": "dqn",
    "learners/test_learners.py::test_one_device_is_as_many[ppo-2]": "ppo-8",
    "learners/test_learners.py::test_one_device_is_as_many[dqn-2]": "dqn-8",
    "learners/test_learners.py::test_one_device_is_as_many[a2c-gru-8]": "ppo-gru",
    "learners/test_learners.py::test_one_device_is_as_many[pg-": "a2c",
    "learners/test_learners.py::test_one_device_is_as_many[appo-8]": "ppo, impala",
    "learners/test_learners.py::test_one_device_is_as_many[rainbow-8]": "dqn",
    "learners/test_learners.py::test_one_device_is_as_many[sac-": "td3, dqn",
    "learners/test_learners.py::test_each_epoch_sees_every_example_once[1-8]": "4-8",
    "learners/test_learners.py::test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted[ppo-1]": "dqn-1",
    "learners/test_learners.py::test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted[dqn-8]": "ppo-8",
    "memory/test_replay.py::test_windows_are_whole_and_every_one_is_drawn[True-200-50-8-1-1]": "False-200-50-8-1-1",
    "memory/test_replay.py::test_windows_are_whole_and_every_one_is_drawn[False-200-50-8-1-4]": "True-200-50-8-1-4",
    "memory/test_replay.py::test_windows_are_whole_and_every_one_is_drawn[False-24-64-8-3-4]": "48-50-8-3-4",
    "memory/test_replay.py::test_windows_are_whole_and_every_one_is_drawn[True-24-64-8-3-4]": "48-50-8-3-4",
    "memory/test_replay.py::test_bytes_are_foretold[8-vector": "8-atari, 1-vector",
    "memory/test_replay.py::test_bytes_are_foretold[8-discrete": "8-atari, 1-discrete",
    "memory/test_replay.py::test_bytes_are_foretold[8-minatar": "8-atari, 1-minatar",
    "memory/test_replay.py::test_bytes_are_foretold[8-colours": "8-atari, 1-colours",
    "memory/test_replay.py::test_weighted_estimates_agree_on_any_number_of_devices[2]": "4",
    "memory/test_frames.py::test_rollouts_hold_the_stacks_that_envpool_makes[colours]": "lives",
    "algorithms/test_cores.py::test_the_loss_of_a_rollout_is_that_of_its_episodes[lstm]": "linear, inputs",
    "algorithms/test_cores.py::test_replayed_sequences_are_worth_what_acting_saw_episode_by_episode[gru]": "attention",
    "plans/test_plans.py::test_probe[pg-": "a2c",
    "plans/test_plans.py::test_probe[appo-": "ppo",
    "plans/test_plans.py::test_probe[rainbow-": "dqn",
    "plans/test_plans.py::test_probe[impala-": "a2c, impala-synchronous",
    "plans/test_plans.py::test_probe[pqn-": "ppo, dqn",
    "plans/test_plans.py::test_continuous_probe[sac-": "td3",
    "plans/test_plans.py::test_probes_under_the_other_plans[impala-asynchronous]": "dqn-asynchronous",
    "plans/test_plans.py::test_continuous_probe[a2c-": "ppo",
    "plans/test_plans.py::test_continuous_probe[pg-": "ppo",
    "plans/test_plans.py::test_continuous_probe[impala-": "ppo",
    "plans/test_plans.py::test_continuous_probe[appo-": "ppo",
    "plans/test_plans.py::test_continuous_probe[ddpg-": "td3",
    "plans/test_plans.py::test_probes_under_the_other_plans[ppo-synchronous]": "impala-synchronous",
    "plans/test_plans.py::test_probes_under_the_other_plans[dqn-synchronous]": "dqn-asynchronous",
    "plans/test_plans.py::test_every_algorithm_repeats_bit_for_bit[appo]": "impala",
    "plans/test_plans.py::test_every_algorithm_repeats_bit_for_bit[td3]": "sac",
    "plans/test_asynchronous.py::test_leaving_the_loop_leaves_nothing[impala-100]": "impala-20",
    "plans/test_asynchronous.py::test_leaving_the_loop_leaves_nothing[a2c-100]": "impala-20",
    "plans/test_asynchronous.py::test_a_rollout_that_did_not_come_changes_nothing[a2c]": "impala",
    "actors/test_actors.py::test_devices_do_not_matter[recurrent-2]": "recurrent-8",
    "actors/test_actors.py::test_devices_do_not_matter[continuous-8]": "recurrent-8",
    "test_docs.py::test_the_documented_algorithm_runs_everywhere": "test_the_documented_algorithm_learns_and_loads",
    "test_cli.py::test_the_real_command_refuses_fast[environment]": "sizes",
    "test_cli.py::test_training_outlives_its_output[closed]": "full; test_a_reader_that_has_enough_is_no_error",
    "envs/test_envs.py::test_gymnax_against_its_own_step[MemoryChain-bsuite": "Catch, Breakout",
    "envs/test_envs.py::test_gymnax_against_its_own_step[FourRooms-misc": "CartPole, FrozenLake",
    "envs/test_info.py::test_against_a_plain_loop[scored:HostScored-processes-": "scored:HostScored-threads",
    "envs/test_info.py::test_envpools_parts_of_the_reward_add_up_to_the_return[1]": "2",
    "envs/test_gymnasium.py::test_ctrl_c_ends_a_process_whose_environment_hangs[processes]": "threads, killed",
    "envs/test_env_faults.py::test_processes_describe_spaces_as_threads_do[Image]": "Box",
    "envs/test_env_faults.py::test_processes_describe_spaces_as_threads_do[Whole]": "Box",
    "envs/test_env_seeds.py::test_neither_plan_nor_actors_change_which_episodes_come_first[gymnasium:CartPole-v1-2]": (
        "1, 4"
    ),
    "plans/test_on_device.py::test_members_of_a_population_are_their_lone_runs[ppo-2-1]": "ppo-1-1, dqn-2-2",
    "plans/test_plans.py::test_probe[a2c-": "ppo",
    "plans/test_plans.py::test_probe[sac-": "dqn, and continuous td3",
    "plans/test_plans.py::test_every_algorithm_repeats_bit_for_bit[impala]": "sac, pqn",
    "learners/test_learners.py::test_one_device_is_as_many[a2c-8]": "ppo-8",
    "learners/test_learners.py::test_one_device_is_as_many[impala-8]": "ppo-gru-8",
    "actors/test_evaluate.py::test_evaluations_change_nothing[synchronous]": "on_device",
    "actors/test_evaluate.py::test_evaluations_change_nothing[asynchronous]": "on_device",
    "actors/test_evaluate.py::test_a_resumed_run_evaluates_where_it_would_have[with the first": "before, with",
    "actors/test_evaluate.py::test_a_resumed_run_evaluates_where_it_would_have[with one that is not": "before, with",
    "actors/test_actors.py::test_host_acts_as_device[discrete]": "episodic",
    "algorithms/test_dqn.py::test_a_run_counts_its_updates_and_repeats_bit_for_bit[synchronous]": "on_device",
    "algorithms/test_dqn.py::test_a_run_on_two_devices[None]": "0.5",
    "plans/test_on_device.py::test_members_of_a_population_are_their_lone_runs[dqn-2-1]": "dqn-2-2",
    "plans/test_plans.py::test_continuous_probe[ppo-": "td3, and discrete ppo",
    "plans/test_plans.py::test_every_algorithm_repeats_bit_for_bit[sac]": "pqn, and dqn in algorithms/test_dqn.py",
    "learners/test_learners.py::test_one_device_is_as_many[ppo-8]": "ppo-gru-8",
    "learners/test_learners.py::test_one_device_is_as_many[ppo-continuous-4]": "ppo-gru-8, td3-8",
    "learners/test_learners.py::test_one_device_is_as_many[pqn-8]": "dqn-8",
    "nn/test_own_network.py::test_every_algorithm_learns_by_it[dqn]": "ppo, sac",
    "nn/test_own_network.py::test_every_algorithm_learns_by_it[impala]": "ppo, sac",
    "plans/test_asynchronous.py::test_an_environment_that_hangs_ends_the_run[None-0]": "1-0",
    "plans/test_on_device.py::test_environments_may_branch_and_loop_as_they_like[1]": "2",
    "training/test_resume.py::test_two_runs_resumed_from_one_checkpoint_are_equal[asynchronous-": "synchronous",
    "memory/test_frames.py::test_rollouts_hold_the_stacks_that_envpool_makes[truncated lives]": "lives",
    "envs/test_wrappers.py::test_a_run_its_evaluation_and_its_policy_have_them[a2c --env CartPole-v1": "the others",
    "memory/test_frames.py::test_rollouts_hold_the_stacks_that_envpool_makes[games that end": "lives",
    "envs/test_gymnasium.py::test_what_hangs_is_named_in_time[hang in reset-": "hang-threads, hang-processes",
    "plans/test_plans.py::test_same_seed_same_numbers[synchronous]": "on_device",
    "training/test_population.py::test_a_run_ends_with_the_return_that_it_is_to_reach[on_device]": "the members",
    "training/test_population.py::test_a_run_ends_with_the_return_that_it_is_to_reach[gradients]": "asynchronous",
    "plans/test_on_device.py::test_members_of_a_population_are_their_lone_runs[ppo-1-1]": "dqn-1-1, ppo-2-2",
    "plans/test_on_device.py::test_members_of_a_population_are_their_lone_runs[dqn-2-2]": "dqn-1-1, ppo-2-2",
    "test_gpu_day.py::test_a_task_measures[Pong to the end]": "ppo CartPole",
    "play/test_export.py::test_an_exported_policy_acts_the_same_without_this_package[recurrent]": "feed-forward",
    "plans/test_evolve.py::test_a_stop_where_members_are_selected_leaves_the_selection_as_it_is[halving]": "pbt",
    "training/test_population.py::test_a_member_that_ended_before_a_stop_trains_no_further[synchronous": "on_device",
    "plans/test_evolve.py::test_halving_ends_the_worse_half_again_and_again": "test_population_based_training_goes_on",
    "plans/test_on_device.py::test_members_of_a_population_are_their_lone_runs[dqn-1-1]": "ppo-2-2",
    "learners/test_learners.py::test_target_kl_leaves_out_the_update_that_exceeds_it_and_all_later_ones[8]": "1",
    "algorithms/test_masks.py::test_training_reaches_the_optimum_without_an_illegal_action[dqn-12000]": "ppo",
    "algorithms/test_masks.py::test_no_loss_reads_what_a_network_says_of_illegal_actions[a2c]": "ppo",
    "algorithms/test_masks.py::test_no_loss_reads_what_a_network_says_of_illegal_actions[pg]": "ppo",
    "algorithms/test_masks.py::test_no_loss_reads_what_a_network_says_of_illegal_actions[appo]": "impala",
    "algorithms/test_masks.py::test_no_loss_reads_what_a_network_says_of_illegal_actions[ppo-gru]": "ppo",
    "algorithms/test_masks.py::test_no_loss_reads_what_a_network_says_of_illegal_actions[dqn-single]": "dqn",
    "plans/test_plans.py::test_probes_under_the_other_plans[impala-synchronous]": "a2c-gradients, dqn-asynchronous",
    "learners/test_learners.py::test_one_device_is_as_many[td3-parameter-8]": "td3-8",
    "learners/test_learners.py::test_one_device_is_as_many[dqn-8]": "td3-8",
    "nn/test_optimizers.py::test_every_algorithm_has_the_flags_and_obeys_them[r2d2]": "ppo, dqn",
    "nn/test_optimizers.py::test_every_algorithm_has_the_flags_and_obeys_them[rainbow]": "ppo, dqn",
    "nn/test_optimizers.py::test_every_algorithm_has_the_flags_and_obeys_them[a2c]": "ppo, dqn",
    "nn/test_optimizers.py::test_every_algorithm_has_the_flags_and_obeys_them[pg]": "ppo, dqn",
    "nn/test_optimizers.py::test_every_algorithm_has_the_flags_and_obeys_them[impala]": "ppo, dqn",
    "nn/test_optimizers.py::test_every_algorithm_has_the_flags_and_obeys_them[appo]": "ppo, dqn",
    "nn/test_optimizers.py::test_every_algorithm_has_the_flags_and_obeys_them[pqn]": "ppo, dqn",
    "nn/test_optimizers.py::test_every_algorithm_has_the_flags_and_obeys_them[ddpg]": "ppo, dqn",
    "nn/test_optimizers.py::test_every_algorithm_has_the_flags_and_obeys_them[td3]": "ppo, dqn",
    "nn/test_optimizers.py::test_every_algorithm_has_the_flags_and_obeys_them[sac]": "ppo, dqn",
    "nn/test_optimizers.py::test_every_algorithm_has_the_flags_and_obeys_them[es]": "ppo, dqn",
    "nn/test_optimizers.py::test_every_algorithm_has_the_flags_and_obeys_them[ars]": "ppo, dqn",
    "plans/test_on_device.py::test_environments_may_branch_and_loop_as_they_like[2]": (
        "test_actor_threads_step_them_too"
    ),
    "actors/test_evaluate.py::test_a_resumed_run_evaluates_where_it_would_have[before one that is due]": "with",
    "envs/test_libraries.py::test_a_run_trains_on_a_library_and_its_policy_finds_it_again[asynchronous]": "on_device",
    "memory/test_replay.py::test_weighted_estimates_agree_on_any_number_of_devices[1]": "4",
    "actors/test_actors.py::test_host_acts_as_device[recurrent]": "episodic",
    "test_docs.py::test_the_site_needs_no_network": "`make docs` builds the site",
    "test_notebooks.py::test_it_runs[1-tour]": "test_docs.py::test_the_readme_s_python_runs",
    "training/test_population.py::test_members_end_with_the_return_that_they_are_to_reach": "a run's, asynchronous",
    "test_learning.py::test_bounds_of_actions_do_not_matter[ppo]": "units in nn/test_distributions.py",
    "test_packing.py::test_a_run_in_the_form_for_gpus_is_equal[dqn]": "ppo",
    "play/test_policy.py::test_stepped_by_hand_it_plays_as_the_run_says[recurrent]": "envpool",
    "plans/test_asynchronous.py::test_a_split_host_learns_the_same": "the other ways to learn the same",
    "envs/test_gymnasium.py::test_ppo_learns": "test_learning.py::test_ppo_learns_cartpole_a_little",
    "plans/test_plans.py::test_time_limit_of_envpool_is_no_end": "test_time_limit_is_no_end",
    "run/test_quiet.py::test_a_run_listens_on_no_socket[asynchronous]": "on_device",
    "training/test_structured.py::test_every_plan_takes_parts_and_masks[synchronous]": "components, asynchronous",
    "training/test_structured.py::test_eight_devices_give_what_one_gives[ppo-fields0]": (
        "learners/test_learners.py::test_one_device_is_as_many"
    ),
    "envs/test_agents.py::test_eight_devices_give_what_one_gives": (
        "learners/test_learners.py::test_one_device_is_as_many"
    ),
    "envs/test_agents.py::test_every_plan_takes_several_agents[synchronous-ppo]": (
        "asynchronous-impala, on_device by learning"
    ),
    "envs/test_agents.py::test_rows_are_the_agents_of_each_environment[500]": "13",
    "envs/test_agents.py::test_env_steps_count_environments_and_agent_steps_count_agents[synchronous]": "on_device",
    "envs/test_agents.py::test_env_steps_count_environments_and_agent_steps_count_agents[gradients]": "asynchronous",
    "envs/test_agents.py::test_env_steps_count_environments_and_agent_steps_count_agents[own_pace]": "asynchronous",
    "algorithms/test_sequences.py::test_a_run_on_two_devices[ddpg-Pendulum-v1-fields2]": "sac",
    "algorithms/test_sequences.py::test_a_run_on_two_devices[dqn-CartPole-v1-fields0]": "sac",
    "algorithms/test_sequences.py::test_without_memory_the_losses_are_those_of_transitions[c51]": "dqn",
    "algorithms/test_sequences.py::test_without_memory_the_losses_are_those_of_transitions[sac-discrete]": "sac",
    "algorithms/test_cores.py::test_the_loss_of_a_rollout_is_that_of_its_episodes[gru]": "linear, inputs",
    "algorithms/test_cores.py::test_replayed_sequences_are_worth_what_acting_saw_episode_by_episode[linear]": (
        "attention, inputs"
    ),
    "algorithms/test_cores.py::test_learning_reads_the_inputs_that_acting_read[impala]": "ppo",
    "training/test_compile_cache.py::test_a_second_run_finds_what_the_first_compiled": "the other tests of the cache",
    "plans/test_plans.py::test_probes_under_the_other_plans[a2c-gradients]": "dqn-asynchronous",
    "plans/test_plans.py::test_same_seed_same_numbers[on_device]": "test_every_algorithm_repeats_bit_for_bit[pqn]",
    "plans/test_plans.py::test_no_episode_no_value": "run/test_run_files.py::test_where_no_episode_ended_there_is_null",
    "training/test_structured.py::test_a_resumed_run_is_the_uninterrupted_one[dqn-fields0]": (
        "training/test_resume.py::test_on_device_a_resumed_run_is_the_uninterrupted_one[dqn]"
    ),
    "training/test_structured.py::test_every_plan_takes_parts_and_masks[components]": "replay, asynchronous",
    "training/test_resume.py::test_on_device_a_resumed_run_is_the_uninterrupted_one[es]": "dqn",
    "training/test_population.py::test_a_member_is_its_lone_run": (
        "plans/test_on_device.py::test_members_of_a_population_are_their_lone_runs[ppo-2-2]"
    ),
    "training/test_population.py::test_stopped_and_resumed_is_as_never_stopped": (
        "plans/test_evolve.py::test_population_based_training_goes_on_as_if_never_stopped"
    ),
    "training/test_population.py::test_a_run_ends_with_the_return_that_it_is_to_reach[synchronous]": "asynchronous",
    "test_docs.py::test_the_documented_algorithm_learns_and_loads": (
        "test_the_documented_algorithm_can_be_tried_by_hand"
    ),
    "test_cli.py::test_the_real_command_refuses_fast[sizes]": (
        "test_a_wrong_environment_is_refused_before_training_is_imported"
    ),
    "test_cli.py::test_training_outlives_its_output[full]": "test_a_reader_that_has_enough_is_no_error",
    "algorithms/test_sequences.py::test_a_run_on_two_devices[sac-Pendulum-v1-fields1]": (
        "algorithms/test_r2d2.py::test_one_update_is_the_same_on_any_number_of_devices[8]"
    ),
    "test_gpu_day.py::test_a_task_measures[ppo CartPole]": "the other tests of the file",
    "commands/test_compile_for.py::test_what_a_run_would_allocate_on_this_machine": (
        "test_a_run_is_compiled_and_counted"
    ),
    "memory/test_frames.py::test_dqn_learns_on_atari": "test_replay_gives_the_stacks_back",
    "memory/test_frames.py::test_rollouts_hold_the_stacks_that_envpool_makes[truncations]": "lives",
    "algorithms/test_masks.py::test_no_loss_reads_what_a_network_says_of_illegal_actions[r2d2]": "ppo, dqn",
    "algorithms/test_masks.py::test_no_loss_reads_what_a_network_says_of_illegal_actions[dqn-atoms]": "dqn",
    "algorithms/test_masks.py::test_no_loss_reads_what_a_network_says_of_illegal_actions[pqn]": "dqn",
    "algorithms/test_cores.py::test_the_loss_of_a_rollout_is_that_of_its_episodes[attention]": "linear, inputs",
    "algorithms/test_cores.py::test_a_run_with_a_core_of_ones_own": "nn/test_own_network.py::test_a_run_and_its_policy",
    "actors/test_actors.py::test_host_acts_as_device[perturbed]": "episodic",
    "actors/test_actors.py::test_evaluation_plays_what_it_was_asked_for[recurrent]": "discrete",
    "actors/test_actors.py::test_the_compiled_evaluation_plays_the_episodes_of_the_host[recurrent-None]": "discrete",
    "learners/test_learners.py::test_one_device_is_as_many[ars-8]": "es-8",
    "learners/test_learners.py::test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted[dqn-1]": "ppo-8",
    "algorithms/test_dqn.py::test_a_run_on_two_devices[0.5]": (
        "test_uniform_windows_are_the_same_on_any_number_of_devices"
    ),
    "envs/test_parts.py::test_gymnasium_shows_its_parts_and_its_mask[part-processes]": "threads",
    "play/test_policy.py::test_a_population_has_no_policy_but_its_members[recurrent]": "envpool",
    "test_sweeps.py::test_ppo_es_is_short_and_learns": "the other tests of sweeps",
    "training/test_loops.py::test_the_loops_of_a_run_are_found_and_each_update_sums_once[1]": "8",
    "run/test_quiet.py::test_a_run_listens_on_no_socket[synchronous]": "on_device",
    "envs/test_own.py::test_a_local_function_makes_one_and_is_passed_again": (
        "test_a_module_makes_one_for_the_command_line"
    ),
    "envs/test_finite.py::test_in_a_compiled_program[1-reward-inf-a reward]": "8",
    "nn/test_networks.py::test_gradients_are_equal_on_one_and_eight_devices[gru]": "attention, linear, cnn",
    "nn/test_networks.py::test_gradients_are_equal_on_one_and_eight_devices[lstm]": "attention, linear, cnn",
    "nn/test_own_network.py::test_every_algorithm_learns_by_it[sac]": "ppo",
    "algorithms/test_exploration.py::test_the_size_of_the_noise_adapts[td3-": "dqn-0.05",
    "plans/test_on_device.py::test_a_replay_memory_is_not_copied[1-": "2",
    "algorithms/test_own_algorithm.py::test_its_runs_are_resumed_by_naming_it": (
        "test_its_runs_are_evaluated_and_repeated_by_naming_it"
    ),
    "plans/test_asynchronous.py::test_older_experience_than_allowed_is_dropped[gradients]": "asynchronous",
    "envs/test_envs.py::test_gymnax_against_its_own_step[Catch-bsuite": "CartPole, FrozenLake, Breakout",
    "envs/test_envs.py::test_atari_returns_are_of_whole_games[Asterix-v5-False]": "Asterix-v5-True",
    "memory/test_replay.py::test_windows_are_whole_and_every_one_is_drawn[True-40-64-8-3-1]": "48-50-8-3-4",
    "memory/test_replay.py::test_windows_are_whole_and_every_one_is_drawn[False-120-37-4-5-2]": "True-120-37-4-5-2",
    "algorithms/test_es.py::test_it_finds_the_optimum[ars]": "es",
    "algorithms/test_es.py::test_on_the_host[envpool:CartPole-v1]": "gymnasium:Pendulum-v1",
    "actors/test_evaluate.py::test_a_resumed_run_evaluates_where_it_would_have[with one that is due]": (
        "test_evaluations_change_nothing"
    ),
    "algorithms/test_masks.py::test_no_loss_reads_what_a_network_says_of_illegal_actions[sac]": "ppo, dqn, impala",
    "learners/test_learners.py::test_one_device_is_as_many[es-8]": "td3-8, ppo-gru-8",
    "run/test_saving.py::test_a_run_that_its_environment_ends_can_go_on[synchronous": "on_device, asynchronous",
    "algorithms/test_cores.py::test_replayed_sequences_are_worth_what_acting_saw_episode_by_episode[lstm]": (
        "attention, inputs"
    ),
    "plans/test_plans.py::test_time_limit_is_no_end_in_replayed_windows": "test_time_limit_is_no_end",
    "actors/test_actors.py::test_devices_do_not_matter[perturbed-8]": "recurrent-8",
    "envs/test_envs.py::test_every_other_gymnax_environment_steps[Freeway-MinAtar": "the others",
    "algorithms/test_impala.py::test_impala_loss[plain]": "gru",
    "nn/test_observations.py::test_the_policy_does_not_see_what_only_the_critic_sees[gru]": "plain",
    "test_docs.py::test_the_documented_bonus_falls_where_the_policy_has_been": (
        "test_the_documented_change_of_ppo_adds_its_penalty"
    ),
    "algorithms/test_exploration.py::test_the_size_of_the_noise_adapts[dqn-2.0]": "dqn-0.05",
    "actors/test_actors.py::test_host_acts_as_device[continuous]": "episodic",
    "memory/test_replay.py::test_windows_are_whole_and_every_one_is_drawn[True-120-37-4-5-1]": "True-120-37-4-5-2",
    "plans/test_asynchronous.py::test_lockstep_keeps_the_lag_exactly[dqn-1]": "impala",
    "plans/test_plans.py::test_env_steps_are_valid_transitions[synchronous]": "on_device",
    "training/test_population.py::test_under_other_plans_members_train_one_after_the_other": (
        "test_a_run_ends_with_the_return_that_it_is_to_reach[asynchronous]"
    ),
    "training/test_population.py::test_members_on_the_host_are_their_lone_runs[gym": "envpool",
    "envs/test_wrappers.py::test_on_atari": (
        "memory/test_frames.py::test_rollouts_hold_the_stacks_that_envpool_makes[lives]"
    ),
    "training/test_policies.py::test_one_policy_by_name_is_the_shared_one_bit_for_bit": "alone[a]",
    "training/test_policies.py::test_each_policy_learns_what_it_learns_alone[b]": "a",
    "training/test_policies.py::test_a_fixed_policy_is_that_of_its_run": "random",
    "training/test_policies.py::test_eight_devices_give_what_one_gives": (
        "learners/test_learners.py::test_one_device_is_as_many"
    ),
    "training/test_policies.py::test_members_of_a_population_are_their_lone_runs": "training/test_population.py",
    "training/test_profiling.py::test_a_stage_that_sleeps_is_the_one_that_takes_longer[dqn": "ppo",
    "training/test_profiling.py::test_a_run_is_profiled[replay]": "synchronous",
    "training/test_profiling.py::test_a_run_is_profiled[asynchronous]": "synchronous",
    "training/test_profiling.py::test_a_run_is_profiled[gradients]": "synchronous",
    "training/test_profiling.py::test_the_config_of_a_run_is_profiled": "test_a_run_is_profiled[synchronous]",
    "training/test_profiling.py::test_stages_of_several_policies_belong_to_one_each[on_device]": "random",
    "training/test_profiling.py::test_stages_of_several_policies_belong_to_one_each[synchronous]": "random",
    "algorithms/test_exploration.py::test_losses_do_not_see_the_noise_that_a_policy_keeps[ppo with a core]": "ppo",
    "algorithms/test_qmix.py::test_a_team_beside_another_policy": "test_a_team_is_a_row_that_is_paid_the_mean",
    "nn/test_optimizers.py::test_every_algorithm_has_the_flags_and_obeys_them[qmix]": "ppo, dqn",
    "training/test_policies.py::test_a_copy_is_renewed_after_so_many_updates[1]": "3",
    "training/test_policies.py::test_a_copy_is_renewed_after_so_many_updates[1000000]": "3",
    "training/test_policies.py::test_ppo_and_dqn_learn_side_by_side": (
        "test_the_command_line_trains_resumes_and_evaluates"
    ),
    "commands/test_placements.py::test_a_placed_run_keeps_flags_and_no_word[ppo": "sebulba",
    "commands/test_placements.py::test_a_placed_run_keeps_flags_and_no_word[a": "sebulba",
    "commands/test_placements.py::test_a_placed_run_keeps_flags_and_no_word[command5": "sebulba",
    "training/test_profiling.py::test_a_run_is_profiled[on_device]": "synchronous, and a stage that sleeps",
    "plans/test_on_device.py::test_members_that_learn_in_groups_are_their_lone_runs": (
        "test_rng_mesh.py::test_members_may_be_computed_in_groups"
    ),
    "training/test_resume.py::test_a_curriculum_changes_the_options_of_the_environment": "test_what_may_change",
    "training/test_policies.py::test_a_resumed_run_is_the_uninterrupted_one": (
        "test_the_command_line_trains_resumes_and_evaluates"
    ),
    "training/test_resume.py::test_on_device_a_resumed_run_is_the_uninterrupted_one[pg]": "dqn",
    "training/test_population.py::test_a_member_that_diverges_ends_alone": (
        "test_the_caller_may_leave_and_an_error_ends_all"
    ),
    "envs/test_own.py::test_training_from_python_is_that_of_the_id": "test_a_module_makes_one_for_the_command_line",
    "play/test_policy.py::test_greedy_without_a_key_and_sampled_with_one[recurrent]": "envpool",
    "test_docs.py::test_the_reference_has_every_field_of_every_record": ("`make docs` builds the site"),
    "test_docs.py::test_the_tutorial_runs": "test_the_readme_s_python_runs",
    "algorithms/test_masks.py::test_training_reaches_the_optimum_without_an_illegal_action[ppo-12000]": (
        "test_no_loss_reads_what_a_network_says_of_illegal_actions"
    ),
    "algorithms/test_masks.py::test_no_loss_reads_what_a_network_says_of_illegal_actions[ppo]": "impala, dqn",
    "play/test_policy.py::test_actions_lie_in_the_environments_bounds[recurrent]": "discrete, envpool",
    "algorithms/test_cores.py::test_replayed_sequences_are_worth_what_acting_saw_episode_by_episode[attention]": (
        "inputs"
    ),
    "algorithms/test_cores.py::test_the_loss_of_a_rollout_is_that_of_its_episodes[linear]": "inputs",
    "algorithms/test_dqn.py::test_a_run_counts_its_updates_and_repeats_bit_for_bit": "test_resume.py does, too",
    "algorithms/test_dqn.py::test_uniform_windows_are_the_same_on_any_number_of_devices": (
        "importance weights and one update are"
    ),
    "algorithms/test_r2d2.py::test_one_update_is_the_same_on_any_number_of_devices": "td3's is, in test_learners.py",
    "algorithms/test_r2d2.py::test_windows_are_what_acting_did_and_so_are_their_cores[False]": "True",
    "algorithms/test_sequences.py::test_without_memory_the_losses_are_those_of_transitions[sac]": "dqn",
    "algorithms/test_sequences.py::test_without_memory_the_losses_are_those_of_transitions[td3]": "dqn",
    "algorithms/test_es.py::test_es_is_equation_1[1]": "8",
    "algorithms/test_exploration.py::test_the_size_of_the_noise_adapts[dqn-0.05]": "dqn-0.2, dqn-0.5",
    "envs/test_agents.py::test_training_one_agent_is_training_the_environment_itself": (
        "test_one_agent_is_the_environment_itself_bit_for_bit"
    ),
    "envs/test_agents.py::test_every_plan_takes_several_agents[asynchronous-impala]": (
        "test_rows_are_the_agents_of_each_environment"
    ),
    "envs/test_env_seeds.py::test_neither_plan_nor_actors_change_which_episodes_come_first[envpool:CartPole-v1-2]": (
        "gymnasium"
    ),
    "envs/test_finite.py::test_in_a_compiled_program[8-observation-nan-": (
        "test_a_resumed_run_meets_it_as_the_uninterrupted_one"
    ),
    "training/test_profiling.py::test_the_parts_of_a_team_have_a_row_for_each_agent": "test_a_run_is_profiled",
    "plans/test_on_device.py::test_a_replay_memory_is_not_copied[2-None]": "2-0.6",
    "plans/test_plans.py::test_a_run_from_outside[on_device-on_device]": "synchronous-synchronous",
    "plans/test_asynchronous.py::test_lockstep_repeats_bit_for_bit[dqn-envpool": "impala",
    "test_docs.py::test_each_notebook_is_a_page_with_its_pictures": "`make docs` builds the site",
    "test_docs.py::test_each_algorithm_has_a_page": "`make docs` builds the site",
    "test_docs.py::test_presets_are_shown_by_an_environment_of_each_kind": "`make docs` builds the site",
    "test_docs.py::test_the_table_of_what_is_tested_is_that_of_the_tests": "`make docs` builds the site",
    "test_docs.py::test_each_command_has_its_place": "`make docs` builds the site",
    "training/test_policies.py::test_each_policy_learns_what_it_learns_alone[a]": (
        "test_one_policy_by_name_is_the_shared_one_bit_for_bit"
    ),
    "training/test_policies.py::test_self_play_is_resumed_and_loaded": "test_the_command_line_trains_resumes",
    "hosts/test_several_processes.py::test_several_processes_are_as_one[dqn-2]": (
        "hosts/test_launch.py, without processes"
    ),
    "test_cli.py::test_ctrl_c_ends_a_run_whose_environments_hang": (
        "test_ctrl_c_ends_a_run_cleanly; what hangs is in envs/test_gymnasium.py"
    ),
    "memory/test_frames.py::test_rollouts_hold_the_stacks_that_envpool_makes[lives]": (
        "test_evaluation_sees_the_stacks_that_envpool_makes, test_replay_gives_the_stacks_back"
    ),
    "training/test_resume.py::test_on_a_full_disk_training_goes_on": (
        "run/test_run_files.py::test_a_disk_that_fills_up_while_orbax_writes_raises_and_prints_nothing"
    ),
    "training/test_profiling.py::test_a_run_is_profiled[synchronous]": (
        "test_a_stage_that_sleeps_is_the_one_that_takes_longer[ppo"
    ),
    "training/test_policies.py::test_counts_and_returns_are_of_all_policies": (
        "test_the_command_line_trains_resumes_and_evaluates"
    ),
    "learners/test_learners.py::test_target_kl_leaves_out_the_update_that_exceeds_it_and_all_later_ones[1]": (
        "test_ppo_against_a_naive_one"
    ),
    "plans/test_asynchronous.py::test_gather_does_not_wait_for_a_slow_actor": (
        "test_leaving_the_loop_leaves_nothing, and the tests of flow.py"
    ),
    "envs/test_own.py::test_no_command_takes_the_name_of_an_object": "test_a_module_makes_one_for_the_command_line",
    "training/test_structured.py::test_every_plan_takes_parts_and_masks[replay]": "asynchronous",
    "training/test_compile_cache.py::test_a_second_run_of_a_process_compiles_nothing[on_device]": "synchronous",
    "actors/test_evaluate.py::test_a_run_and_the_command_evaluate_as_they_are_told": (
        "test_evaluations_change_nothing[on_device]"
    ),
    "test_packing.py::test_a_run_in_the_form_for_gpus_is_equal[ppo]": "test_what_a_gpu_computes_together_is_equal",
    "plans/test_plans.py::test_env_steps_are_valid_transitions[on_device]": (
        "actors/test_actors.py::test_evaluation_plays_what_it_was_asked_for"
    ),
    "learners/test_learners.py::test_one_device_is_as_many[td3-8]": "ppo-gru-8",
    "run/test_saving.py::test_a_closed_terminal_ends_a_run_in_order": (
        "test_resume.py::test_a_signal_saves_and_ends_the_run[0]"
    ),
    "run/test_saving.py::test_reports_that_are_held_when_python_ends_are_closed": (
        "test_a_run_that_its_environment_ends_can_go_on[on_device"
    ),
    "training/test_structured.py::test_a_policy_is_loaded_and_exported_with_its_parts": (
        "play/test_export.py::test_an_exported_policy_acts_the_same_without_this_package"
    ),
    "envs/test_info.py::test_a_run_reports_them_and_a_resumed_one_alike": "test_other_plans_report_them",
    "envs/test_env_faults.py::test_a_signal_to_the_whole_process_group_saves": (
        "training/test_resume.py::test_a_signal_saves_and_ends_the_run[0]"
    ),
    "plans/test_plans.py::test_probes_under_the_other_plans[dqn-asynchronous]": (
        "test_probe[ppo, and lockstep in test_asynchronous.py"
    ),
    "envs/test_hidden.py::test_a_run_keeps_what_it_hides": "test_policies_see_the_other_numbers_of_the_same_episodes",
    "play/test_policy.py::test_no_core_is_the_core_where_an_episode_begins[recurrent]": "envpool",
    "plans/test_on_device.py::test_minibatches_in_parts_on_several_devices": (
        "test_local_sgd_is_the_mean_of_members_that_learn_alone"
    ),
    "training/test_population.py::test_a_run_ends_with_the_return_that_it_is_to_reach[asynchronous]": (
        "plans/test_evolve.py::test_population_based_training_goes_on_as_if_never_stopped"
    ),
    "learners/test_league.py::test_ratings_are_those_of_a_loop_over_games[agents0]": "agents1",
    "algorithms/test_cores.py::test_a_policy_is_told_its_reward": (
        "test_the_loss_of_a_rollout_is_that_of_its_episodes[inputs]"
    ),
    "envs/test_libraries.py::test_a_run_trains_on_a_library_and_its_policy_finds_it_again[on_device]": (
        "test_check_env_plays_a_library"
    ),
    "training/test_policies.py::test_rows_of_a_policy_are_its_agents": (
        "test_the_command_line_trains_resumes_and_evaluates"
    ),
    "test_docs.py::test_the_documented_change_of_ppo_adds_its_penalty": "test_the_readme_s_python_runs",
    "envs/test_gymnasium.py::test_ctrl_c_ends_a_process_whose_environment_hangs[killed]": "threads",
    "algorithms/test_masks.py::test_random_actions_of_the_warm_up_are_legal_too": (
        "test_no_loss_reads_what_a_network_says_of_illegal_actions[dqn]"
    ),
    "test_docs.py::test_the_documented_algorithm_can_be_tried_by_hand": "algorithms/test_own_algorithm.py",
    "commands/test_doctor.py::test_this_machine_can_train": "the other tests of the file",
    "training/test_compile_cache.py::test_what_the_user_s_code_decides_is_compiled_each_time": (
        "test_a_second_run_of_a_process_compiles_nothing[synchronous]"
    ),
    "plans/test_asynchronous.py::test_a_learner_that_runs_freely_does_not_wait_for_slow_actors": (
        "test_lockstep_repeats_bit_for_bit[impala"
    ),
    "algorithms/test_masks.py::test_no_loss_reads_what_a_network_says_of_illegal_actions[impala]": "dqn",
    "envs/test_agents.py::test_a_team_learns_to_meet": "test_rows_are_the_agents_of_each_environment[13]",
    "envs/test_wrappers.py::test_learning_sees_clipped_rewards[0.5--0.5-0.5]": (
        "test_wrappers.py: the rewards of each wrapper"
    ),
    "envs/test_agents.py::test_only_a_critic_that_sees_the_state_solves_what_no_agent_sees[state-0]": (
        "nn/test_observations.py::test_the_policy_does_not_see_what_only_the_critic_sees"
    ),
    "actors/test_evaluate.py::test_the_time_of_evaluations_does_not_count": (
        "test_evaluations_change_nothing[on_device]"
    ),
    "envs/test_env_seeds.py::test_evaluation_makes_no_more_environments_than_training": (
        "test_a_share_is_a_part_of_the_whole"
    ),
    "training/test_structured.py::test_an_exported_policy_takes_the_mask_that_gymnasium_gives": (
        "play/test_export.py::test_an_exported_policy_acts_the_same_without_this_package"
    ),
    "run/test_run_files.py::test_an_evaluation_that_fails_costs_the_evaluation_alone": (
        "test_an_evaluation_looks_too, in envs/test_finite.py"
    ),
    "envs/test_parts.py::test_frames_of_parts_are_stacked_each": "test_gymnax_shows_its_parts_and_its_mask",
    "algorithms/test_es.py::test_on_the_host[gymnasium:Pendulum-v1]": "test_it_finds_the_optimum[es]",
    "training/test_population.py::test_the_caller_may_leave_and_an_error_ends_all": (
        "test_population_based_training_goes_on_as_if_never_stopped"
    ),
    "algorithms/test_es.py::test_the_noise_of_all_is_never_in_memory": "test_es_is_equation_1[8]",
    "algorithms/test_own_algorithm.py::test_its_runs_name_no_code": (
        "test_its_runs_are_evaluated_and_repeated_by_naming_it"
    ),
    "training/test_resume.py::test_a_run_of_natural_values_is_resumed_and_loaded": "test_what_may_change",
    "training/test_policies.py::test_a_copy_is_renewed_after_so_many_updates[3]": (
        "test_the_command_line_trains_resumes_and_evaluates"
    ),
    "envs/test_own.py::test_an_object_is_stepped_as_its_id_is": "test_a_module_makes_one_for_the_command_line",
    "commands/test_check.py::test_action_masks_are_noted": "test_environments_of_several_agents_are_played_too",
    "envs/test_wrappers.py::test_a_run_its_evaluation_and_its_policy_have_them[ppo --env gymnasium": (
        "the cases of one wrapper"
    ),
    "actors/test_evaluate.py::test_sampled_actions_are_those_of_the_policys_keys_in_one_program_and_one_by_one": (
        "actors/test_actors.py::test_the_compiled_evaluation_plays_the_episodes_of_the_host[discrete"
    ),
    "actors/test_actors.py::test_noise_on_parameters_lasts_until_the_episode_ends": (
        "test_host_acts_as_device[episodic]"
    ),
    "plans/test_plans.py::test_every_algorithm_repeats_bit_for_bit[pqn]": (
        "training/test_resume.py::test_on_device_a_resumed_run_is_the_uninterrupted_one[dqn]"
    ),
    "envs/test_env_faults.py::test_a_mask_of_the_wrong_length_is_left_out_with_a_warning[team:ShortMask]": (
        "parts:ShortInfo"
    ),
    "envs/test_gymnasium.py::test_what_hangs_is_named_in_time[hang-processes]": "hang-threads",
    "algorithms/test_exploration.py::test_the_size_of_the_noise_adapts[dqn-0.2]": "dqn-0.5",
    "learners/test_learners.py::test_shuffling_changes_the_result": "test_each_epoch_sees_every_example_once",
    "test_imports.py::test_an_environment_of_gymnax_is_made_without_its_plotting_libraries_which_work_when_used": (
        "test_imports.py: what each module may import"
    ),
    "run/test_quiet.py::test_a_run_writes_down_no_secret[asynchronous]": "synchronous",
    "envs/test_envs.py::test_atari_returns_are_of_whole_games[Asterix-v5-True]": "Breakout-v5-True",
    "run/test_saving.py::test_a_run_that_its_environment_ends_can_go_on[asynchronous-options2]": "on_device",
    "nn/test_networks.py::test_gradients_are_equal_on_one_and_eight_devices[linear]": "attention, cnn",
    "memory/test_frames.py::test_replay_gives_the_stacks_back[2-False]": "2-True",
    "envs/test_agents.py::test_agents_that_share_a_policy_train_it_as_so_many_environments_do": (
        "test_one_agent_is_the_environment_itself_bit_for_bit, test_rows_are_the_agents_of_each_environment[13]"
    ),
    "training/test_policies.py::test_on_the_host_they_learn_what_they_learn_in_one_program": (
        "envs/test_parallel.py::test_several_policies_train_are_evaluated_and_resumed"
    ),
    "training/test_policies.py::test_a_run_on_the_host_is_resumed": (
        "envs/test_parallel.py::test_several_policies_train_are_evaluated_and_resumed"
    ),
    "plans/test_own_pace.py::test_a_run_trains_and_is_resumed": "test_no_policy_waits_for_another",
    "training/test_policies.py::test_hyperparameters_of_policies_vary_in_one_program": (
        "training/test_population.py, and what is refused in test_what_is_wrong_exits_2_in_one_line"
    ),
}
