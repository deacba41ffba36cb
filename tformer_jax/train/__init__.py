"""From a config to a trained model: schedules, optimizer, the pure step, checkpoints and the loop."""
