"""Builders of datasets that TFDS lacks. Importing a module registers its dataset; `checksums.tsv` pins downloads."""
