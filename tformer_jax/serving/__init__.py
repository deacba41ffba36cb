"""A trained model behind HTTP: a thin face on the engine of continuous batching."""
