"""Take failed messages from the retry queues and decide for each: delay it, return it, or dead-letter it."""
