"""Names that other libraries give to our settings, for messages about unknown ones.

The names are from Stable-Baselines3, its zoo, CleanRL, RLlib, Sample Factory, Tianshou,
PureJaxRL, Spinning Up and Dopamine. They are not accepted: two spellings of one setting would be
twice as much to read, store and explain.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from jaxrl_dist.checks import flag, nearest

OF_RUN: dict[str, str] = {
    # fields of Train, and their names elsewhere; of several fields,
    # the first that the command or algorithm has counts
    "env": "env_id env_name environment gym_id task game",
    "env_options": "env_kwargs env_config env_args",
    "frame_stack": "n_stack num_stack framestack env_framestack",
    "action_repeat": "frame_skip frameskip env_frameskip",
    "time_limit": "max_episode_steps max_episode_length episode_length max_ep_len",
    "clip_rewards": "clip_reward reward_clip",
    "num_envs": "n_envs num_environments parallel_envs num_envs_per_worker training_num num_processes envs",
    "num_actors": "num_workers n_workers num_env_runners num_rollout_workers",
    "num_devices": "num_gpus gpus n_gpus devices num_learners",
    "rollout_length": "n_steps num_steps nsteps rollout rollout_len unroll_length rollout_fragment_length horizon "
    "num_steps_per_env steps_per_env",
    "total_env_steps": "total_timesteps n_timesteps num_timesteps timesteps total_steps steps max_steps frames "
    "num_frames total_frames num_env_steps train_for_env_steps stop_timesteps",
    "stop_at_return": "stop_reward stop_return reward_threshold target_return target_reward",
    "episodes evaluation_episodes": "n_eval_episodes eval_episodes num_eval_episodes n_episodes num_episodes test_num",
    "evaluation_policy": "stochastic deterministic explore eval_stochastic eval_deterministic",
    "evaluation_interval": "eval_freq eval_interval eval_every evaluation_freq",
    "report_interval": "log_interval log_freq log_every print_freq",
    "checkpoint_interval": "save_freq save_interval save_every checkpoint_freq checkpoint_frequency",
    "init_from": "pretrained load load_from load_path restore trained_agent model_path",
    "run_dir": "log_dir logdir log_folder save_dir output_dir out_dir train_dir storage_path experiment exp_name",
    "wandb": "track use_wandb with_wandb",
    "tensorboard": "tensorboard_log tb use_tensorboard",
    "seeds": "num_seeds n_seeds",
    "seed": "random_seed",
    "normalize_observations": "norm_obs obs_norm normalize_obs normalize_observation normalize normalize_input "
    "observation_filter",
    "scale_rewards": "norm_reward norm_rew normalize_reward normalize_rewards normalize_returns reward_scale "
    "reward_scaling",
    "ema_steps": "ema ema_decay polyak_average parameter_averaging weight_averaging swa average_parameters",
}
SYNONYMS: dict[str, str] = {
    **OF_RUN,
    # learning
    "learning_rate": "lr step_size learning_rates lrate q_lr critic_lr vf_lr v_lr",
    "actor_learning_rate learning_rate": "policy_lr actor_lr pi_lr",
    "learning_rate_schedule": "anneal_lr lr_schedule linear_lr_schedule use_lr_decay lr_decay",
    "learning_rate_steps": "anneal_steps lr_decay_steps decay_steps",
    "optimizer": "optim optimizer_class optimizer_type optimiser",
    "weight_decay": "l2 l2_reg l2_coef",
    "discount": "gamma discount_factor",
    "gae_lambda trace_lambda q_lambda": "lam lambda lambda_ gae gae_lam",
    "target_rate gae_lambda": "tau polyak soft_update_tau",
    "entropy_coefficient temperature": "ent_coef ent_coeff entropy_coef entropy_coeff entropy_cost entropy_beta",
    "temperature priority_exponent": "alpha init_alpha init_temperature initial_alpha",
    "value_coefficient": "vf_coef vf_coeff vf_loss_coeff value_coef value_loss_coef value_loss_coeff baseline_cost",
    "clip_epsilon": "clip_range clip_coef clip_param clip_eps eps_clip clip_ratio ppo_clip ppo_clip_ratio cliprange",
    "target_kl": "kl_target desired_kl target_kl_div max_kl",
    "value_clip_epsilon": "clip_vloss clip_range_vf vf_clip_param value_clip ppo_clip_value",
    "normalize_advantages": "norm_adv adv_norm normalize_advantage advantage_normalization",
    "max_gradient_norm": "max_grad_norm grad_clip clip_grad_norm gradient_clip grad_clip_norm max_norm",
    "num_epochs": "n_epochs update_epochs ppo_epoch ppo_epochs num_sgd_iter noptepochs epochs repeat_per_collect",
    "num_minibatches": "n_minibatches nminibatches minibatches num_mini_batch num_batches_per_epoch minibatch_size "
    "sgd_minibatch_size batch_size",
    "batch_size num_minibatches": "train_batch_size",
    # replay
    "replay_capacity": "buffer_size buffer_capacity replay_size replay_buffer_size memory_size "
    "memory_capacity capacity",
    "replay_ratio": "train_freq train_frequency gradient_steps update_every updates_per_step utd utd_ratio "
    "update_to_data_ratio training_intensity",
    "learning_starts": "learn_start start_steps start_timesteps starting_timesteps warmup_steps update_after "
    "min_replay_size random_steps",
    "target_period target_rate": "target_update_interval target_network_frequency target_update_freq target_update "
    "target_update_period target_network_update_freq target_freq",
    "n_step rollout_length": "nstep num_step_return estimation_step multi_step update_horizon",
    "priority_exponent": "prioritized_replay prioritized per per_alpha prioritized_replay_alpha",
    "importance_exponent": "per_beta prioritized_replay_beta beta",
    "double": "double_q double_dqn use_double",
    "num_atoms": "n_atoms atoms n_quantiles num_quantiles num_tau_samples",
    "munchausen": "m_dqn munchausen_alpha",
    "soft_temperature": "munchausen_tau entropy_tau",
    "quantile_huber": "kappa huber_param",
    "value_min": "v_min vmin",
    "value_max": "v_max vmax",
    "sequence_length": "seq_len trace_length max_seq_len",
    "her": "use_her hindsight her_replay_buffer n_sampled_goal her_ratio",
    # exploration
    "epsilon_start": "start_e eps_start initial_epsilon epsilon_initial exploration_initial_eps epsilon",
    "epsilon_end": "end_e eps_end final_epsilon min_epsilon epsilon_min epsilon_final exploration_final_eps eps_train",
    "epsilon_steps": "exploration_fraction eps_decay epsilon_decay epsilon_timesteps epsilon_decay_steps",
    "noise_std": "exploration_noise act_noise action_noise sigma",
    "target_noise": "policy_noise target_policy_noise",
    "target_noise_clip": "noise_clip",
    "actor_period": "policy_delay policy_frequency policy_freq actor_delay",
    "noise_correlation": "noise_color noise_colour colored_noise noise_beta",
    "initial_std": "log_std_init init_std initial_log_std action_std_init",
    # networks
    "hidden_sizes": "net_arch hidden_size hidden_dim hidden_dims hidden_units hidden_layers hiddens fcnet_hiddens "
    "layers encoder_mlp_layers",
    "activation": "activation_fn fcnet_activation nonlinearity",
    "torso": "network policy_network encoder",
    "core core_size": "lstm use_lstm gru use_rnn rnn recurrent recurrence rnn_type",
    "core_size": "rnn_size rnn_hidden_size lstm_cell_size lstm_hidden_size",
}

VALUES = {
    "evaluation_policy": ", greedy (deterministic) or sampled (stochastic)",
    "her": ", a share of the replayed steps: 4 sampled goals for each real one are 0.8",
    "num_minibatches": ", the number of minibatches in a rollout, not their size",
}
"""What else to say of a field with other values than it has elsewhere."""


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    """Returns a table of sentences by several names as one by single names."""
    return {name: sentence for names, sentence in table.items() for name in names.split()}


INSTEAD = _by_name({
    "gpu cuda device use_cuda gpu_id accelerator platform":
        "training uses every accelerator that JAX finds; --num-devices N uses fewer, and JAX_PLATFORMS=cpu none",
    "adam_eps adam_epsilon optimizer_kwargs momentum beta1 beta2":
        "--optimizer takes optax's defaults; an algorithm file of yours can name others, and dqn has --adam-epsilon",
    "render render_mode capture_video record_video save_video gif":
        "`jaxrl-dist video RUN_DIR FILE.gif` films a trained policy, and --video-interval during training",
    "sde use_sde sde_sample_freq gsde":
        "--noise-correlation 0.6 makes noise last over steps, as state-dependent exploration does",
    "algo algorithm agent alg model":
        "the algorithm comes first: `jaxrl-dist train ppo --env CartPole-v1`",
    "resume resume_from continue": "`jaxrl-dist resume RUN_DIR` continues a run",
    "progress_bar progress show_progress tqdm":
        "commands show progress unless --quiet hides it; in Python use jaxrl_dist.display(reports, "
        "total)",
    "save_model": "a run saves its policy in its --run-dir",
    "policy":
        "--torso chooses a network; several policies are --policy NAME=ALGO:AGENTS, in the algorithm's place",
    "torch_deterministic": "results are reproducible without it",
})  # fmt: skip
"""Hints for names without a field of ours."""

_LOOP = "a callback is the body of `for report in jaxrl_dist.train(config)`"
_ENVS = (
    "training makes its environments itself: jaxrl_dist.Train(..., env='CartPole-v1', num_envs=8)"
)
_TRAINED_ON = {
    **dict.fromkeys(("A2C", "DQN", "PPO"), "CartPole-v1"),
    **dict.fromkeys(("DDPG", "SAC", "TD3"), "Pendulum-v1"),
}
"""Algorithms of Stable-Baselines3, with an environment as an example."""


def training(name: str) -> str:
    """Returns how to train an algorithm of Stable-Baselines3 here; PPO if it has no such name."""
    if name not in _TRAINED_ON:
        name = "PPO"
    return (
        "training is `for report in jaxrl_dist.train(jaxrl_dist.Train("
        f"'{name.lower()}', env='{_TRAINED_ON[name]}', run_dir='runs/mine')): ...`"
    )


METHODS = _by_name({
    **{name: training(name) for name in ("learn", *_TRAINED_ON)},
    "predict":
        "policy(obs)[0] of policy = jaxrl_dist.load_policy(run_dir) has the actions for a batch obs [B, ...], "
        "so obs[None] for one observation; policy(obs, core, key) samples",
    "evaluate evaluate_policy":
        "policy.evaluate(episodes=100) of policy = jaxrl_dist.load_policy(run_dir) plays episodes",
    "plot": "it is plot(['runs/mine'], 'curves.png') of jaxrl_dist.commands.plot",
    "save": "a run saves its policy in the run_dir of its jaxrl_dist.Train",
    "load": "jaxrl_dist.load_policy(run_dir) loads a trained policy, and jaxrl_dist.resume(run_dir) trains it further",
    "distribution get_distribution":
        "policy.log_prob(obs, action) is the log-probability of sampling actions [B, ...]",
    "get_env": "policy.source.spec describes the environment",
    "deterministic": "policy(obs) takes the best actions, and policy(obs, core, key) samples",
    "EvalCallback": f"{_LOOP}; evaluation_interval=10_000 evaluates, and keep_best='evaluation' keeps the best; "
        "load_policy(report, env_options=...).evaluate() uses other options",
    "make make_vec_env DummyVecEnv VecMonitor Monitor": _ENVS,
    "SubprocVecEnv": f"{_ENVS}; env_workers='processes' steps them in processes",
    "VecNormalize": "it is normalize_observations=True and scale_rewards=True of jaxrl_dist.Train",
    "CheckpointCallback": f"{_LOOP}; checkpoint_interval=10_000 saves on the way",
    "callbacks BaseCallback CallbackList": _LOOP,
    "HerReplayBuffer": "Train(\"sac\", ..., her=0.8) replaces goals in hindsight",
    "MlpPolicy CnnPolicy MultiInputPolicy":
        "fields of the algorithm choose its network: jaxrl_dist.preset('ppo', 'CartPole-v1', hidden_sizes=(64, 64))",
})  # fmt: skip
"""What replaces functions, methods, classes and arguments of Stable-Baselines3."""


def missing(owner: str, name: str, kind: str = "attribute") -> str:
    """Returns the message that something has no attribute of this name, and what replaces it."""
    text = f"{owner} has no {kind} {name!r}"
    if name in METHODS:
        return f"{text}; {METHODS[name]}"
    return text


OF_AGENTS = {
    "ippo": "in an environment of several agents it is ppo",
    "mappo": "it is ppo with --env-options state=true --critic-sees state",
}
"""Algorithms of JaxMARL that are one of ours with flags, and how they are written here."""

MEANT: dict[str, tuple[str, ...]] = {
    name: tuple(fields.split()) for fields, names in SYNONYMS.items() for name in names.split()
}
"""Fields that another library's name may mean, in order of preference."""


def hint(name: str, known: Collection[str], others: Callable[[str], str] = lambda field: "") -> str:
    """Returns what to use instead of an unknown setting, to be appended to a message;
    empty if nothing is near.

    Args:
      name: as given, without dashes in front.
      known: fields of the command or the algorithm, and ``no_`` forms of switches.
      others: returns which algorithms have a field, such as ``ddpg and td3 have``; empty: none.
    """
    name = name.lower().replace("-", "_").replace(".", "_")
    positive = name.removeprefix("no_")
    meant = MEANT.get(positive, ())
    for field in meant:
        if field in known:
            if field == "num_minibatches" and not positive.endswith("_size"):
                return f"; it is {flag(field)} here"
            return f"; it is {flag(field)} here{VALUES.get(field, '')}"
    if positive in INSTEAD:
        return f"; {INSTEAD[positive]}"
    for field in (positive, *meant):
        having = others(field)
        if having and field == positive:
            return f"; {having} it"
        if having:
            return f"; it is {flag(field)} here, and only {having} it"
    near = nearest(name, known)
    if near:
        return f" (did you mean {flag(near)!r}?)"
    return ""
