"""What is tested: each module calls the function on one kind of input, and returns rows and findings."""
