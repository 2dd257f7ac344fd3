"""The main job, seen: three messages on a real broker, their consumers, and drain after drain."""
