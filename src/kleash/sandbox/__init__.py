"""Running chat templates of a checkpoint in a separate process with limits on time and memory."""
