"""Own all contact with MLX arrays and mlx-lm's cache classes.

`kinds` says which cache classes can be stored and how, `capture` reads rows out of live caches, `assemble` builds
caches around rows read from disk, `probe` finds a model's layout, `loading` gets models.
"""

from prefixbank.blas import load_blas

load_blas()  # before the first import of mlx
