"""Trains an algorithm: ``python scripts/train.py ppo --env CartPole-v1``, the same as
``jaxrl-dist train ppo ...``.
"""

import sys

from jaxrl_dist.cli import main

sys.exit(main(["train", *sys.argv[1:]]))
