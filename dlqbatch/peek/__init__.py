"""`dlqbatch peek`: what is in a live queue, left in its place and in its order."""
