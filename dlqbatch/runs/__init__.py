"""The jobs: each run is one bounded pass that yields a report."""
