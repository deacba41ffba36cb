"""TFDS builders of further datasets. Importing a module registers its dataset; `checksums.tsv` pins downloads."""
