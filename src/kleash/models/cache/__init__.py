"""The reference's final hidden states on disk."""
