"""Plays greedy episodes: ``python scripts/evaluate.py RUN_DIR``, the same as
``jaxrl-dist evaluate RUN_DIR``.
"""

import sys

from jaxrl_dist.cli import main

sys.exit(main(["evaluate", *sys.argv[1:]]))
