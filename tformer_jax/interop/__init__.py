"""Models of other libraries, read and written. The tables are declarative, and each is used in both directions."""
