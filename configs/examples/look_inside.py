"""Looks into a translator: attention, residual stream, logit lens: python configs/examples/look_inside.py

Needs no files and no network; trains the run of `translator.py` first if there is none.
"""

import sys
from pathlib import Path

from translator import train

import tformer_jax as tj


def main(runs: Path, *changes: str) -> None:
    """Prints what the run `translator` in the folder `runs` computes for one pair."""
    folder = runs / "translator"
    run = tj.load(folder) if (folder / "result.json").exists() else train(folder, *changes)
    watched = next(run.watch([("in 3 weeks", "in 3 Wochen")]))
    text = run.tokenizers.target.decode
    sources, targets = ([text([token]) for token in watched.tokens[side]] for side in ("source", "target_in"))

    print("Cross-attention of the last layer, mean of its heads:")
    for target, weights in zip(targets, watched.weights["cross"][-1].mean(axis=0), strict=True):  # [L, N, T, S]
        print(f"  {target!r:<10} reads {sources[weights.argmax()]!r:<10} ({weights.max():.2f})")
    print("Norm of the decoder's residual stream, by sub-layer, mean over tokens:")
    print(" ", watched.norms["decoder"].mean(axis=-1).round(1))  # [P + 1, T]
    print("What the output head would predict after each layer of the decoder:")
    for layer, (ids, shares) in enumerate(zip(watched.predictions, watched.probabilities, strict=True)):
        best = zip(ids[:, 0], shares[:, 0], strict=True)  # the most probable one at each position
        print(f"  layer {layer}:", *(f"{text([token])!r} {share:.2f} " for token, share in best))


if __name__ == "__main__":
    main(Path("runs"), *sys.argv[1:])
