"""The library in C for float32 on a CPU: row functions and matrix products, built once on a machine."""
