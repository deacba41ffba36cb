"""What every layer uses: errors, paths, packages, numbers, caches of values, the memory of the process."""
