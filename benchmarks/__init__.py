"""Benchmarks: each runs us and a named peer in one process, in turn, and prints medians and ratios.

Nothing here passes or fails.
"""
