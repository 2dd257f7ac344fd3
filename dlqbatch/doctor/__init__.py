"""Look at a broker and a database, and name what will go wrong, each with its fix as a command."""
