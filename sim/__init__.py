"""Worlds whose truth is known, and the studies run in them: `python -m sim <study>`.

`tree` and `mdp` are exact, `bandit` carries the paper's size, `drift` and `replay` are what a
tracker has to follow. `studies` measures the method in them and says which claims hold.
"""
