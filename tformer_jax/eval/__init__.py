"""Evaluators: metrics of a model on a split, called by the training loop through one interface."""
