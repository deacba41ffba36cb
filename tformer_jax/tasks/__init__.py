"""Tasks: what a model is trained for, one module each; `kinds.TASKS` names them."""
