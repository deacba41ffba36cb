"""Reports of runs as self-contained HTML, comparisons of two runs, and pages of attention.

Only `attention` needs JAX; the other modules read plain files.
"""
