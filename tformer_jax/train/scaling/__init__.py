"""Training on many devices, on paper: memory, bytes moved and a bound on utilisation, before anything runs."""
