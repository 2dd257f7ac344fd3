"""The console: pages and an API for people who decide about dead messages; jobs move the messages, it never does."""
