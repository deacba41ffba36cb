"""Random changes of training examples; `kinds.TRANSFORMS` names them."""
