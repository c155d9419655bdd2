"""The elementwise work on a CPU's float32 rows, in C: built once for a machine, where a C compiler is there."""
