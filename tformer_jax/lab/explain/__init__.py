"""Pages that explain the mechanisms of Transformers with figures computed by the package's own functions."""
