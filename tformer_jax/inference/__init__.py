"""From a trained model to text: sampling, cached generation, and the objects that take and give strings."""
