"""Pages that explain the mechanisms of Transformers with pictures computed by the package's own functions."""
