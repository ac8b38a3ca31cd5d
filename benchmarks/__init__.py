"""Benchmarks: each runs us and a named peer in one process, in turn, and prints medians and ratios.

Nothing here passes or fails. `python -m benchmarks --help` says what there is to run.
"""

from prefixbank.blas import load_blas

load_blas()  # before the first import of mlx
