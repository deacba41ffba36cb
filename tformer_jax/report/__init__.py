"""Reports of runs as self-contained HTML, and comparisons of two runs. Reads plain files only, so JAX is not needed."""
