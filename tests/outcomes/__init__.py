"""The table of situations: what is claimed of a retry beside what its consumers really did."""
