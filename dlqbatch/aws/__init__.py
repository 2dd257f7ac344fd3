"""What cloud platforms send and offer."""
