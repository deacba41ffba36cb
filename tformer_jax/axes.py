"""Dimension letters, and the logical axis names of parameters and activations.

Letters in names, shape comments and einsum strings throughout this package:

    B  batch                  D  model width            F  FFN width
    T  query (target) length  N  query heads            V  vocabulary
    S  key (source) length    K  key/value heads        L  layers
    H  head size              G  N / K: query heads per key/value head
    E  experts

Modules name logical axes only; `parallel/rules.py` maps them to mesh axes.
"""

BATCH = "batch"
LENGTH = "length"
EMBED = "embed"
HEADS = "heads"
KV_HEADS = "kv_heads"
HEAD_DIM = "head_dim"
MLP = "mlp"
EXPERTS = "experts"
LAYERS = "layers"
VOCAB = "vocab"
CLASSES = "classes"
