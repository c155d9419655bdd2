"""Source files of prompts, responses and text, read as token sequences."""
