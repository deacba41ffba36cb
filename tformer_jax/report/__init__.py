"""Reports of runs as self-contained HTML, comparisons of two runs, and pages of attention.

Only `attention` and `explain` import JAX; the other modules read plain files.
"""
