"""What a model is worth: evaluators that the training loop calls without knowing what they measure."""
